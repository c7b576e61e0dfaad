"""The lessons that a learner keeps: the newest and some of all older ones.

    recent   the newest
    older    a fair sample of those that are recent no more (Vitter's algorithm R)

Lessons are of bounded size and so is their number: the file stays under 8 MB. It holds texts, as
the target's token ids; it is written as a whole, so after a kill it is the old or the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgedraft.runtime.errors import StateError
from edgedraft.runtime.table_file import flat, read_tables, write_tables

from .lesson import TOP, Lesson

RECENT, OLDER = 48, 960
_FORMAT = {"format": "edgedraft-lessons", "format_version": 2}

_log = logging.getLogger(__name__)


class Buffer:
    """The lessons of one target."""

    def __init__(self, path: Path | None, target: str, seed: int) -> None:
        """Take up what `path` holds of the target with this fingerprint; None keeps nothing."""
        self.recent: list[Lesson] = []  # oldest first, as everywhere
        self.older: list[Lesson] = []
        self._path = path
        self._facts = _FORMAT | {"target": target}
        self._seed = seed
        self._counts = np.zeros(2, np.int64)  # lessons, lessons that became older
        self._saved = True
        if path is not None and path.exists():
            try:
                self._load(path)
            except StateError as error:
                _log.warning("%s", error)

    @property
    def count(self) -> int:
        """How many lessons there were, which is the number of the next."""
        return int(self._counts[0])

    def add(self, request: Iterable[Lesson]) -> list[Lesson]:
        """Keep the lessons of a request; return them, numbered."""
        added = [replace(lesson, number=i) for i, lesson in enumerate(request, self.count)]
        self._counts[0] += len(added)
        self._saved = self._saved and not added
        self.recent += added
        for lesson in self.recent[:-RECENT]:
            self._keep_some(lesson)
        self.recent = self.recent[-RECENT:]
        return added

    def save(self) -> None:
        """Write what changed; raise `StateError` when the device refuses."""
        if self._path is None or self._saved:
            return
        lessons = [*self.recent, *self.older]
        write_tables(
            self._path,
            self._facts,
            {
                "counts": self._counts,
                "pools": np.array([len(self.recent), len(self.older)], np.int64),
                "numbers": np.array([lesson.number for lesson in lessons], np.int64),
                "context_lengths": np.array([len(x.context) for x in lessons], np.int64),
                "lengths": np.array([len(x.tokens) for x in lessons], np.int64),
                "context": flat([x.context for x in lessons], np.int32),
                "tokens": flat([x.tokens for x in lessons], np.int32),
                "top_ids": flat([x.top_ids for x in lessons], np.int32),
                "top_log_probs": flat([x.top_log_probs for x in lessons], np.float16),
            },
        )
        self._saved = True

    def _keep_some(self, lesson: Lesson) -> None:
        self._counts[1] += 1
        if len(self.older) < OLDER:
            self.older.append(lesson)
            return
        count = int(self._counts[1])
        # A generator for each, so that a restart changes nothing.
        place = int(np.random.default_rng((self._seed, count)).integers(count))
        if place < OLDER:
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
        lessons = [
            Lesson(*parts, number=int(number))
            for parts, number in zip(arrays, tables["numbers"], strict=True)
        ]
        recent = int(tables["pools"][0])
        self.recent, self.older = lessons[:recent], lessons[recent:]
        self._counts = tables["counts"].copy()
