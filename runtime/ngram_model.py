"""A backoff n-gram model as a proposer: what usually follows these tokens?

It learns at once from every committed token, prompt and answer alike, in the target's vocabulary,
and may start from a seed file. For each context of `_CONTEXTS` tokens one entry of 12 bytes holds
the usual continuation with two small counts, and the latest continuation with the request it was
seen in: what this very text did last time is a far better guess than what other texts do.

All entries live in one table of fixed size, so memory is bounded by construction. A context is
known by 32 bits of its hash, which also say where its window of `_WINDOW` places begins. When the
window is full, a newcomer wears the least used entry down by one observation, or takes the place
of one that has no more to lose: the least frequently used goes first, and what nobody says any more
does not stay for ever. A place, once taken, is never emptied again, so a search may stop at the
first empty one.

How far a continuation can be trusted is counted while the model runs, by length of the context,
recency, and counts of the entry: when the next call shows what was committed, the previous
proposal is scored, the part that was never submitted included. Among the contexts, the one with the
best record is believed, not the longest.

Counting text twice would make it look usual: the beginning that a request shares with the one
before it is marked as recent, not counted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .datatypes import NOTHING, Proposal
from .prefix import common_prefix
from .table_file import read_tables, write_tables

# Tokens of context, shortest first. In replayed answers 1, 2, 3, 4 costs as much and is worth 1 %
# less, 1 to 5 costs a quarter more and is worth the same.
_CONTEXTS = (1, 2, 4, 6)
# For each token backwards: its factor in the hash, and whether a context ends with it.
_STEPS = tuple(
    (pow(0x9E3779B97F4A7C15, i, 1 << 64), i in _CONTEXTS) for i in range(1, _CONTEXTS[-1] + 1)
)
_WINDOW = 4  # places a context may be stored in
_ENTRY_BYTES = 12  # tag; usual token, hits, misses; latest token, request
_OVERHEAD_BYTES = 500_000  # counts, classes and the ids of the present text
_TOKEN_LIMIT = 1 << 20  # ids from here on are not learned
_MOST = 63  # of hits or misses; both are halved when one goes beyond
_REQUESTS = 4095  # request numbers before they are used again; 0 is none of them

_LEAST_REACHED = 0.05  # probability below which a chain is not worth a deeper look
_SURE = 0.8  # confidence at which shorter contexts are not asked any more
_PRIOR_WEIGHT = 4.0
_DECAY = 0.998  # per counted outcome: about the last five hundred of its kind matter
# Kinds of guesses: the usual token of an entry not used in this request; of one used, where it was
# the latest as well; the latest token, where it was another.
_OLD, _AGREED, _LATEST = range(3)
# Where counting starts: acceptance by kind and context in SmolLM2's answers to training prompts
# (benchmarks/ngram_replay.py).
_PRIOR = (
    (0.34, 0.55, 0.37, 0.71),
    (0.47, 0.67, 0.79, 0.88),
    (0.28, 0.47, 0.52, 0.63),
)
_SHARES = (0.25, 0.45, 0.65, 0.85)  # bounds of hits / (hits + misses) that share their record
_HITS = (2, 3, 5, 16)  # bounds of hits
_CLASSES = (len(_SHARES) + 1) * (len(_HITS) + 1)
_CELLS = 2 * len(_CONTEXTS) * len(_PRIOR) * _CLASSES  # first or later token of a proposal

_FORMAT = {"format": "edgedraft-ngrams", "format_version": 1}
_FILE_ENTRY_BYTES = 8  # what was latest is of no use to another session
_FILE_OVERHEAD_BYTES = 8 * _CELLS + 1024


def _class_of(counts: int) -> int:
    """Return the class of a word's lowest 12 bits: hits and misses."""
    hits, misses = counts >> 6, counts & 63
    share = hits / max(hits + misses, 1)
    return sum(hits >= b for b in _HITS) * (len(_SHARES) + 1) + sum(share >= b for b in _SHARES)


_CLASS = tuple(_class_of(counts) for counts in range(1 << 12))


class NgramModel:
    """Proposes the continuation that contexts like this one had, chained greedily."""

    def __init__(self, *, max_bytes: int = 4_000_000) -> None:
        """Learn in at most `max_bytes` of memory, which is taken as the table fills."""
        self._slots = (max_bytes - _OVERHEAD_BYTES) // _ENTRY_BYTES - _WINDOW
        if self._slots < 1:
            least = _OVERHEAD_BYTES + (_WINDOW + 1) * _ENTRY_BYTES
            raise ValueError(f"max_bytes must be >= {least}, got {max_bytes}")
        self._table = np.zeros((self._slots + _WINDOW) * 3, np.uint32)
        self._words = self._table.data  # twice as fast as the array, one word at a time
        prior = [p for _ in range(2) for row in zip(*_PRIOR, strict=True) for p in row]
        self._rates = [p for p in prior for _ in range(_CLASSES)]
        self._counted = [_PRIOR_WEIGHT] * _CELLS
        self._text: list[int] = []  # of the present request
        self._request = 0
        self._pending: list[tuple[int, int]] = []  # cell and token of the previous proposal

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Chain up to `budget` tokens, each the most trusted continuation of those before it."""
        self._catch_up(committed)
        text = self._text[-_CONTEXTS[-1] :]
        confidence: list[float] = []
        reached = 1.0
        self._pending = []
        while len(confidence) < budget:
            cell, token = self._best(text, deep=bool(confidence))
            if cell < 0:
                break
            reached *= self._rates[cell]
            if confidence and reached < _LEAST_REACHED:
                break
            self._pending.append((cell, token))
            confidence.append(self._rates[cell])
            text.append(token)
        if not confidence:
            return NOTHING
        return Proposal.chain([token for _, token in self._pending], confidence, "ngram")

    def forget(self) -> None:
        """Drop everything learned, the seed included; the acceptance counts stay, they hold no
        text.
        """
        self._table.fill(0)
        self._text = []
        self._pending = []

    def save(self, path: Path, vocabulary: str, *, max_bytes: int | None = None) -> None:
        """Write what was learned of the vocabulary with this fingerprint; only the most used
        contexts where `max_bytes` are not enough for all. Raises `StateError` when refused.
        """
        entries = self._table.reshape(-1, 3)[:, :2]
        entries = entries[entries[:, 0] != 0]
        if max_bytes is not None:
            room = max(0, max_bytes - _FILE_OVERHEAD_BYTES) // _FILE_ENTRY_BYTES
            entries = _most_used_first(entries)[:room]
        tables = {
            "tags": entries[:, 0],
            "usual": entries[:, 1],
            "rates": np.array(self._rates, np.float32),
            "counted": np.array(self._counted, np.float32),
        }
        write_tables(path, _facts(vocabulary), tables)

    def load(self, path: Path, vocabulary: str) -> None:
        """Replace what is known by what a file holds, or by its most used contexts where there is
        no room for all.

        Raises `StateError`, and changes nothing, unless the file is whole and of this vocabulary.
        """
        tables = read_tables(path, _facts(vocabulary))
        self.forget()
        self._rates = tables["rates"].tolist()
        self._counted = tables["counted"].tolist()
        entries = np.stack([tables["tags"], tables["usual"]], axis=1)
        if len(entries) > self._slots:
            entries = _most_used_first(entries)[: self._slots * 3 // 4]
        entries = entries[np.argsort(entries[:, 0])]
        # In the order of their tags, each goes where its window begins or behind the one before it:
        # what came from a table of this size always fits.
        while True:
            windows = (entries[:, 0].astype(np.uint64) * self._slots >> 32).astype(np.int32)
            order = np.arange(len(entries), dtype=np.int32)
            places = order + np.maximum.accumulate(windows - order)
            fits = places < windows + _WINDOW
            if fits.all():
                break
            entries = entries[fits]
        self._table.reshape(-1, 3)[places, :2] = entries

    def merge(self, path: Path, vocabulary: str) -> None:
        """Add what a file holds, as far as there is room; of a context that both know, what was
        seen more often stays. Raises `StateError`, and changes nothing, like `load`.
        """
        tables = read_tables(path, _facts(vocabulary))
        words, slots = self._words, self._slots
        for tag, usual in zip(tables["tags"].tolist(), tables["usual"].tolist(), strict=True):
            start = (tag * slots >> 32) * 3
            for at in range(start, start + 3 * _WINDOW, 3):
                if words[at] == tag:
                    words[at + 1] = max(usual, words[at + 1], key=_observations)
                    break
                if not words[at]:
                    words[at], words[at + 1] = tag, usual
                    break

    def _catch_up(self, committed: Sequence[int]) -> None:
        known = len(self._text)
        text = list(committed)
        shared = common_prefix(self._text, text)
        if known and shared == known:
            for (cell, guess), token in zip(self._pending, text[known:], strict=False):
                self._score(cell, guess == token)
                if guess != token:
                    break
        else:
            self._text, known = [], 0
            self._request = self._request % _REQUESTS + 1
        for i in range(known, len(text)):
            self._learn(text[i], count=i >= shared)
            self._text.append(text[i])

    def _score(self, cell: int, right: bool) -> None:
        weight = self._counted[cell] * _DECAY
        self._rates[cell] = (self._rates[cell] * weight + right) / (weight + 1)
        self._counted[cell] = weight + 1

    def _learn(self, token: int, *, count: bool) -> None:
        """Note that `token` followed the present text; without `count`, only as the latest."""
        if token >= _TOKEN_LIMIT:
            return
        words, slots = self._words, self._slots
        latest = token << 12 | self._request
        for tag in _tags(self._text):
            start = (tag * slots >> 32) * 3
            least, least_used = start, 2 * _MOST + 1
            for at in range(start, start + 3 * _WINDOW, 3):
                found = words[at]
                if found == tag:
                    if count:
                        words[at + 1] = _counted(words[at + 1], token)
                    words[at + 2] = latest
                    break
                if not found:
                    words[at], words[at + 1], words[at + 2] = tag, token << 12 | 1 << 6, latest
                    break
                word = words[at + 1]
                used = (word >> 6 & 63) + (word & 63)
                if used < least_used:
                    least, least_used = at, used
            else:
                if least_used > 1:
                    words[least + 1] -= 1 if words[least + 1] & 63 else 1 << 6
                else:
                    words[least], words[least + 1] = tag, token << 12 | 1 << 6
                    words[least + 2] = latest

    def _best(self, text: Sequence[int], *, deep: bool) -> tuple[int, int]:
        """Return the most trusted continuation of `text` and the cell of its record, which is
        negative when nothing is known.
        """
        words, slots, rates, request = self._words, self._slots, self._rates, self._request
        tags = _tags(text)
        cells = len(_PRIOR) * _CLASSES
        base = (len(_CONTEXTS) * deep + len(tags)) * cells
        best, best_rate, best_token = -1, -1.0, 0
        for tag in reversed(tags):
            base -= cells
            start = (tag * slots >> 32) * 3
            for at in range(start, start + 3 * _WINDOW, 3):
                found = words[at]
                if found == tag:
                    break
                if not found:
                    at = -1
                    break
            else:
                at = -1
            if at < 0:
                continue
            usual, latest = words[at + 1], words[at + 2]
            cell, token = base + _CLASS[usual & 0xFFF], usual >> 12
            if latest & 0xFFF == request:
                cell += (_AGREED if latest >> 12 == token else _LATEST) * _CLASSES
                token = latest >> 12
            if rates[cell] > best_rate:
                best, best_rate, best_token = cell, rates[cell], token
            if best_rate > _SURE:
                break
        return best, best_token


def _tags(text: Sequence[int]) -> list[int]:
    """Return 32 bits of the hash of each context that `text` ends with, shortest first."""
    tags: list[int] = []
    key = 0
    for token, (power, ends) in zip(text[: -len(_STEPS) - 1 : -1], _STEPS, strict=False):
        key += (token + 1) * power
        if ends:
            tags.append((key >> 32 & 0xFFFFFFFF) or 1)  # 0 marks an empty place
    return tags


def _counted(word: int, token: int) -> int:
    """Return the word of an entry after `token` was seen in its place."""
    hits, misses = word >> 6 & 63, word & 63
    if word >> 12 == token:
        hits += 1
    else:
        misses += 1
        if hits <= 1:
            word, hits = token << 12, 1  # the usual one has no more to lose
        else:
            hits -= 1
    if hits > _MOST or misses > _MOST:
        hits, misses = max(hits >> 1, 1), misses >> 1
    return word >> 12 << 12 | hits << 6 | misses


def _observations(word: int) -> int:
    """Return how often the context of an entry with this word was seen, of late."""
    return (word >> 6 & 63) + (word & 63)


def _most_used_first(entries: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return entries, their tag and usual word, by how often they were seen."""
    usual = entries[:, 1].astype(np.int32)
    return entries[np.argsort(-((usual >> 6 & 63) + (usual & 63)), kind="stable")]


def _facts(vocabulary: str) -> dict[str, Any]:
    """Return what a file says about itself."""
    return _FORMAT | {"vocabulary": vocabulary, "contexts": _CONTEXTS, "cells": _CELLS}
