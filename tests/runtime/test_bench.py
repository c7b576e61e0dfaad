"""The benchmark measures what it says: fair turns, fresh starts, ratios, the JSON contract."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import DecodeConfig, Engine, Proposal, Verdict
from edgedraft.runtime import decode as decode_module
from edgedraft.runtime.bench import (
    ONE_ROW,
    SPECULATIVE,
    TWO_ROWS,
    PromptResult,
    Run,
    Skipped,
    _order,
    run_bench,
)
from edgedraft.runtime.bench_report import report, summarize
from edgedraft.runtime.cli import main
from edgedraft.runtime.datatypes import FinishReason, FloatArray
from edgedraft.runtime.machine import PeakMemory, read_floor_s
from edgedraft.runtime.peers import Peer
from edgedraft.runtime.prompt_files import BenchPrompt
from edgedraft.runtime.sampling import Sampler
from edgedraft.runtime.stats import RunStats

RATIOS = {
    "prompts",
    "speedup_mean",
    "speedup_median",
    "speedup_p10",
    "speedup_p90",
    "end_to_end_speedup_mean",
    "tokens_per_pass",
    "acceptance_rate",
    "accepted_by_origin",
    "versus",
}
SUMMARY = RATIOS | {
    "identical_outputs",
    "identical_prompts",
    "differing_prompts",
    "emitted_tokens",
    "plain_tokens_per_second",
    "plain_two_rows_tokens_per_second",
    "plain_one_row_tokens_per_second",
    "speculative_tokens_per_second",
    "proposed_per_round",
    "draft_ms_per_round",
    "verify_ms_per_round",
    "overhead_ms_per_round",
    "prefill_s",
    "losses",
    "finished",
    "unfinished",
}
DOCUMENT = {
    "classes",
    "overall",
    "floor",
    "plan",
    "settings",
    "prompts",
    "skipped",
    "interrupted",
    "error",
    "provenance",
}
LOOP = "the ship in the sea and " * 4


@pytest.fixture
def engine(tiny_folder: Callable[..., Path]) -> Engine:
    return Engine.open(tiny_folder())


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    rows = [{"prompt": LOOP}, {"prompt": "a ring"}, {"turns": ["of the sea"], "category": "qa"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(*texts: str) -> list[BenchPrompt]:
    return [BenchPrompt(f"p{i}", "p", text) for i, text in enumerate(texts)]


def results_of(runs: Any) -> list[PromptResult]:
    results = list(runs)
    assert all(isinstance(r, PromptResult) for r in results)
    return results


def hand_made(
    name: str,
    two_rows_s: float,
    one_row_s: float,
    speculative_s: float,
    *,
    finish: FinishReason = "length",
    prefill_s: float = 1.0,
    class_name: str = "c",
    rounds: int = 5,
    peers: Mapping[str, float] | None = None,
) -> PromptResult:
    """Ten tokens per run; 4 of 8 proposed tokens accepted."""
    tokens = tuple(range(10))
    stats = RunStats(
        rounds=rounds, proposed=8, accepted=4, emitted=10, draft_s=0.5, forward_s=0.25 * rounds
    )
    one_by_one = RunStats(rounds=10, emitted=10)
    seconds = {TWO_ROWS: two_rows_s, ONE_ROW: one_row_s, SPECULATIVE: speculative_s}
    seconds |= peers or {}
    runs = {
        kind: [Run(tokens, prefill_s, s, 10, finish, stats if kind == SPECULATIVE else one_by_one)]
        for kind, s in seconds.items()
    }
    return PromptResult(BenchPrompt(name, class_name, "x"), 3, runs)


def test_every_kind_of_run_comes_first_equally_often_and_neighbours_swap() -> None:
    kinds = ["a", "b", "c", "d"]
    orders = [_order(kinds, turn) for turn in range(8)]
    assert all(sorted(order) == kinds for order in orders)
    assert sorted(order[0] for order in orders) == sorted(kinds * 2)
    pairs = {(x, y) for order in orders for x, y in zip(order, order[1:], strict=False)}
    assert ("a", "b") in pairs and ("b", "a") in pairs


def test_every_run_starts_from_nothing(engine: Engine) -> None:
    for result in results_of(
        run_bench(engine, prompts(LOOP, LOOP), DecodeConfig(max_tokens=24), trials=2)
    ):
        assert [len(runs) for runs in result.runs.values()] == [2, 2, 2]
        assert all(r.stats.reused_tokens == 0 for runs in result.runs.values() for r in runs)
        first, second = result.runs[SPECULATIVE]
        # With the first answer still in the lookup, the second would be copied whole.
        assert second.stats.accepted <= first.stats.accepted + 2


def test_the_three_loops_are_what_they_are_called(engine: Engine) -> None:
    seen = []
    forward = engine.target.forward

    def watch(tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        seen.append((engine.target.single_rows, len(tokens)))
        return forward(tokens, parents)

    engine.target.forward = watch  # type: ignore[method-assign]
    (result,) = results_of(run_bench(engine, prompts(LOOP), DecodeConfig(max_tokens=24), warm_up=0))
    assert list(result.runs) == [TWO_ROWS, ONE_ROW, SPECULATIVE]
    assert seen[:24] == [(False, 1)] * 24  # a dummy row joins inside the model
    assert seen[24:48] == [(True, 1)] * 24
    assert all(not single for single, _ in seen[48:])
    assert max(rows for _, rows in seen[48:]) > 1
    assert not engine.target.single_rows


def test_speculation_on_a_real_session_gives_the_plain_tokens(engine: Engine) -> None:
    (result,) = results_of(run_bench(engine, prompts(LOOP), DecodeConfig(max_tokens=48)))
    assert result.identical
    assert result.stats.accepted > 0
    assert result.runs[SPECULATIVE][0].token_ids == result.reference.token_ids


def test_a_broken_verification_is_caught_and_its_prompts_are_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_all(
        proposal: Proposal, logits: FloatArray, sampler: Sampler, position: int
    ) -> Verdict:
        return Verdict(tuple(range(len(proposal.tokens))), sampler.choose(logits[-1], position))

    monkeypatch.setattr(decode_module, "verify", accept_all)
    found = summarize(
        results_of(run_bench(engine, prompts(LOOP), DecodeConfig(max_tokens=32, ignore_eos=True)))
    )
    assert found["identical_outputs"] is False
    assert (found["identical_prompts"], found["differing_prompts"]) == (0, ["p0"])


def test_a_prompt_that_does_not_fit_is_skipped_with_its_reason(
    tiny_folder: Callable[..., Path],
) -> None:
    engine = Engine.open(tiny_folder(context_length=64))
    skipped, result = run_bench(
        engine, prompts("x" * 300, "a"), DecodeConfig(max_tokens=4), warm_up=0
    )
    assert isinstance(skipped, Skipped) and "the context holds" in skipped.reason
    assert isinstance(result, PromptResult)
    assert report([result], [skipped], {})["skipped"] == [
        {"prompt": "p0", "reason": skipped.reason}
    ]


def test_a_prompt_that_is_not_unicode_is_skipped(engine: Engine) -> None:
    skipped, result = run_bench(
        engine, prompts("half an emoji \ud83d", "a"), DecodeConfig(4), warm_up=2
    )
    assert isinstance(skipped, Skipped) and "'\\ud83d', which is no character" in skipped.reason
    assert isinstance(result, PromptResult)


def test_the_speedup_is_over_the_faster_plain_loop_of_the_same_prompt() -> None:
    assert hand_made("a", 4.0, 2.0, 1.0).speedup == pytest.approx(2)
    assert hand_made("a", 2.0, 4.0, 1.0).speedup == pytest.approx(2)
    assert hand_made("a", 4.0, 2.0, 1.0).end_to_end_speedup == pytest.approx(3 / 2)


def test_trials_are_reduced_to_their_median() -> None:
    result = hand_made("a", 2.0, 2.0, 1.0)
    slow = Run(tuple(range(10)), 1.0, 100.0, 10)
    fast = Run(tuple(range(10)), 1.0, 0.5, 10, stats=result.stats)
    runs = {**result.runs, SPECULATIVE: [*result.runs[SPECULATIVE], slow, fast]}
    assert PromptResult(result.prompt, 3, runs).speedup == pytest.approx(2)


def test_a_summary_has_the_keys_scripts_rely_on_and_the_right_figures() -> None:
    results = [
        hand_made("a", 3.0, 2.0, 1.0, finish="stop"),
        hand_made("b", 4.0, 5.0, 1.0),
        hand_made("c", 0.9, 2.0, 1.0, rounds=15),
    ]
    found = summarize(results)
    assert set(found) == SUMMARY
    assert found["speedup_mean"] == pytest.approx((2 + 4 + 0.9) / 3)
    assert found["speedup_median"] == pytest.approx(2)
    assert found["speedup_p10"] == pytest.approx(1.12) and found["speedup_p90"] == pytest.approx(
        3.6
    )
    assert found["tokens_per_pass"] == pytest.approx(30 / 25)  # counts added up, not averaged
    assert found["acceptance_rate"] == pytest.approx(12 / 24)
    assert found["losses"] == [{"prompt": "c", "speedup": pytest.approx(0.9)}]
    assert found["plain_tokens_per_second"] == pytest.approx(30 / 6.9)
    assert found["plain_one_row_tokens_per_second"] == pytest.approx(30 / 9)
    assert found["verify_ms_per_round"] == pytest.approx(250)
    assert found["overhead_ms_per_round"] == pytest.approx(1e3 * (3 - 25 * 0.25) / 25)
    assert set(found["finished"]) == set(found["unfinished"]) == RATIOS
    assert found["finished"]["prompts"] == 1
    assert found["finished"]["speedup_mean"] == pytest.approx(2)
    assert found["unfinished"]["speedup_mean"] == pytest.approx((4 + 0.9) / 2)


def test_no_prompts_have_no_ratios() -> None:
    assert summarize([hand_made("a", 1, 1, 1)])["finished"]["speedup_mean"] is None


def test_a_peers_faster_variant_is_compared_prompt_by_prompt_with_our_faster_plain_loop() -> None:
    results = [
        hand_made("a", 3.0, 2.0, 1.0, peers={"genai": 4.0, "genai:resting": 5.0}),
        hand_made("b", 1.0, 2.0, 1.0, peers={"genai": 9.0, "genai:resting": 1.5}),
        hand_made("c", 1.0, 2.0, 0.5, peers={"genai": 1.0, "genai:resting": 8.0}),
    ]
    overall = report(results, [], {"genai": {"engine": "genai 1"}})["overall"]
    assert set(overall) == SUMMARY | {"peers", "plain_vs_genai", "genai_tokens_per_second"}
    assert overall["plain_vs_genai"] == pytest.approx(1.5)
    assert overall["genai_tokens_per_second"] == pytest.approx(30 / 6.5)
    peer = overall["peers"]["genai"]
    assert peer["our_plain_tokens_per_second"] == pytest.approx(30 / 4)
    assert peer["our_speculative_over_peer"] == pytest.approx(2)
    assert peer["variants"]["genai"] == {
        "tokens_per_second": pytest.approx(30 / 14),
        "tokens_per_pass": pytest.approx(1),
        "our_plain_over_variant": pytest.approx(2),
    }
    assert peer["engine"] == "genai 1" and peer["same_answers"] == 3


def test_the_command_writes_the_document_scripts_rely_on(
    tiny_folder: Callable[..., Path],
    prompt_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "new" / "result.json", tmp_path / "result.png"
    status = main(
        f"bench --target {tiny_folder()} --prompts {prompt_file} --limit 1 --max-tokens 16 "
        f"--threads 1 --json {out} --plot {picture}".split()
    )
    assert status == 0
    document = json.loads(out.read_text())
    assert set(document) == DOCUMENT
    assert set(document["classes"]) == {"own", "qa"}
    assert set(document["overall"]) == SUMMARY | {"peak_memory"}
    for found in document["classes"].values():
        assert set(found) == SUMMARY
        assert found["prompts"] == 1 and found["identical_outputs"] is True
    assert document["overall"]["prompts"] == 2
    assert set(document["overall"]["peak_memory"]) == {
        "weights_bytes",
        "session_peak_bytes",
        "ratio",
    }
    weights = (tiny_folder() / "decoder.onnx").stat().st_size
    assert document["overall"]["peak_memory"]["weights_bytes"] == weights
    assert document["floor"]["seconds"] > 0 and document["floor"]["threads"] == 1
    assert [row["id"] for row in document["prompts"]] == ["own:1", "own:3"]
    assert {"1", "2", "16"} <= set(document["plan"])
    provenance = document["provenance"]
    assert provenance["target"]["fingerprint"] and provenance["threads"] == 1
    assert {"command", "git_revision", "packages", "cpu", "date", "load_average"} <= set(provenance)
    assert document["interrupted"] is False and document["error"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "overall" in captured.err and "2/2" in captured.err


def test_ctrl_c_keeps_what_was_measured(
    tiny_folder: Callable[..., Path],
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, calls = Engine.encode, []

    def interrupted(self: Engine, *args: Any, **kwargs: Any) -> list[int]:
        calls.append(args)
        if len(calls) == 3:  # the warm-up, the first prompt, the second
            raise KeyboardInterrupt
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "encode", interrupted)
    out = tmp_path / "result.json"
    command = f"bench --target {tiny_folder()} --prompts {prompt_file} --max-tokens 4 --json {out}"
    assert main(command.split()) == 130
    document = json.loads(out.read_text())
    assert document["interrupted"] is True and document["overall"]["prompts"] == 1
    assert document["error"] is None


FAKE_GENAI = """
__version__ = "0"
class Config:
    def __init__(self, path): pass
    def overlay(self, text): assert '"intra_op_num_threads": 1' in text
class Model:
    def __init__(self, config): print("noise on stdout", flush=True)
class Tokenizer:
    def __init__(self, model): pass
    def create_stream(self): return self
    def decode(self, token): return "x"
class GeneratorParams:
    def __init__(self, model): pass
    def set_search_options(self, **options): self.options = options
class Generator:
    def __init__(self, model, params): self.left = params.options["max_length"]
    def append_tokens(self, ids): self.left -= len(ids)
    def generate_next_token(self): self.left -= 1
    def get_next_tokens(self): return [7]
    def is_done(self): return self.left == 0
"""


def test_genai_runs_in_its_own_process_and_is_compared(
    tiny_folder: Callable[..., Path],
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "onnxruntime_genai.py").write_text(FAKE_GENAI)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    out = tmp_path / "result.json"
    status = main(
        f"bench --target {tiny_folder(contract='genai')} --prompts {prompt_file} --limit 1 "
        f"--max-tokens 6 --ignore-eos --threads 1 --compare genai --json {out}".split()
    )
    assert status == 0
    overall = json.loads(out.read_text())["overall"]
    assert overall["plain_vs_genai"] > 0
    assert overall["peers"]["genai"]["engine"] == "onnxruntime-genai 0"
    assert overall["peers"]["genai"]["prompts"] == 2
    assert overall["peers"]["genai"]["variants"]["genai"]["tokens_per_pass"] == 1


def test_a_peer_that_dies_is_one_line(
    tiny_folder: Callable[..., Path],
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "onnxruntime_genai.py").write_text("import os; os._exit(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = f"bench --target {tiny_folder(contract='genai')} --prompts {prompt_file}"
    assert main([*command.split(), "--compare", "genai"]) == 2
    assert capsys.readouterr().err == "edgedraft: genai ended unexpectedly (no message)\n"


def test_a_peer_that_dies_later_leaves_what_was_measured(
    tiny_folder: Callable[..., Path],
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "onnxruntime_genai.py").write_text(FAKE_GENAI)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run, calls = Peer.run, []

    def dying(self: Peer, *args: Any) -> Run:
        calls.append(args)
        if len(calls) == 5:  # in each of two ways: the warm-up, the first prompt, the second
            self._process.kill()
        return run(self, *args)

    monkeypatch.setattr(Peer, "run", dying)
    out = tmp_path / "result.json"
    status = main(
        f"bench --target {tiny_folder(contract='genai')} --prompts {prompt_file} --max-tokens 6 "
        f"--ignore-eos --threads 1 --compare genai --json {out}".split()
    )
    assert status == 2
    document = json.loads(out.read_text())
    assert document["interrupted"] is True and document["error"].startswith("genai ended")
    assert document["overall"]["peers"]["genai"]["prompts"] == 1
    *table, last = capsys.readouterr().err.splitlines()
    assert last.startswith("edgedraft: genai ended unexpectedly (")
    assert any(line.startswith("overall") for line in table)


def test_other_drafters_take_turns_and_are_compared(
    tiny_folder: Callable[..., Path], prompt_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    command = (
        f"bench --target {tiny_folder()} --prompts {prompt_file} --limit 2 --max-tokens 24 "
        f"--drafter lookup {tiny_folder()} --versus lookup --json {out}"
    )
    assert main(command.split()) == 0
    document = json.loads(out.read_text())
    assert document["settings"]["versus"] == [["lookup"]]
    assert document["overall"]["identical_outputs"]
    for row in (*document["classes"].values(), document["overall"]):
        rival = row["versus"]["lookup"]
        assert rival["tokens_per_pass"] >= 1
        assert rival["our_seconds_over_theirs"] > 0
    seconds = [row["seconds_per_token"] for row in document["prompts"]]
    tokens = [row["tokens"] for row in document["prompts"]]
    ours, theirs = (
        sum(t * s[kind] for t, s in zip(tokens, seconds, strict=True))
        for kind in ("speculative", "versus lookup")
    )
    assert document["overall"]["versus"]["lookup"]["our_seconds_over_theirs"] == pytest.approx(
        ours / theirs
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--compare genai", "genai_config.json"),
        ("--compare transformers", "--peer-model"),
        ("--compare genai --temperature 0.8", "greedily"),
        ("--trials 0", "trials must be >= 1, got 0"),
        ("--limit 0", "limit must be >= 1, got 0"),
        ("--warm-up -1", "warm_up must be >= 0, got -1"),
        ("--versus v1/drafter lookup --versus v2/drafter lookup", "be called 'drafter lookup' in"),
        ("--versus ngram=a/s.ngrams --versus ngram=b/s.ngrams", "two drafters would be called"),
        ("--json .", "is a folder"),
        ("--prompts none.jsonl", "none.jsonl: cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_run(
    tiny_folder: Callable[..., Path],
    prompt_file: Path,
    capsys: pytest.CaptureFixture[str],
    options: str,
    complaint: str,
) -> None:
    command = f"bench --target {tiny_folder()} --prompts {prompt_file} {options}"
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edgedraft: ") and complaint in line


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--json own.jsonl/x.json", "own.jsonl/x.json: cannot be written ([Errno"),
        (f"--json {'x' * 250}.json", ".json: cannot be written ([Errno"),  # its neighbour's is long
        (f"--plot {'x' * 250}.png", ".png: cannot be written ([Errno"),
        ("--plot x.doc", "x.doc: no name of a picture; it must end in one of ."),
        ("--plot new/x --json new/x.json", "new/x: no name of a picture"),
    ],
)
def test_a_result_that_could_not_be_written_is_refused_and_leaves_no_litter(
    tiny_folder: Callable[..., Path],
    prompt_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    complaint: str,
) -> None:
    if "--plot" in options:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(prompt_file.parent)
    monkeypatch.setattr(Engine, "open", lambda *_, **__: pytest.fail("the runs would begin"))
    assert main(f"bench --target {tiny_folder()} --prompts own.jsonl {options}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edgedraft: ") and complaint in line
    assert list(prompt_file.parent.iterdir()) == [prompt_file]


def test_peak_memory_grows_by_what_was_touched() -> None:
    memory = PeakMemory()
    if memory.growth() is None:
        pytest.skip("this system does not tell the peak of the resident memory")
    # Not from the allocator, which may have some at hand: that is no growth.
    with mmap(-1, 32 * 2**20) as block:
        for page in range(0, len(block), 4096):
            block[page] = 1
    assert 30 * 2**20 < (memory.growth() or 0) < 64 * 2**20


def test_reading_twice_as_much_takes_longer() -> None:
    assert read_floor_s(64 * 2**20, 1) > read_floor_s(2**20, 1) > 0
