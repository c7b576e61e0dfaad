"""The lessons that a learner keeps: the newest, some of all older ones, and some to be tested with.

    recent      the newest
    older       a fair sample of those that are recent no more (Vitter's algorithm R)
    held back   every tenth request; never trained on

Lessons are of bounded size and so is their number: the file stays under 4 MB. It holds texts, as
the target's token ids; it is written as a whole, so after a kill it is the old or the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgedraft.runtime.errors import StateError
from edgedraft.runtime.table_file import read_tables, write_tables

from .lesson import TOP, Lesson

RECENT, OLDER, HELD_BACK = 48, 160, 12
_EVERY, _FIRST = 10, 4  # requests: one in so many is held back, the first one early
_FORMAT = {"format": "edgedraft-lessons", "format_version": 1}

_log = logging.getLogger(__name__)


class Buffer:
    """The lessons of one target."""

    def __init__(self, path: Path | None, target: str, rng: np.random.Generator) -> None:
        """Take up what `path` holds of the target with this fingerprint; None keeps nothing."""
        self.recent: list[Lesson] = []  # oldest first, as everywhere
        self.older: list[Lesson] = []
        self.held_back: list[Lesson] = []
        self._path = path
        self._facts = _FORMAT | {"target": target}
        self._rng = rng
        self._counts = np.zeros(3, np.int64)  # requests, lessons, lessons that became older
        self._saved = True
        if path is not None and path.exists():
            try:
                self._load(path)
            except StateError as error:
                _log.warning("%s", error)

    def add(self, request: Iterable[Lesson]) -> list[Lesson]:
        """Keep the lessons of a request; return them, numbered, with what they are kept for."""
        held_back = self._counts[0] % _EVERY == _FIRST
        self._counts[0] += 1
        added = []
        for lesson in request:
            added.append(replace(lesson, number=int(self._counts[1]), held_back=bool(held_back)))
            self._counts[1] += 1
        self._saved = self._saved and not added
        if held_back:
            self.held_back = [*self.held_back, *added][-HELD_BACK:]
            return added
        self.recent += added
        for lesson in self.recent[:-RECENT]:
            self._keep_some(lesson)
        self.recent = self.recent[-RECENT:]
        return added

    def save(self) -> None:
        """Write what changed; raise `StateError` when the device refuses."""
        if self._path is None or self._saved:
            return
        pools = (self.recent, self.older, self.held_back)
        lessons = [lesson for pool in pools for lesson in pool]
        write_tables(
            self._path,
            self._facts,
            {
                "counts": self._counts,
                "pools": np.array([len(pool) for pool in pools], np.int64),
                "numbers": np.array([lesson.number for lesson in lessons], np.int64),
                "context_lengths": np.array([len(x.context) for x in lessons], np.int64),
                "lengths": np.array([len(x.tokens) for x in lessons], np.int64),
                "context": _flat([x.context for x in lessons], np.int32),
                "tokens": _flat([x.tokens for x in lessons], np.int32),
                "top_ids": _flat([x.top_ids for x in lessons], np.int32),
                "top_log_probs": _flat([x.top_log_probs for x in lessons], np.float16),
            },
        )
        self._saved = True

    def _keep_some(self, lesson: Lesson) -> None:
        self._counts[2] += 1
        if len(self.older) < OLDER:
            self.older.append(lesson)
        elif (place := int(self._rng.integers(self._counts[2]))) < OLDER:
            self.older[place] = lesson

    def _load(self, path: Path) -> None:
        tables = read_tables(path, self._facts)
        ends = tables["lengths"].cumsum()[:-1]
        arrays = zip(
            np.split(tables["context"], tables["context_lengths"].cumsum()[:-1]),
            np.split(tables["tokens"], ends),
            np.split(tables["top_ids"].reshape(-1, TOP), ends),
            np.split(tables["top_log_probs"].reshape(-1, TOP), ends),
            strict=True,
        )
        trained = int(tables["pools"][:2].sum())
        lessons = [
            Lesson(*parts, number=int(number), held_back=i >= trained)
            for i, (parts, number) in enumerate(zip(arrays, tables["numbers"], strict=True))
        ]
        recent, older = tables["pools"][:2].cumsum().tolist()
        self.recent, self.older = lessons[:recent], lessons[recent:older]
        self.held_back = lessons[older:]
        self._counts = tables["counts"].copy()


def _flat(arrays: Sequence[Any], kind: type) -> Any:
    return np.concatenate([np.zeros(0, kind), *(array.ravel() for array in arrays)])
