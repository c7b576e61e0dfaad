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
        self._ids: list[npt.NDArray[np.intp]] = []
        self._log_probs: list[FloatArray] = []

    def observe(self, trace: RoundTrace) -> None:
        """Take note of a round."""
        self._tokens += trace.emitted
        for row, token in zip(trace.logits, trace.emitted, strict=True):
            ids, log_probs = likeliest(row, token)
            self._ids.append(ids)
            self._log_probs.append(log_probs)

    def lessons(self) -> list[Lesson]:
        """Return what the request can teach."""
        lesson = Lesson.certain(self._prompt, self._tokens)
        lesson.top_log_probs[:] = -np.inf
        for i, (ids, log_probs) in enumerate(zip(self._ids, self._log_probs, strict=True)):
            lesson.top_ids[i, : len(ids)] = ids
            lesson.top_log_probs[i, : len(ids)] = log_probs
        return list(lesson.parts())


def likeliest(row: FloatArray, token: int) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Return the likeliest tokens of a row of logits, best first, and their log probabilities.

    `token` is the one that was chosen, which saves looking for the best.
    """
    chosen = row[token]
    near = np.flatnonzero(row > chosen - _FAR)
    logits = row[near] - chosen
    some = row[::_STRIDE]
    far = some[some <= chosen - _FAR] - chosen
    total = np.log(np.exp(logits).sum() + _STRIDE * np.exp(far).sum())
    if len(near) > TOP:
        few = np.argpartition(logits, -TOP)[-TOP:]
        near, logits = near[few], logits[few]
    order = np.argsort(-logits)
    return near[order], logits[order] - total
