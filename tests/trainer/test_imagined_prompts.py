"""Prompts that a target writes itself."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason='needs onnx: pip install "edgedraft[train]"')

from edgedraft.trainer.cli import main
from edgedraft.trainer.corpus import read_prompts
from edgedraft.trainer.errors import TrainError
from edgedraft.trainer.imagined_prompts import PromptOptions, imagine_prompts
from edgedraft.trainer.target import Target
from graphs import tiny_target


def target_that_ends(folder: Path, tokens: list[int]) -> Path:
    """Let a tiny model, which does not care for its end token, stop at one that it uses."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"eos_token_ids": tokens}))
    return folder


@pytest.fixture
def options(tmp_path: Path) -> PromptOptions:
    target = tiny_target(tmp_path / "target", attention_bias=False)
    target = target_that_ends(target, list(range(3, 60, 2)))
    return PromptOptions(target, tmp_path / "out" / "prompts.jsonl", count=12, max_tokens=90)


def made(options: PromptOptions) -> list[dict[str, object]]:
    imagine_prompts(options)
    return [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]


def test_prompts_are_whole_different_and_of_some_length(options: PromptOptions) -> None:
    prompts = [str(row["prompt"]) for row in made(options)]
    assert len(prompts) >= options.count
    assert max(Counter(prompts).values()) == 1
    assert min(map(len, prompts)) >= 12
    assert [prompt.text for prompt in read_prompts(options.out)] == prompts


def test_the_opening_is_what_all_prompts_begin_with(options: PromptOptions) -> None:
    target = Target(options.target)
    opening = target.user_opening()
    for text in ("Yes", "What is a tide?", "12"):
        assert target.encode(text)[: len(opening)] == opening
    assert len(opening) < len(target.encode("Yes"))


def test_a_run_that_was_stopped_goes_on_with_other_draws(options: PromptOptions) -> None:
    few = made(replace(options, count=4))
    with options.out.open("ab") as file:
        file.write(b'{"prompt": "half a li')  # as a kill leaves it
    more = made(options)
    assert more[: len(few)] == few
    draws = [row["draw"] for row in more]
    assert len(set(draws)) == len(draws) and max(draws[: len(few)]) < min(draws[len(few) :])
    assert made(options) == more  # enough: nothing is added


def test_the_same_seed_gives_the_same_prompts(options: PromptOptions, tmp_path: Path) -> None:
    other = replace(options, out=tmp_path / "other.jsonl", batch=5)
    drawn = {row["draw"]: row["prompt"] for row in made(other)}
    same = [drawn[row["draw"]] == row["prompt"] for row in made(options) if row["draw"] in drawn]
    assert len(same) > 4 and all(same)


def test_nobody_asks_a_model_without_a_template(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(tiny_folder(attention_bias=False), plain)
    manifest = json.loads((plain / "manifest.json").read_text())
    (plain / "manifest.json").write_text(json.dumps(manifest | {"chat_template": None}))
    with pytest.raises(TrainError, match="no chat template"):
        imagine_prompts(PromptOptions(plain, tmp_path / "prompts.jsonl"))


def test_greedy_prompts_are_refused(
    options: PromptOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prompts", "--target", str(options.target), "--out", str(options.out)]
    assert main([*command, "--temperature", "0"]) == 2
    assert "temperature must be > 0" in capsys.readouterr().err
    assert main([*command, "--count", "2", "--max-tokens", "90"]) == 0
