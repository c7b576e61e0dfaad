"""Learning takes the time that nobody else wants, and a request never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import (
    DecodeConfig,
    DrafterError,
    Engine,
    FolderError,
    RoundTrace,
    SessionConfig,
    StateError,
)
from edgedraft.runtime import learning as learning_module
from edgedraft.runtime.learning import Learning
from graphs import tiny_target
from tiny_drafter import tiny_drafter

ONE_THREAD = SessionConfig(threads=1)
CONFIG = DecodeConfig(max_tokens=20, ignore_eos=True)
SOON_S = 5.0  # for a busy machine


class FakeLearner:
    """Writes down what it hears, and works until it is interrupted or has been told to be done."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.seconds: list[float] = []
        self.working = threading.Event()
        self.stopped = threading.Event()
        self.is_done = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()
        self.is_better = False
        self.error: Exception | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        self.heard.append("begin")

    def observe(self, trace: RoundTrace) -> None:
        self.heard.append("observe")

    def end(self) -> None:
        self.heard.append("end")

    def add(self, request: Any) -> None:
        self.heard.append("add")

    def passes(self, request: Any) -> tuple[int, int, int]:
        return 0, 0, 0

    def work(self, seconds: float, interrupted: Callable[[], bool]) -> bool:
        self.seconds.append(seconds)
        self.stopped.clear()
        self.working.set()
        if self.error:
            raise self.error
        while not interrupted() and not self.is_done.is_set():
            time.sleep(1e-3)
        assert self.may_return.wait(SOON_S)
        self.working.clear()
        self.stopped.set()
        is_better, self.is_better = self.is_better, False
        return is_better

    def interrupt(self) -> None:
        self.heard.append("interrupt")

    def save(self) -> None:
        self.heard.append("save")

    def close(self) -> None:
        self.heard.append("close")


class FakeDrafter:
    def __init__(self) -> None:
        self.used: list[Any] = []

    def use(self, model: Any) -> None:
        self.used.append(model)


def make_learning(learner: FakeLearner, drafter: FakeDrafter, **wishes: Any) -> Learning:
    models = iter(("first model", "second model"))
    reopen: Any = lambda: next(models)  # noqa: E731
    return Learning(learner, drafter, reopen, **{"rest_s": 0.02} | wishes)  # type: ignore[arg-type]


@pytest.fixture
def learner() -> FakeLearner:
    return FakeLearner()


@pytest.fixture
def drafter() -> FakeDrafter:
    return FakeDrafter()


@pytest.fixture
def learning(learner: FakeLearner, drafter: FakeDrafter) -> Iterator[Learning]:
    made = make_learning(learner, drafter)
    yield made
    made.close()
    assert not made._thread.is_alive()


def request(learning: Learning) -> None:
    learning.begin([1])
    learning.end()


def test_nothing_is_learned_before_a_request_and_after_it_only_once_a_moment_has_passed(
    learner: FakeLearner, drafter: FakeDrafter
) -> None:
    learning = make_learning(learner, drafter, rest_s=60.0)
    for _ in range(10):  # one after the other: each begins within the rest
        request(learning)
        time.sleep(0.02)
    learning.close()
    assert learner.seconds == []
    learning = make_learning(learner, drafter)
    try:
        time.sleep(0.1)
        assert learner.seconds == []
        request(learning)
        assert learner.working.wait(SOON_S)
    finally:
        learning.close()


def test_a_request_that_comes_while_it_works_begins_at_once_and_the_work_goes_on_later(
    learning: Learning, learner: FakeLearner
) -> None:
    request(learning)
    assert learner.working.wait(SOON_S)
    learner.may_return.clear()
    learning.begin([1])
    assert learner.working.is_set()  # it was not waited for
    learner.may_return.set()
    assert learner.stopped.wait(SOON_S)
    assert learner.heard[-2:] == ["interrupt", "begin"]
    time.sleep(0.1)
    assert not learner.working.is_set()  # as long as the request lasts
    learning.end()
    assert learner.working.wait(SOON_S)


def test_when_there_is_nothing_left_to_do_it_sleeps_until_the_next_request(
    learning: Learning, learner: FakeLearner
) -> None:
    learner.is_done.set()
    request(learning)
    assert learner.stopped.wait(SOON_S)
    time.sleep(0.2)
    assert len(learner.seconds) == 1
    learner.stopped.clear()
    request(learning)
    assert learner.stopped.wait(SOON_S)


def test_what_was_learned_is_used_from_the_next_request_on(
    learning: Learning, learner: FakeLearner, drafter: FakeDrafter
) -> None:
    learner.is_better = True
    learner.is_done.set()
    request(learning)
    assert learner.stopped.wait(SOON_S)
    time.sleep(0.05)
    assert drafter.used == []
    learner.is_better = False
    request(learning)
    request(learning)
    assert drafter.used == ["first model"]


def test_what_is_to_be_done_once_a_better_drafter_is_there_is_done(
    learner: FakeLearner, drafter: FakeDrafter
) -> None:
    models: list[int] = []

    def reopen() -> Any:
        models.append(len(learner.seconds))
        return models

    learning = make_learning(learner, drafter)
    learning._reopen = reopen
    learner.is_better = True
    learner.is_done.set()
    try:
        request(learning)
        deadline = time.monotonic() + SOON_S
        while len(learner.seconds) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(learner.seconds) == 2
        assert models == [1]  # it was opened before the rest was done
    finally:
        learning.close()


def test_always_works_behind_each_request_as_well_for_a_bounded_time(
    learner: FakeLearner, drafter: FakeDrafter
) -> None:
    learning = make_learning(learner, drafter, rest_s=60.0, at_once=True)
    learner.is_done.set()
    learner.is_better = True
    try:
        request(learning)
        learning.work_at_once()
        (seconds,) = learner.seconds
        assert 0 < seconds < 10
        request(learning)
        assert drafter.used == ["first model"]
    finally:
        learning.close()


def test_idle_does_not_work_behind_a_request(learning: Learning, learner: FakeLearner) -> None:
    learning.work_at_once()
    assert learner.seconds == []


@pytest.mark.parametrize(
    ("error", "told", "is_bug"),
    [
        (StateError("the disk is full"), "the disk is full", False),
        (KeyError("a bug"), "'a bug'", True),
    ],
)
def test_a_learner_that_fails_is_told_of_once_and_left_alone(
    learner: FakeLearner,
    drafter: FakeDrafter,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: str,
    is_bug: bool,
) -> None:
    learning = make_learning(learner, drafter, at_once=True)
    learner.error = error
    for _ in range(4):
        request(learning)
        learning.work_at_once()
    learning.close()
    assert caplog.messages == [f"{told}; nothing more is learned"]
    assert bool(caplog.records[0].exc_info) == is_bug  # where it came from
    assert len(learner.seconds) == 1


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "target", seed=0)


@pytest.fixture
def open_engine(
    target: Path, tmp_path: Path, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """Open engines that the fake learner learns for."""

    class Point:
        @staticmethod
        def load() -> Any:
            return lambda *args: learner

    monkeypatch.setattr(learning_module, "entry_points", lambda group: [Point])
    engines: list[Engine] = []
    folder = tiny_drafter(tmp_path / "drafter")

    def make(**wishes: Any) -> Engine:
        chosen = {"drafters": [folder], "learn": "idle"} | wishes
        state = tmp_path / "state"
        engines.append(Engine.open(target, session=ONE_THREAD, state_dir=state, **chosen))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_the_learner_hears_every_round_of_a_request_whose_tokens_are_the_same(
    open_engine: Callable[..., Engine], learner: FakeLearner
) -> None:
    plain = open_engine(learn="off")
    assert plain.learning is None
    engine = open_engine()
    expected = plain.generate("the thing", CONFIG)
    answer = engine.generate("the thing", CONFIG)
    assert answer.token_ids == expected.token_ids
    heard = [x for x in learner.heard if x != "interrupt"]
    assert heard == ["begin", *["observe"] * answer.stats.rounds, "end"]


def test_a_request_that_is_left_or_refused_ends_for_the_learner_too(
    open_engine: Callable[..., Engine], learner: FakeLearner
) -> None:
    engine = open_engine()
    stream: Any = engine.stream("the thing", CONFIG)
    next(stream)
    stream.close()
    assert learner.heard[-1] == "end"
    with pytest.raises(Exception, match="outside the vocabulary"):
        engine.generate([10**6], CONFIG)
    assert learner.heard[-1] == "end"


def test_saving_an_engine_saves_what_is_to_be_learned_from(
    open_engine: Callable[..., Engine], learner: FakeLearner
) -> None:
    open_engine().save()
    assert learner.heard == ["save"]


def test_what_cannot_be_saved_keeps_nothing_else_from_it(
    open_engine: Callable[..., Engine],
    learner: FakeLearner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = open_engine()

    def refuse() -> None:
        raise StateError("no space left")

    monkeypatch.setattr(engine.proposer, "save", refuse)
    engine.save()
    assert learner.heard == ["save"] and caplog.messages == ["no space left"]


def test_a_learner_that_fails_at_the_end_of_a_request_leaves_the_engine_free(
    open_engine: Callable[..., Engine], learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()

    def fail() -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as context:
        context.setattr(learner, "end", fail)
        with pytest.raises(KeyError):
            engine.generate("the thing", CONFIG)
    assert engine.generate("the thing", CONFIG).token_ids


def test_a_target_that_verifies_nothing_has_no_drafter_that_could_learn(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "last", last_row_only=True, logit_rows=False)
    with pytest.raises(DrafterError, match="no drafter that could learn"):
        Engine.open(target, session=ONE_THREAD, state_dir=tmp_path / "state", learn="idle")


def test_after_learning_the_drafter_is_opened_anew_from_the_store(
    open_engine: Callable[..., Engine], learner: FakeLearner
) -> None:
    engine = open_engine(learn="always")
    drafter: Any = engine.proposer.drafter  # type: ignore[union-attr]
    before = drafter.model
    learner.is_better = True
    learner.is_done.set()
    engine.generate("the thing", CONFIG)
    assert drafter.model is before
    engine.generate("the thing", CONFIG)
    assert drafter.model is not before


def test_what_cannot_learn_is_refused_with_what_to_do(
    open_engine: Callable[..., Engine], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for drafters in (["ngram"], ["none"]):
        with pytest.raises(DrafterError, match="name the folder of one"):
            open_engine(drafters=drafters)
    with pytest.raises(FolderError, match="cannot learn.*export it again"):
        open_engine(drafters=[target])
    with pytest.raises(StateError, match="EDGEDRAFT_STATE"):
        open_engine(keep=False)
    monkeypatch.setattr(learning_module, "entry_points", lambda group: [])
    with pytest.raises(DrafterError, match="no installed package"):
        open_engine()


def test_the_package_brings_a_learner() -> None:
    (point,) = entry_points(group="edgedraft.learner")
    assert callable(point.load())
