"""Learning is measured before it has learned from what it is measured with, and on what it never
sees.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import RoundTrace, learn_bench_command
from edgedraft.runtime import learning as learning_module
from edgedraft.runtime.adapter_store import AdapterStore
from edgedraft.runtime.cli import main
from edgedraft.runtime.datatypes import Draft
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.errors import StateError
from edgedraft.runtime.learn_bench import Order, Point, run_beside_ngrams
from edgedraft.runtime.learn_bench_report import (
    describe_order,
    least_ratio,
    moving,
    requests_until_above,
    spread,
    summarize_orders,
)
from edgedraft.runtime.training_files import TrainingFiles
from graphs import tiny_target
from tiny_drafter import tiny_drafter, tiny_lora

SUMMARY = {"rise", "least_ratio", "cpu_s", "cpu_s_per_request", "slowest_cpu_s", "streams"}
DOCUMENT = {
    "summary",
    "alone",
    "beside_ngrams",
    "orders",
    "streams",
    "skipped",
    "settings",
    "interrupted",
    "error",
    "provenance",
}
BURNT_S = 0.05
Request = tuple[tuple[int, ...], int]


class FakeLearner:
    """Writes down what it is asked, and takes up an adapter after its second request."""

    def __init__(self, files: TrainingFiles, store: AdapterStore, kept: Path) -> None:
        self.heard: list[tuple[str, Request]] = []
        self.kept = kept
        self.is_to_learn = True
        self._files = files
        self._store = store
        self._requests = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._prompt, self._tokens = tuple(prompt), 0

    def observe(self, trace: RoundTrace) -> None:
        assert len(trace.logits) == len(trace.emitted)
        self._tokens += len(trace.emitted)

    def end(self) -> Request:
        self.heard.append(("end", (self._prompt, self._tokens)))
        return self._prompt, self._tokens

    def add(self, request: Request) -> None:
        self.heard.append(("add", request))
        self._requests += 1

    def passes(self, request: Request) -> tuple[int, int, int]:
        self.heard.append(("passes", request))
        return 12, 6, 6 if self._store.active() is None else 4

    def work(self, seconds: float, interrupted: Callable[[], bool]) -> bool:
        assert seconds == float("inf") and not interrupted()
        if self._requests != 2 or not self.is_to_learn:
            return False
        until = time.process_time() + BURNT_S
        while time.process_time() < until:
            pass
        self._store.add(tiny_lora(self._files.shapes))
        return True

    def interrupt(self) -> None:
        raise AssertionError("nobody waits")

    def save(self) -> None:
        raise AssertionError("nothing is to be kept")


def fake_learners(monkeypatch: pytest.MonkeyPatch) -> list[FakeLearner]:
    """Return the fake learners that will be opened: of the answers, and of every order; the last of
    three learns nothing.
    """
    opened: list[FakeLearner] = []

    class Entry:
        @staticmethod
        def load() -> Any:
            def make(
                files: TrainingFiles, vocab_map: Any, store: AdapterStore, kept: Path, target: str
            ) -> FakeLearner:
                opened.append(FakeLearner(files, store, kept))
                opened[-1].is_to_learn = len(opened) != 3
                return opened[-1]

            return make

    monkeypatch.setattr(learning_module, "entry_points", lambda group: [Entry])
    return opened


@pytest.fixture
def learners(monkeypatch: pytest.MonkeyPatch) -> list[FakeLearner]:
    return fake_learners(monkeypatch)


def write_prompts(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def command_in(folder: Path) -> str:
    """Return a command line without the streams; the drafter is its target, in eight bits."""
    target = tiny_target(folder / "target", seed=3)
    drafter = tiny_drafter(folder / "drafter", seed=3)
    held_out = write_prompts(folder / "held.jsonl", "the ship", "a ring")
    return (
        f"bench --target {target} --drafter {drafter} --prompts {held_out} --orders 2 --max-tokens "
        f"12 --threads 1 --ignore-eos --state {folder / 'state'} --json {folder / 'result.json'} "
    )


def streams_in(folder: Path) -> str:
    first = write_prompts(folder / "first.jsonl", "one", "two", "three", "a ring", "four", "five")
    second = write_prompts(folder / "second.jsonl", "uno", "due", "tre")
    return f"--learn {first} {second}"


@pytest.fixture
def command(tmp_path: Path) -> str:
    return command_in(tmp_path)


@pytest.fixture
def streams(tmp_path: Path) -> str:
    return streams_in(tmp_path)


def run(command: str, folder: Path) -> Any:
    assert main(command.split()) == 0
    return json.loads((folder / "result.json").read_text())


@dataclass(frozen=True)
class Ran:
    """A run, and who learned in it."""

    folder: Path
    document: Any
    learners: list[FakeLearner]
    budgets: list[tuple[int, int]]  # of every draft beside no n-grams, and how long it was


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("run")
    draft = DraftModel._draft
    budgets: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:

        def noting(self: DraftModel, row: Any, budget: int, choose: Any) -> Draft:
            drafted = draft(self, row, budget, choose)
            budgets.append((budget, len(drafted.tokens)))
            return drafted

        def unnoted(*args: Any) -> Any:
            monkeypatch.setattr(DraftModel, "_draft", draft)
            return run_beside_ngrams(*args)

        monkeypatch.setattr(DraftModel, "_draft", noting)
        monkeypatch.setattr(learn_bench_command, "run_beside_ngrams", unnoted)
        learners = fake_learners(monkeypatch)
        options = f"--max-draft-tokens 9 {streams_in(folder)}"
        return Ran(folder, run(command_in(folder) + options, folder), learners, budgets)


def test_the_document_has_what_scripts_rely_on(ran: Ran) -> None:
    document = ran.document
    assert set(document) == DOCUMENT and set(document["summary"]) == SUMMARY
    assert document["interrupted"] is False and document["error"] is None
    assert document["skipped"] == []
    assert document["provenance"]["drafter"]["fingerprint"]
    assert document["settings"]["learn"] == streams_in(ran.folder).split()[1:]
    first, second = document["orders"]
    assert (first["requests"], first["tokens"]) == (8, 8 * 12)
    # Two requests with the drafter as shipped, six with another.
    learned = pytest.approx(96 / (2 * 6 + 6 * 4))
    assert first["tokens_per_pass"] == {"shipped": 2, "learned": learned}
    assert first["learning"]["changes"] == 1 and second["learning"]["changes"] == 0
    assert first["learning"]["slowest_cpu_s"] >= BURNT_S > second["learning"]["slowest_cpu_s"]
    assert list(first["streams"]) == ["1 first", "2 second"]
    assert first["streams"]["2 second"]["rise"] == pytest.approx(1)
    assert document["summary"]["rise"]["min"] == 0 < document["summary"]["rise"]["max"]


def test_frozen_drafters_are_what_was_learned_in_each_order_and_the_shipped_one(ran: Ran) -> None:
    found = ran.document["alone"]["overall"]
    assert found["prompts"] == found["identical_prompts"] == 2
    # It is its target's copy until an adapter of noise spoils it; the second order has none.
    spoilt, untaught = found["orders"]
    assert spoilt["tokens_per_pass"] < found["shipped"]["tokens_per_pass"]
    assert untaught == found["shipped"]
    assert found["rise"]["acceptance_rate"]["min"] < found["rise"]["acceptance_rate"]["max"] == 0
    combined = ran.document["beside_ngrams"]["overall"]
    assert combined["identical_outputs"]
    assert combined["tokens_per_pass"] < combined["versus"]["shipped"]["tokens_per_pass"]


def test_the_drafter_alone_fills_a_draft_of_one_length_whatever_it_costs(ran: Ran) -> None:
    assert max(budget for budget, _ in ran.budgets) == ran.document["alone"]["draft_tokens"] == 4
    assert all(length >= budget for budget, length in ran.budgets)


def test_a_request_is_judged_before_the_drafter_learns_from_it_in_another_order_each_time(
    ran: Ran,
) -> None:
    answers, *orders = ran.learners
    requests = [request for what, request in answers.heard]
    assert all(what == "end" for what, _ in answers.heard)
    assert all(tokens == 12 for _, tokens in requests)
    sequences = []
    for learner in orders:
        assert [what for what, _ in learner.heard] == ["passes", "add"] * 8
        judged, added = learner.heard[::2], learner.heard[1::2]
        assert [x for _, x in judged] == [x for _, x in added]
        sequences.append([x for _, x in added])
        assert set(sequences[-1][:5]) == set(requests[:5])  # the second stream comes behind
        assert set(sequences[-1]) == set(requests)
    assert sequences[0] != sequences[1]


def test_every_order_begins_anew_and_leaves_nothing_behind(ran: Ran) -> None:
    kept = [learner.kept for learner in ran.learners]
    assert len(set(kept)) == 3 and not any(path.exists() for path in kept)
    assert not list((ran.folder / "state").glob("*/adapters"))


def test_a_picture_is_drawn_and_the_lines_go_where_no_answer_goes(
    command: str,
    streams: str,
    learners: list[FakeLearner],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    run(f"{command} {streams} --stream-limit 2 --limit 1 --plot {picture}", tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert captured.out == "" and "2 orders of 4 requests" in captured.err


def test_what_is_held_out_is_not_learned_from(
    command: str, learners: list[FakeLearner], tmp_path: Path
) -> None:
    held_out = tmp_path / "held.jsonl"
    document = run(f"{command} --learn {held_out} --limit 1 --stream-limit 1", tmp_path)
    assert document["streams"] == [{"name": "1 held", "requests": 1, "left_out": 1}]
    assert document["alone"]["overall"]["prompts"] == 1


def test_a_request_that_cannot_be_served_is_told_of_and_left_out(
    command: str, learners: list[FakeLearner], tmp_path: Path
) -> None:
    stream = write_prompts(tmp_path / "long.jsonl", "one", "x" * 5000, "two")
    document = run(f"{command} --learn {stream}", tmp_path)
    (skipped,) = document["skipped"]
    assert skipped["prompt"] == "long:2"
    assert [order["requests"] for order in document["orders"]] == [2, 2]


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [(KeyboardInterrupt(), 130, None), (StateError("no space left"), 2, "no space left")],
)
def test_ctrl_c_and_errors_keep_the_orders_that_were_learned(
    end: BaseException,
    status: int,
    error: str | None,
    command: str,
    streams: str,
    learners: list[FakeLearner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = FakeLearner.passes

    def interrupted(self: FakeLearner, request: Request) -> tuple[int, int, int]:
        if len(learners) == 3 and len(self.heard) == 4:
            raise end
        return passes(self, request)

    monkeypatch.setattr(FakeLearner, "passes", interrupted)
    assert main(f"{command} {streams}".split()) == status
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["interrupted"] is True and document["error"] == error
    assert [order["requests"] for order in document["orders"]] == [8]
    assert document["alone"] is None and document["beside_ngrams"] is None


def test_ctrl_c_in_the_first_order_keeps_its_beginning_and_before_it_nothing(
    command: str,
    streams: str,
    learners: list[FakeLearner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = FakeLearner.work

    def interrupted(self: FakeLearner, *args: Any) -> bool:
        if len(self.heard) == 6:
            raise KeyboardInterrupt
        return work(self, *args)

    def at_once(self: FakeLearner, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLearner, "work", interrupted)
    assert main(f"{command} {streams}".split()) == 130
    document = json.loads((tmp_path / "result.json").read_text())
    assert [order["requests"] for order in document["orders"]] == [2]
    assert document["summary"]["streams"]["2 second"]["rise"] is None
    (tmp_path / "result.json").unlink()
    monkeypatch.setattr(FakeLearner, "observe", at_once)
    assert main(f"{command} {streams}".split()) == 130
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--temperature 0.8", "greedy"),
        ("--trials 2 --tree", "leave --tree, --trials out"),
        ("--versus lookup", "leave --versus out"),
        ("--compare genai", "leave --compare out"),
        ("--peer-model x", "leave --peer-model out"),
        ("--drafter ngram", "--drafter FOLDER, got ngram"),
        ("--drafter ngram lookup", "--drafter FOLDER, got ngram lookup"),
        ("--orders 0", "orders must be >= 1, got 0"),
        ("--stream-limit 0", "stream_limit must be >= 1, got 0"),
        ("--learn {tmp}/held.jsonl", "held.jsonl: all of it is held out"),
        ("--learn {tmp}/none.jsonl", "none.jsonl: cannot be read"),
        ("--drafter {tmp}/target", "cannot learn"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_run(
    command: str,
    streams: str,
    learners: list[FakeLearner],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: str,
    complaint: str,
) -> None:
    assert main(f"{command} {streams} {options.format(tmp=tmp_path)}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edgedraft: ") and complaint in line


def test_options_of_learning_alone_are_no_wish_to_learn(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert "--orders" in capsys.readouterr().err


def points(*learned: int, shipped: int = 10) -> list[Point]:
    """Return requests of forty tokens that take so many passes."""
    return [Point(40, shipped, passes, 0.5, False) for passes in learned]


def test_a_window_is_so_many_requests_and_weighs_them_by_their_passes() -> None:
    shipped, learned = moving([*points(10, 5), Point(90, 10, 9, 0.0, False)], 2)
    assert list(shipped) == [4, 130 / 20]
    assert list(learned) == [80 / 15, 130 / 14]
    for few in (points(), points(5)):
        assert len(moving(few, 2)[0]) == 0


def test_a_stream_is_above_once_no_later_window_falls_back() -> None:
    assert requests_until_above(points(5, 5, 5, 5), 2) == 0
    assert requests_until_above(points(12, 10, 9, 9, 9), 2) == 1
    assert requests_until_above(points(5, 5, 20, 5, 9, 9), 2) == 3
    assert requests_until_above(points(5, 5, 10, 10), 2) is None  # no better is not above
    assert requests_until_above(points(5), 2) is None


def test_the_least_ratio_is_that_of_the_worst_window_across_streams() -> None:
    assert least_ratio(points(5, 10, 20, 20, 5), 2) == pytest.approx(0.5)
    assert least_ratio(points(5, 4, 4), 2) > 2  # type: ignore[operator]
    assert least_ratio(points(5), 2) is None


def test_figures_of_an_order_are_of_sums_and_its_streams_are_its_parts() -> None:
    order = Order(0, [2, 3], points(10, 5, 20, 20, 20))
    found = describe_order(order, ["a", "b"])
    assert found["rise"] == pytest.approx(200 / 75 - 4)
    assert found["streams"]["a"]["rise"] == pytest.approx(80 / 15 - 4)
    assert found["streams"]["b"]["rise"] == pytest.approx(-2)
    assert found["learning"]["cpu_s"] == pytest.approx(2.5)
    (window,) = found["windows"]
    assert window["begin"] == 0 and window["requests"] == 5
    summary = summarize_orders([found, found | {"rise": 1.0}], ["a", "b"])
    assert summary["rise"]["min"] == pytest.approx(-4 / 3) and summary["rise"]["max"] == 1.0
    assert spread([None]) is None and spread([None, 2.0]) == {"mean": 2, "min": 2, "max": 2}


def test_windows_of_the_document_are_consecutive_and_the_last_may_be_short() -> None:
    windows = describe_order(Order(0, [60], points(*[5] * 60)), ["a"])["windows"]
    assert [(x["begin"], x["requests"]) for x in windows] == [(0, 25), (25, 25), (50, 10)]
