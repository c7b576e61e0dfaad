"""A target's own answers, as token ids: what a drafter is distilled from and measured on.

A row of the file holds "set", "row", "finished", "response_ids", and the question as "prompt"
unless the set is a known data set whose file lies beside it. It may hold "top_k_ids" and
"top_k_logits": for each response token, the target's best ids there and their logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .data_sets import BY_NAME, TEST_FILES, is_held_out
from .errors import TrainError
from .target import Target
from .texts import read_jsonl


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class TopK:
    """The target's likeliest tokens at every response token."""

    ids: npt.NDArray[np.int64]  # (response, K)
    logits: npt.NDArray[np.float32]  # (response, K)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer of a target."""

    data_set: str
    row: int
    finished: bool  # by a stop token, rather than cut at a length
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    top_k: TopK | None = None

    @property
    def is_held_out(self) -> bool:
        """Whether the answer is for evaluation only."""
        return is_held_out(self.data_set, self.row)


def read_answers(path: Path, target: Target) -> list[Answer]:
    """Return the answers of a file, each with its prompt as the target read it."""
    prompts = _Prompts(path.parent)
    answers = []
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            answers.append(_answer(row, prompts, target))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TrainError(
                f"{path}:{number}: not an answer ({error!r:.80}); it takes set, row, finished and "
                "response_ids"
            ) from error
    return answers


def _answer(row: Mapping[str, Any], prompts: _Prompts, target: Target) -> Answer:
    data_set, index = str(row["set"]), int(row["row"])
    if data_set in TEST_FILES:
        raise TrainError(f"row {index} of {data_set}: test rows are not trained on; leave them out")
    response = tuple(int(token) for token in row["response_ids"])
    if not response:
        raise ValueError("response_ids is empty")
    prompt = row["prompt"] if "prompt" in row else prompts.find(data_set, index)
    return Answer(
        data_set, index, bool(row["finished"]), target.encode(prompt), response, _top_k(row)
    )


def _top_k(row: Mapping[str, Any]) -> TopK | None:
    if "top_k_ids" not in row:
        return None
    top_k = TopK(np.array(row["top_k_ids"], np.int64), np.array(row["top_k_logits"], np.float32))
    if top_k.ids.shape != top_k.logits.shape or len(top_k.ids) != len(row["response_ids"]):
        raise ValueError("top_k_ids and top_k_logits need one row per response token")
    return top_k


class _Prompts:
    """Prompts of the known data sets, read when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, list[str]] = {}

    def find(self, name: str, row: int) -> str:
        if name not in BY_NAME:
            raise TrainError(f"no data set is called {name!r}: give its answers a 'prompt'")
        if name not in self._known:
            data_set = BY_NAME[name]
            rows = data_set.rows(read_jsonl(self._folder / f"{data_set.file}.jsonl"))
            self._known[name] = [data_set.prompt(row) for _, row in rows]
        return self._known[name][row]
