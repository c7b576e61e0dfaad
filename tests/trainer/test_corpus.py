"""A target's answers to many prompts: what the runtime would say, in whatever company."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason='needs onnx: pip install "edgedraft[train]"')

from edgedraft.runtime import OnnxModel, SamplingConfig, SessionConfig, open_target_folder
from edgedraft.runtime.sampling import Sampler
from edgedraft.trainer.answers import read_answers
from edgedraft.trainer.batched_generation import draw
from edgedraft.trainer.cli import main
from edgedraft.trainer.corpus import CorpusOptions, make_corpus
from edgedraft.trainer.errors import TrainError
from edgedraft.trainer.target import Target

NUM_PROMPTS = 7


@pytest.fixture(scope="module")
def target(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(attention_bias=False)


@pytest.fixture
def options(target: Path, tmp_path: Path, write_rows: Callable[..., Path]) -> CorpusOptions:
    """Seven prompts of different lengths, answered four at a time."""
    prompts = ({"prompt": "Tell me of " + "the other " * number} for number in range(NUM_PROMPTS))
    file = write_rows("prompts.jsonl", *prompts)
    return CorpusOptions(target, (file,), tmp_path / "answers.jsonl", max_tokens=24, batch=4)


def answers(options: CorpusOptions) -> dict[tuple[int, int], dict[str, Any]]:
    """Make the corpus and return its rows by row number and sample."""
    make_corpus(options)
    rows = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    by_key = {(row["row"], row.get("sample", 0)): row for row in rows}
    assert len(by_key) == len(rows), "an answer is there twice"
    return by_key


def one_by_one(target: Path, prompt: str, max_tokens: int) -> tuple[list[int], list[Any]]:
    """Return the runtime's greedy answer and the logits row of each of its tokens."""
    folder = open_target_folder(target)
    model = OnnxModel(folder, SessionConfig(threads=1))
    *context, last = Target(target).encode(prompt)
    model.extend(context)
    tokens: list[int] = []
    rows: list[Any] = []
    while len(tokens) < max_tokens:
        rows.append(model.forward([last])[0].copy())
        last = int(rows[-1].argmax())
        tokens.append(last)
        if last in folder.eos_token_ids:
            break
    return tokens, rows


@pytest.mark.parametrize("wishes", [{"attention_bias": False}, {}, {"padded_columns": 3}])
def test_answers_are_those_of_one_by_one_decoding(
    options: CorpusOptions, tiny_folder: Callable[..., Path], wishes: dict[str, Any]
) -> None:
    target = tiny_folder(**wishes)
    made = answers(replace(options, target=target, top_k_logits=2))
    assert len(made) == NUM_PROMPTS
    for row in made.values():
        tokens, logits = one_by_one(target, row["prompt"], options.max_tokens)
        assert row["response_ids"] == tokens
        assert row["finished"] == (tokens[-1] in open_target_folder(target).eos_token_ids)
        assert [ids[0] for ids in row["top_k_ids"]] == tokens
        best = [np.sort(x)[:-3:-1] for x in logits]
        assert np.abs(np.array(row["top_k_logits"]) - np.array(best)).max() < 1e-3


def test_some_answers_end_by_themselves_and_some_are_cut(options: CorpusOptions) -> None:
    cut = answers(options)
    # A tiny model does not care for its end token: let it be one that some answers have.
    used = Counter(token for row in cut.values() for token in set(row["response_ids"]))
    end = next(token for token, count in used.items() if 1 < count < NUM_PROMPTS)
    folder = Path(options.target)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["eos_token_ids"] = [end]
    other = options.out.parent / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "manifest.json").write_text(json.dumps(manifest))
    ended = answers(replace(options, target=other, out=options.out.with_name("ended.jsonl")))
    assert {row["finished"] for row in ended.values()} == {True, False}
    for key, row in ended.items():
        whole = cut[key]["response_ids"]
        length = whole.index(end) + 1 if end in whole else len(whole)
        assert row["response_ids"] == whole[:length]
        assert row["finished"] == (end in whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_does_not_depend_on_its_company(
    options: CorpusOptions, temperature: float
) -> None:
    made = {
        batch: answers(
            replace(
                options,
                batch=batch,
                temperature=temperature,
                samples=2 if temperature else 1,
                out=options.out.with_name(f"{batch}.jsonl"),
            )
        )
        for batch in (1, 3, 16)
    }
    assert made[1] == made[3] == made[16]


@pytest.mark.parametrize("kept_bytes", [0.0, 0.4, 0.97])
def test_a_run_that_was_killed_goes_on(options: CorpusOptions, kept_bytes: float) -> None:
    options = replace(options, temperature=1.0, samples=2)
    whole = answers(options)
    content = options.out.read_bytes()
    kept = content[: int(kept_bytes * len(content))]
    options.out.write_bytes(kept)
    assert answers(options) == whole
    assert options.out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])

    before = options.out.read_bytes()
    make_corpus(options)
    assert options.out.read_bytes() == before, "there was nothing left to do"


def test_samples_differ_from_each_other_and_by_seed_and_can_be_had_again(
    options: CorpusOptions,
) -> None:
    options = replace(options, temperature=1.5, top_p=0.95, samples=3)
    first = answers(options)
    again = answers(replace(options, out=options.out.with_name("again.jsonl")))
    other = answers(replace(options, out=options.out.with_name("other.jsonl"), seed=1))
    assert first == again
    assert len(first) == 3 * NUM_PROMPTS
    assert all(row["temperature"] == 1.5 for row in first.values())
    ids = [tuple(row["response_ids"]) for row in (*first.values(), *other.values())]
    assert len(set(ids)) == len(ids)


def test_a_time_limit_leaves_whole_answers_only(options: CorpusOptions) -> None:
    whole = answers(options)
    stopped = replace(options, out=options.out.with_name("stopped.jsonl"), max_minutes=1e-9)
    assert answers(stopped) == {}
    assert answers(replace(stopped, max_minutes=None)) == whole


def test_answers_are_read_by_the_training(options: CorpusOptions) -> None:
    made = answers(replace(options, top_k_logits=3))
    target = Target(options.target)
    read = read_answers(options.out, target)
    assert {a.row: list(a.response_ids) for a in read} == {
        row: x["response_ids"] for (row, _), x in made.items()
    }
    assert all(a.prompt_ids == target.encode(made[a.row, 0]["prompt"]) for a in read)
    assert all(a.top_k is not None and a.top_k.ids.shape[1] == 3 for a in read)


def test_rows_of_a_known_data_set_keep_their_name_and_number(
    options: CorpusOptions, write_rows: Callable[..., Path]
) -> None:
    tasks = ({"task_id": 500 + i, "text": f"Task {i}.", "code": ""} for i in range(20))
    options = replace(options, prompts=(write_rows("mbpp.jsonl", *tasks),), limit=2, max_tokens=2)
    made = answers(options)
    assert {(row["set"], row["row"], row["prompt"]) for row in made.values()} == {
        ("mbpp", 0, "Task 11."),
        ("mbpp", 1, "Task 12."),
    }, "ids up to 510 belong to the test"
    assert len(answers(replace(options, limit=5))) == 5, "a higher limit goes on"


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_draws_follow_the_law_of_the_runtime(top_p: float) -> None:
    noise = np.random.default_rng(3)
    logits = noise.normal(size=30).astype(np.float32)
    logits[[4, 9, 20]] = logits.max()  # ties, also at the border of the nucleus
    logits[[5, 6]] = 0.5
    sampling = SamplingConfig(temperature=0.7, top_p=top_p)
    law = Sampler(sampling, (), logits.size).probabilities(logits)
    count = 20_000
    drawn = Counter(draw(logits, 0.7, top_p, noise) for _ in range(count))
    for token, p in enumerate(law):
        deviation = max(1.0, np.sqrt(count * p * (1 - p)))
        assert abs(drawn[token] - count * p) < (5 * deviation if p else 0.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1, "temperature": 1.0}, "was begun with temperature = 0.0, not 1.0"),
        ({"max_tokens": 25}, "was begun with max_tokens = 24, not 25; go on with the same"),
        ({"top_k_logits": 2}, "was begun with top_k_logits = 0, not 2"),
    ],
)
def test_a_run_with_other_options_is_not_gone_on_with(
    options: CorpusOptions, changed: dict[str, Any], message: str
) -> None:
    make_corpus(options)
    before = options.out.read_bytes()
    with pytest.raises(TrainError, match=message):
        make_corpus(replace(options, **changed))
    assert options.out.read_bytes() == before


@pytest.mark.parametrize("name", ["gsm8k_test", "humaneval", "spec_bench_question"])
def test_test_files_are_refused(
    name: str, options: CorpusOptions, write_rows: Callable[..., Path]
) -> None:
    prompts = (*options.prompts, write_rows(f"{name}.jsonl", {"prompt": "a", "question": "b"}))
    with pytest.raises(TrainError, match=f"{name}.jsonl: holds test rows"):
        make_corpus(replace(options, prompts=prompts))
    assert not options.out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "2"], "samples and top_p need a temperature > 0"),
        (["--temperature", "-1"], "temperature must be >= 0"),
        (["--batch", "0"], "batch must be > 0, got 0"),
        (["--top-k-logits", "-1"], "top_k_logits must be >= 0"),
        (["--prompts", "texts.jsonl"], "texts.jsonl:1: has no 'prompt'"),
        (["--prompts", "p.jsonl", "p.jsonl"], "another file has the same name"),
        (["--out", "p.jsonl"], "p.jsonl: exists, but p.run.json does not say how it was made"),
        (["--out", "p.jsonl/o.jsonl"], "p.jsonl/o.jsonl: cannot be written ([Errno"),
        (["--target", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_an_error_is_one_line(
    options: list[str],
    message: str,
    target: Path,
    tmp_path: Path,
    write_rows: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows("p.jsonl", {"prompt": "a"})
    write_rows("texts.jsonl", {"text": "a"})
    monkeypatch.chdir(tmp_path)
    command = ["corpus", "--target", str(target), "--prompts", "p.jsonl", "--out", "o.jsonl"]
    assert main([*command, *options]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("contract", "reason"),
    [("genai", "it has no input"), ("concat", "it has no input")],
)
def test_a_graph_that_takes_one_sequence_only_is_refused(
    contract: str, reason: str, options: CorpusOptions, tiny_folder: Callable[..., Path]
) -> None:
    with pytest.raises(TrainError, match=f"cannot answer several prompts at once .{reason}"):
        make_corpus(replace(options, target=tiny_folder(contract=contract)))
