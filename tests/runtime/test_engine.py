"""Text in, text out: templates, stop strings, statistics, one request at a time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgedraft.runtime import (
    DecodeConfig,
    DrafterError,
    EdgeDraftError,
    Engine,
    FolderError,
    PromptError,
    ProviderError,
    SamplingConfig,
    SessionConfig,
    SuffixLookup,
)
from edgedraft.runtime.plan import Plan
from graphs import byte_level_tokenizer, tiny_target, write_target_folder

ONE_THREAD = SessionConfig(threads=1)
HI = "the thing and the other thing"
Open = Callable[..., Engine]


@pytest.fixture
def open_engine(tiny_folder: Callable[..., Path]) -> Open:
    """Return a maker of engines that never stop at an end token by chance."""

    def make(drafter: str = "lookup", **wishes: Any) -> Engine:
        return Engine.open(tiny_folder(**wishes), drafters=[drafter], session=ONE_THREAD)

    return make


def test_an_answer_has_ids_text_and_counts_that_fit_together(open_engine: Open) -> None:
    engine = open_engine()
    answer = engine.generate(HI, DecodeConfig(max_tokens=40, ignore_eos=True))
    assert len(answer.token_ids) == answer.stats.emitted == 40
    assert answer.text == engine.tokenizer.decode(answer.token_ids)
    assert answer.finish_reason == "length"
    assert answer.stats.prompt_tokens == len(engine.encode(HI))
    assert answer.stats.rounds + answer.stats.accepted == 40
    assert answer.stats.accepted <= answer.stats.evaluated <= answer.stats.proposed
    assert sum(answer.stats.accepted_by_origin.values()) == answer.stats.accepted
    assert answer.stats.decode_s > 0 and answer.stats.prefill_s > 0


@pytest.mark.parametrize("contract", ["own", "genai", "concat"])
def test_lookup_changes_no_token_and_no_text(open_engine: Open, contract: str) -> None:
    engine, plain = open_engine(contract=contract), open_engine("none", contract=contract)
    assert plain.proposer is None
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, top_p=0.95, seed=1)):
        config = DecodeConfig(max_tokens=60, ignore_eos=True, sampling=sampling)
        for prompt in (HI, HI + HI, "again: " + HI):
            a, b = engine.generate(prompt, config), plain.generate(prompt, config)
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)


def test_a_second_request_reuses_what_both_prompts_begin_with(open_engine: Open) -> None:
    engine = open_engine()
    config = DecodeConfig(max_tokens=10, ignore_eos=True)
    first = engine.generate(HI, config)
    assert first.stats.reused_tokens == 0
    second = engine.generate(HI, config)
    assert second.stats.reused_tokens == second.stats.prompt_tokens - 1
    assert second.token_ids == first.token_ids
    engine.forget()
    third = engine.generate(HI, config)
    assert third.stats.reused_tokens == 0
    assert third.token_ids == first.token_ids


def test_leaving_an_engine_writes_what_was_learned(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    engine = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path / "kept")
    with engine as entered:
        assert entered is engine
        engine.generate(HI, DecodeConfig(max_tokens=10))
        assert not list(tmp_path.rglob("ngrams.bin"))
    assert list(tmp_path.rglob("ngrams.bin"))


def test_forgetting_leaves_no_text_to_copy_from(open_engine: Open) -> None:
    engine = open_engine()
    engine.generate(HI, DecodeConfig(max_tokens=10))
    engine.forget()
    assert isinstance(engine.proposer, SuffixLookup)
    assert engine.proposer.propose(engine.encode(HI)[:4], 8).tokens == ()


def test_stop_strings_end_the_answer_wherever_tokens_and_rounds_meet(open_engine: Open) -> None:
    engine, plain = open_engine(), open_engine("none")
    whole = plain.generate(HI, DecodeConfig(max_tokens=60, ignore_eos=True)).text
    for start in range(0, len(whole) - 6, 5):
        for length in (1, 2, 5):
            stop = whole[start : start + length]
            if "\ufffd" in stop or not stop:
                continue
            config = DecodeConfig(max_tokens=60, ignore_eos=True, stop=(stop, "never occurs"))
            a, b = engine.generate(HI, config), plain.generate(HI, config)
            assert a.text == b.text == whole[: whole.index(stop)]
            assert (a.token_ids, a.finish_reason) == (b.token_ids, "stop")
            assert len(a.token_ids) == a.stats.emitted


def test_pieces_come_as_rounds_end_and_make_the_answer(open_engine: Open) -> None:
    engine = open_engine()
    config = DecodeConfig(max_tokens=30, ignore_eos=True)
    pieces = list(engine.stream(HI, config))
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert (pieces[-1].trace, pieces[-1].finish_reason) == (None, "length")
    assert "".join(p.text for p in pieces) == engine.generate(HI, config).text


def test_a_second_request_at_once_is_one_clear_error(open_engine: Open) -> None:
    engine = open_engine()
    config = DecodeConfig(max_tokens=30, ignore_eos=True)
    expected = engine.generate(HI, config).text
    running = engine.stream(HI, config)
    first = next(running)
    with pytest.raises(EdgeDraftError, match="answering another request: wait, or open a second"):
        engine.generate("another")
    assert first.text + "".join(p.text for p in running) == expected
    assert engine.generate(HI, config).text == expected


def test_a_stream_that_is_dropped_frees_the_engine(open_engine: Open) -> None:
    engine = open_engine()
    running = engine.stream(HI, DecodeConfig(max_tokens=30))
    next(running)
    running.close()  # type: ignore[attr-defined]
    engine.generate("another", DecodeConfig(max_tokens=3))
    with pytest.raises(PromptError):
        engine.generate([])
    with pytest.raises(ValueError, match="biased or banned"):
        engine.generate(HI, DecodeConfig(sampling=SamplingConfig(banned_tokens=(10**6,))))
    engine.generate("another", DecodeConfig(max_tokens=3))


def test_another_thread_cancels_a_running_answer(open_engine: Open) -> None:
    engine = open_engine(context_length=512)
    config = DecodeConfig(max_tokens=400, ignore_eos=True)
    started = threading.Event()
    pieces: list[Any] = []

    def work() -> None:
        for piece in engine.stream(HI, config):
            pieces.append(piece)
            started.set()

    worker = threading.Thread(target=work)
    worker.start()
    assert started.wait(10)
    engine.cancel()
    worker.join(10)
    assert not worker.is_alive()
    assert pieces[-1].finish_reason == "cancelled"
    assert engine.stats.emitted < 400
    assert (
        engine.generate(HI, DecodeConfig(max_tokens=5, ignore_eos=True)).finish_reason == "length"
    )


def test_text_is_one_user_message_unless_raw(open_engine: Open) -> None:
    engine = open_engine()
    special = engine.tokenizer.token_to_id("<|im_start|>")
    ids = engine.encode("the")
    assert ids[0] == special
    assert ids == engine.encode([{"role": "user", "content": "the"}])
    assert engine.encode("the", raw=True) == engine.tokenizer.encode("the").ids
    assert ids.count(special) == 2


def test_without_a_template_text_is_continued_and_messages_are_refused(tmp_path: Path) -> None:
    folder = write_target_folder(tmp_path / "t", chat_template=None)
    engine = Engine.open(folder, drafters=["none"], session=ONE_THREAD)
    assert engine.encode("the") == engine.encode("the", raw=True)
    with pytest.raises(FolderError, match="has no chat template, so it takes text, not messages"):
        engine.encode([{"role": "user", "content": "the"}])


def test_bos_comes_exactly_once(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(bos=True)
    bos = tokenizer.token_to_id("<|endoftext|>")
    with_bos = "{{ bos_token }}{{ messages[0]['content'] }}"
    for template, text in ((with_bos, "the"), (None, "the")):
        folder = write_target_folder(
            tmp_path / str(template is None), tokenizer=tokenizer, chat_template=template
        )
        engine = Engine.open(folder, drafters=["none"], session=ONE_THREAD)
        ids = engine.encode(text)
        assert ids == [bos, *tokenizer.encode("the", add_special_tokens=False).ids]
        assert engine.encode(text, raw=True) == ids


def test_token_ids_are_a_prompt_numpy_ones_included(open_engine: Open) -> None:
    engine = open_engine()
    config = DecodeConfig(max_tokens=8, ignore_eos=True)
    expected = engine.generate([5, 6, 7], config).token_ids
    assert engine.generate(np.array([5, 6, 7]), config).token_ids == expected  # type: ignore[arg-type]
    assert engine.generate((5, 6, 7), config).token_ids == expected


def test_an_empty_prompt_is_refused_without_bos(open_engine: Open) -> None:
    engine = open_engine()
    for prompt in ([], engine.encode("", raw=True)):
        with pytest.raises(PromptError, match="holds no tokens"):
            engine.generate(prompt)


def test_a_truncating_or_padding_tokenizer_file_is_read_without_either(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    folder = write_target_folder(tmp_path / "t", tokenizer=tokenizer)
    engine = Engine.open(folder, drafters=["none"], session=ONE_THREAD)
    assert len(engine.encode("xyzxyzxyz", raw=True)) == 9


def test_a_tokenizer_with_gaps_in_its_ids_keeps_every_id(tmp_path: Path) -> None:
    """Its number of tokens is not one more than its largest id."""
    import json

    folder = tiny_target(tmp_path / "t", contract="concat", vocab_size=320)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["id"] = 310
    path.write_text(json.dumps(content))
    try:
        engine = Engine.open(folder, drafters=["none"], session=ONE_THREAD)
    except FolderError:
        pytest.skip("this version of tokenizers refuses gaps")
    assert engine.target.vocab_size == max(engine.tokenizer.get_vocab().values()) + 1


@pytest.mark.parametrize("context_length", [2, 3, 5, 12, 17, 18, 20, 70])
def test_a_short_context_can_be_opened_and_used(tmp_path: Path, context_length: int) -> None:
    folder = tiny_target(tmp_path / "t", context_length=context_length)
    engine = Engine.open(folder, session=ONE_THREAD)
    answer = engine.generate([5], DecodeConfig(max_tokens=100, ignore_eos=True))
    assert answer.finish_reason in ("context", "length")
    assert len(answer.token_ids) == min(100, context_length - 1)


def test_the_plan_is_measured_once_and_remembered(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path / "s").plan
    assert first is not None and set(first.pass_s) == {1, 2, 3, 4, 6, 8, 12, 16}
    assert all(s > 0 for s in first.pass_s.values())
    assert first.token_s.keys() == first.pass_s.keys()

    def again(model: object) -> Plan:
        raise AssertionError("measured again")

    monkeypatch.setattr("edgedraft.runtime.plan.measure_plan", again)
    # A machine that is slower now was no slower then.
    monkeypatch.setattr("edgedraft.runtime.plan._fastest_s", lambda model: 9.0)
    reopened = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=str(tmp_path / "s"))
    assert reopened.plan == first
    with pytest.raises(AssertionError, match="measured again"):  # other threads, other costs
        Engine.open(tiny_folder(), session=SessionConfig(threads=2), state_dir=tmp_path / "s")


def test_a_plan_measured_while_something_else_had_the_machine_is_measured_again(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Plan({1: 9.0, 2: 9.0, 4: 18.0}, {1: 0.0, 2: 0.0, 4: 0.0})
    with monkeypatch.context() as patch:
        patch.setattr("edgedraft.runtime.plan.measure_plan", lambda model: slow)
        engine = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path / "s")
        assert engine.plan == slow
    for _ in range(2):
        engine = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path / "s")
        assert engine.plan is not None and engine.plan.pass_s[2] < 1
        assert engine.target.length == 0
        monkeypatch.setattr("edgedraft.runtime.plan._fastest_s", lambda model: 9.0)


@pytest.mark.parametrize(
    "content", ["{}", "nonsense", '{"version": 1, "sha256": "0", "value": {"a": {"x": -1}}}']
)
def test_a_damaged_plan_is_measured_again(
    tiny_folder: Callable[..., Path], tmp_path: Path, content: str
) -> None:
    Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path / "s")
    (path,) = (tmp_path / "s").rglob("plans.json")
    path.write_text(content)
    engine = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path / "s")
    assert engine.plan is not None
    assert path.is_file()


def test_measuring_leaves_an_empty_cache_and_the_loop_as_it_was(open_engine: Open) -> None:
    engine = open_engine()
    assert engine.target.length == 0
    assert not engine.target.single_rows


def test_a_device_that_cannot_remember_still_answers(
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        engine = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path / "file")
    assert "cannot be written" in caplog.text
    assert engine.plan is not None

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("EDGEDRAFT_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    engine = Engine.open(tiny_folder(), session=ONE_THREAD)
    assert "no home directory: set EDGEDRAFT_STATE" in caplog.text
    assert len(engine.generate(HI, DecodeConfig(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_last_rows_only_decodes_plainly_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_target(tmp_path / "t", contract="genai", last_row_only=True)
    with caplog.at_level(logging.WARNING):
        engine = Engine.open(folder, session=ONE_THREAD)
    assert "decoding plainly" in caplog.text
    answer = engine.generate(HI, DecodeConfig(max_tokens=10, ignore_eos=True))
    assert (answer.stats.proposed, answer.stats.rounds) == (0, 10)


def test_an_unknown_provider_names_those_there_are(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ProviderError, match="'tpu' is not in this onnxruntime .*which has .*cpu"):
        Engine.open(tiny_folder(), session=SessionConfig(providers=("tpu",)))
    for name in ("cpu", "CPU", "CPUExecutionProvider"):
        Engine.open(tiny_folder(), session=SessionConfig(threads=1, providers=(name,)))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"providers": ()}, "providers must name at least one"),
    ],
)
def test_a_wrong_session_choice_is_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SessionConfig(**choices)


def test_threads_default_to_the_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SessionConfig(threads=3).num_threads == 3
    assert SessionConfig().num_threads >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS and Windows
    assert SessionConfig().num_threads == os.cpu_count()


def test_an_unknown_drafter_is_named(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(DrafterError, match="magic: no such folder, and no drafter of that name"):
        Engine.open(tiny_folder(), drafters=["magic"])


def test_trees_are_for_graphs_where_they_stay_exact(
    tiny_folder: Callable[..., Path], open_engine: Open
) -> None:
    engine = Engine.open(tiny_folder(), tree=True, session=ONE_THREAD)
    config = DecodeConfig(max_tokens=60, ignore_eos=True)
    assert (
        engine.generate(HI, config).token_ids == open_engine("none").generate(HI, config).token_ids
    )
    with pytest.raises(FolderError, match="trees need an fp32 graph with an attention bias"):
        Engine.open(tiny_folder(contract="genai"), tree=True, session=ONE_THREAD)
