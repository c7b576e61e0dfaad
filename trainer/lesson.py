"""What is kept of a request to learn from: the target's tokens, and what it thought of each.

A lesson is some tokens of context and some that the target then chose, each with the likeliest of
the target's own distribution. A long answer is several lessons. Texts are in the target's
vocabulary, so a lesson is good for any drafter.

Drafts are not kept. Up to its first wrong piece a draft stands behind committed text, and what
comes behind a wrong piece is discarded whatever it is: so all that a rejection can teach is already
in the lesson, at the place of the correction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from edgedraft.runtime.datatypes import FloatArray, RoundTrace

CONTEXT = 256  # most tokens of the text before
LENGTH = 128  # most tokens to learn
TOP = 8  # of the target's likeliest tokens
# Tokens that are this much less likely than the one that came, in nats, are not named, and what
# they have together is estimated from a few of them: a sum over all would take longer than all else
# that is done with a round.
_FAR = 6.0
_STRIDE = 16
_MOST_HELD = 100_000  # logits of a request at once: in a flat distribution all tokens are near

Likeliest: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class Lesson:
    """Tokens of the target and what it gave them."""

    context: npt.NDArray[np.int32]  # the text before
    tokens: npt.NDArray[np.int32]  # (n,)
    top_ids: npt.NDArray[np.int32]  # (n, TOP), best first
    top_log_probs: npt.NDArray[np.float16]  # (n, TOP), -inf where there are fewer
    number: int = 0  # in the order of arrival

    @classmethod
    def certain(cls, context: Sequence[int], tokens: Sequence[int]) -> Lesson:
        """Return a lesson of which the tokens alone are known."""
        ids = np.zeros((len(tokens), TOP), np.int32)
        log_probs = np.full(ids.shape, -np.inf, np.float16)
        ids[:, 0], log_probs[:, 0] = tokens, 0.0
        return cls(np.array(context, np.int32), np.array(tokens, np.int32), ids, log_probs)

    def parts(self) -> Iterator[Lesson]:
        """Cut it into lessons of a bounded size."""
        text = np.concatenate([self.context, self.tokens])
        for start in range(0, len(self.tokens), LENGTH):
            behind, part = len(self.context) + start, slice(start, start + LENGTH)
            yield Lesson(
                text[max(0, behind - CONTEXT) : behind],
                self.tokens[part],
                self.top_ids[part],
                self.top_log_probs[part],
            )


class Recorder:
    """Makes lessons of the rounds of one request, at little cost to it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._tokens: list[int] = []
        self._glimpses: list[Glimpse] = []  # of the last tokens
        self._held = 0  # logits in them
        self._likeliest: list[Likeliest] = []  # of those before

    def observe(self, trace: RoundTrace) -> None:
        """Take note of a round."""
        self._tokens += trace.emitted
        for row, token in zip(trace.logits, trace.emitted, strict=True):
            seen = glimpse(row, token)
            self._glimpses.append(seen)
            self._held += len(seen.near)
        if len(self._glimpses) >= LENGTH or self._held >= _MOST_HELD:
            self._sum_up()

    def lessons(self) -> list[Lesson]:
        """Return what the request can teach."""
        if self._glimpses:
            self._sum_up()
        if not self._tokens:
            return []
        ids, log_probs = map(np.concatenate, zip(*self._likeliest, strict=True))
        context, tokens = np.array(self._prompt, np.int32), np.array(self._tokens, np.int32)
        return list(Lesson(context, tokens, ids, log_probs).parts())

    def _sum_up(self) -> None:
        self._likeliest.append(likeliest(self._glimpses))
        self._glimpses = []
        self._held = 0


class Glimpse(NamedTuple):
    """What is kept of a row of logits until there is time to sum it up: behind a pass of the
    target every operation finds its code and its data gone from the caches, and takes thrice the
    time.
    """

    chosen: np.float32  # the logit of the token that came
    near: npt.NDArray[np.intp]  # tokens that are not much less likely
    logits: FloatArray  # theirs
    some: FloatArray  # of all


def glimpse(row: FloatArray, token: int) -> Glimpse:
    """Return what is needed of a row where `token` was chosen."""
    chosen = row[token]
    near = np.flatnonzero(row > chosen - _FAR)
    return Glimpse(chosen, near, row[near], row[::_STRIDE].copy())


def likeliest(glimpses: Sequence[Glimpse]) -> Likeliest:
    """Return the likeliest tokens of each of n rows, best first, shape (n, TOP), and their log
    probabilities, -inf where there are fewer.
    """
    chosen = np.array([x.chosen for x in glimpses])
    counts = np.array([len(x.near) for x in glimpses])
    row = np.repeat(np.arange(len(glimpses)), counts)
    near = np.concatenate([x.near for x in glimpses])
    logits = np.concatenate([x.logits for x in glimpses]) - chosen[row]
    far = np.stack([x.some for x in glimpses]) - chosen[:, None]
    far[far > -_FAR] = -np.inf
    mass = np.bincount(row, np.exp(logits), len(glimpses)) + _STRIDE * np.exp(far).sum(axis=1)
    order = np.lexsort((-logits, row))  # within each row, so row[order] is row
    rank = np.arange(len(row)) - (counts.cumsum() - counts)[row]
    few = rank < TOP
    place, best = (row[few], rank[few]), order[few]
    ids = np.zeros((len(glimpses), TOP), np.int32)
    log_probs = np.full(ids.shape, -np.inf, np.float16)
    ids[place] = near[best]
    log_probs[place] = logits[best] - np.log(mass)[row[few]]
    return ids, log_probs
