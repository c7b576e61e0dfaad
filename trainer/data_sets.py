"""The public data sets whose files the trainer knows by name: what of a row is the prompt, what is
text to learn from, and which rows are never learned from.

A row is named by its data set and its number. One prompt in ten is held out for evaluation: the
SHA-256 of "set:row" begins with a byte below 26. A held-out row reaches neither the tokenizer nor
any training; the test rows of the data sets are refused altogether.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_HELD_OUT_BELOW = 26  # of 256
TEST_FILES = frozenset(
    {
        "gsm8k_test",
        "humaneval",
        "spec_bench_question",
        "mt_bench_question",
        "self_instruct_user_oriented",
        "scitldr_a_test",
    }
)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set: where its rows are and how they read."""

    name: str
    file: str  # stem of its .jsonl file
    prompt: Callable[[Row], str]  # what the target was asked
    text: Callable[[Row], str]  # what a person wrote: question and answer
    selected: Callable[[Row], bool] = lambda row: True

    def rows(self, lines: Iterator[Row]) -> Iterator[tuple[int, Row]]:
        """Yield the rows that belong to the data set, numbered from 0."""
        return enumerate(row for row in lines if self.selected(row))


def is_held_out(data_set: str, row: int) -> bool:
    """Return whether a row is kept for evaluation."""
    return hashlib.sha256(f"{data_set}:{row}".encode()).digest()[0] < _HELD_OUT_BELOW


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _llms_prompt(row: Row) -> str:
    return _paragraphs(row["instruction"], row["input"])


def _seed_prompt(row: Row) -> str:
    return _paragraphs(row["instruction"], row["instances"][0]["input"])


def _abstract_prompt(row: Row) -> str:
    return _paragraphs("Summarize the following abstract in one sentence.", " ".join(row["source"]))


def _abstract_text(row: Row) -> str:
    return _paragraphs(" ".join(row["source"]), row["target"][0])


DATA_SETS = (
    DataSet(
        "gsm8k_train",
        "gsm8k_train",
        prompt=lambda row: row["question"],
        # <<48/2=24>> is for a calculator, not for a reader.
        text=lambda row: _paragraphs(row["question"], re.sub("<<.*?>>", "", row["answer"])),
    ),
    DataSet(
        "mbpp",
        "mbpp",
        prompt=lambda row: row["text"],
        text=lambda row: _paragraphs(row["text"], row["code"].replace("\r\n", "\n")),
        selected=lambda row: row["task_id"] > 510 or row["task_id"] <= 10,  # the rest is the test
    ),
    DataSet("scitldr", "scitldr_a_train", prompt=_abstract_prompt, text=_abstract_text),
    DataSet("scitldr_dev", "scitldr_a_dev", prompt=_abstract_prompt, text=_abstract_text),
    DataSet(
        "llms_from_scratch",
        "llms_from_scratch_instructions",
        prompt=_llms_prompt,
        text=lambda row: _paragraphs(_llms_prompt(row), row["output"]),
    ),
    DataSet(
        "self_instruct",
        "self_instruct_seed_tasks",
        prompt=_seed_prompt,
        text=lambda row: _paragraphs(_seed_prompt(row), row["instances"][0]["output"]),
    ),
)
BY_NAME = {data_set.name: data_set for data_set in DATA_SETS}
BY_FILE = {data_set.file: data_set for data_set in DATA_SETS}
