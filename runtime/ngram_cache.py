"""Which target token a run of draft tokens spells, learned while running.

OmniDraft's cache (arXiv 2507.02659, section 3.1): n-grams of at least two draft tokens, each with
the target token that was committed in their place. It learns at once and is bounded: the least used
entry makes room (the paper's table 14: a quarter of the entries kept by use serves as well as all),
an entry used in the present request only when all others are gone.

Draft n-grams and target tokens are ids of two vocabularies, so what was saved for one pair is not
loaded for another. An entry takes about 320 bytes in memory, prefixes included, and 20 on disk.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .table_file import read_tables, write_tables

Pieces: TypeAlias = tuple[int, ...]

_MAX_ENTRIES = 16_384
_EVICTED = 1 / 16  # of all entries at a time: looking for the least used takes a look at all
_FORMAT = {"format": "edgedraft-ngram-cache", "format_version": 1}


@dataclass(slots=True)
class _Entry:
    token: int
    used: int
    request: int  # in which it was learned or confirmed last


class NgramCache:
    """Draft n-grams and the target tokens they stand for."""

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        """Hold at most `max_entries` n-grams."""
        if max_entries < 1:
            raise ValueError(f"max_entries must be >= 1, got {max_entries}")
        self._max_entries = max_entries
        self._entries: dict[Pieces, _Entry] = {}
        self._prefixes: Counter[Pieces] = Counter()  # proper ones, and how many entries need them
        self._request = 0

    def __len__(self) -> int:
        """Return the number of n-grams."""
        return len(self._entries)

    def begin_request(self) -> None:
        """Let go of what earlier requests used: it may be evicted from now on."""
        self._request += 1

    def learn(self, pieces: Sequence[int], target_token: int) -> None:
        """Note that the target committed `target_token` where these draft tokens stand.

        A single piece is the direct map's business and is not kept. The latest target token of an
        n-gram is the one that counts.
        """
        key = tuple(pieces)
        if len(key) < 2:
            return
        if (entry := self._entries.get(key)) is not None:
            entry.used = entry.used + 1 if entry.token == target_token else 1
            entry.token, entry.request = target_token, self._request
            return
        if len(self._entries) >= self._max_entries:
            self._evict()
        self._insert(key, _Entry(target_token, 1, self._request))

    def match(self, pieces: Sequence[int], start: int) -> tuple[int, int] | None:
        """Return the target token of the longest n-gram that begins at `start`, and its length."""
        found = None
        for end in range(start + 2, len(pieces) + 1):
            key = tuple(pieces[start:end])
            if (entry := self._entries.get(key)) is not None:
                found = entry.token, end - start
            if key not in self._prefixes:
                break
        return found

    def forget(self) -> None:
        """Drop every n-gram."""
        self._entries.clear()
        self._prefixes.clear()

    def save(self, path: Path, draft: str, target: str) -> None:
        """Write every n-gram of the vocabularies with these fingerprints; raise `StateError` when
        refused.
        """
        entries = self._entries
        tables = {
            "lengths": np.array([len(key) for key in entries], np.int32),
            "pieces": np.array(list(chain.from_iterable(entries)), np.int32),
            "tokens": np.array([entry.token for entry in entries.values()], np.int32),
            "used": np.array([entry.used for entry in entries.values()], np.int32),
        }
        write_tables(path, _facts(draft, target), tables)

    def load(self, path: Path, draft: str, target: str) -> None:
        """Replace what is known by what a file holds, the most used n-grams where it is too much.

        Raises `StateError`, and changes nothing, unless the file is whole and of this pair.
        """
        tables = read_tables(path, _facts(draft, target))
        pieces = iter(tables["pieces"].tolist())
        keys = [tuple(next(pieces) for _ in range(n)) for n in tables["lengths"].tolist()]
        values = zip(tables["tokens"].tolist(), tables["used"].tolist(), strict=True)
        entries = [(key, _Entry(*value, -1)) for key, value in zip(keys, values, strict=True)]
        self.forget()
        for key, entry in heapq.nlargest(self._max_entries, entries, key=lambda e: e[1].used):
            self._insert(key, entry)

    def _insert(self, key: Pieces, entry: _Entry) -> None:
        self._entries[key] = entry
        self._prefixes.update(key[:end] for end in range(2, len(key)))

    def _evict(self) -> None:
        """Drop the least used entries; the present request's only when there are no others."""
        entries = self._entries
        others = [key for key, entry in entries.items() if entry.request != self._request]
        count = max(1, int(self._max_entries * _EVICTED))
        for key in heapq.nsmallest(count, others or entries, key=lambda key: entries[key].used):
            del entries[key]
            for end in range(2, len(key)):
                self._prefixes[key[:end]] -= 1
                if not self._prefixes[key[:end]]:
                    del self._prefixes[key[:end]]


def _facts(draft: str, target: str) -> dict[str, Any]:
    """Return what a file says about itself."""
    return _FORMAT | {"draft": draft, "target": target}
