"""A toy target, a toy drafter vocabulary and answers of the one to be spelled in the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.trainer.answers import Answer, read_answers
from edgedraft.trainer.target import Target
from graphs import write_target_folder
from toy_vocabularies import byte_level

_TARGET = byte_level(380, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_WORDS = ("fox", "dog", "shells", "shore", "counter", "counts", "brown", "quick", "lazy", "sleeps")


def _row(number: int) -> dict[str, Any]:
    """Every other answer is finished."""
    word, other = _WORDS[number % 10], _WORDS[number // 10 % 10]
    text = f"The {word} jumps over the {other}.\nThe answer is {number}."
    finished = number % 2 == 0
    return {
        "set": "toy",
        "row": number,
        "finished": finished,
        "prompt": f"Where is the {word}?",
        "response_ids": _TARGET.encode(text, add_special_tokens=False).ids + [2] * finished,
    }


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads only wait for each other over matrices this small."""
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target folder; nothing in training needs its graph."""
    return write_target_folder(
        tmp_path_factory.mktemp("target"),
        graph=b"not needed",
        tokenizer=_TARGET,
        chat_template=_TEMPLATE,
    )


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return Target(target_folder)


@pytest.fixture(scope="session")
def draft_tokenizer() -> Tokenizer:
    return byte_level(270)


@pytest.fixture(scope="session")
def vocab_map(target: Target, draft_tokenizer: Tokenizer) -> VocabMap:
    return target.vocab_map(draft_tokenizer)


@pytest.fixture(scope="session")
def answers_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("answers") / "answers.jsonl", map(_row, range(60)))


@pytest.fixture(scope="session")
def answers(answers_file: Path, target: Target) -> list[Answer]:
    return read_answers(answers_file, target)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write JSON Lines to a file of this name."""
    return lambda name, *rows: _write(tmp_path / name, rows)


@pytest.fixture
def answer_row() -> Callable[[int], dict[str, Any]]:
    return _row


def _write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
