"""From a lesson to what one step of training takes: draft tokens, and what should come at each.

The drafter reads what it reads when it drafts, the spellings of the target's tokens one after the
other (`vocab_map.py`). What it is taught:

    marginal        the target's distribution, as one over the next piece, at every piece
                    (`trie_marginal.py`)
    cross-entropy   the pieces of the tokens that came
    hybrid          OmniDraft (arXiv 2507.02659, equation 4): the target's distribution over the
                    tokens that are one piece each, where such a token came; elsewhere, with a
                    weight, the pieces that came
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from edgedraft.runtime.vocab_map import VocabMap

from .lesson import TOP, Lesson
from .step_graph import Passage
from .trie_marginal import trie_marginal

MAX_PIECES = 384  # of a passage
_CERTAIN = (1.0, 0.0, 0.0)

Kind: TypeAlias = Literal["marginal", "cross-entropy", "hybrid"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What is learned from a lesson."""

    kind: Kind = "marginal"
    # Factors of KL(p||q), KL(q||p) and total variation, p the teacher's distribution.
    divergence: tuple[float, float, float] = _CERTAIN
    # hybrid: weight of pieces of tokens that have several; None: the target's probability of them.
    ngram_weight: float | None = 0.2

    @classmethod
    def paper(cls, ngram_weight: float | None = 0.2) -> Objective:
        """Return the hybrid loss with its reverse divergence."""
        return cls("hybrid", (0.0, 1.0, 0.0), ngram_weight)


@dataclass(frozen=True, slots=True, eq=False)
class SpelledLesson:
    """A lesson in the drafter's vocabulary."""

    passage: Passage
    lengths: tuple[int, ...]  # pieces of each of its tokens; together those that are predicted


class Teacher:
    """Spells lessons for one pair of vocabularies."""

    def __init__(self, vocab_map: VocabMap, objective: Objective) -> None:
        self.objective = objective
        self._map = vocab_map

    def spell(self, lesson: Lesson) -> SpelledLesson | None:
        """Return the lesson as the drafter reads it, cut to what a pass can hold; None if nothing
        of it can be predicted.
        """
        context = [
            piece for token in lesson.context.tolist() for piece in self._map.spelling(token)
        ]
        spelled = [self._map.spelling(token) for token in lesson.tokens.tolist()]
        first = 0
        while not context and first < len(spelled):  # something has to stand in front
            context = spelled[first]
            first += 1
        last, size = first, 0
        while last < len(spelled) and size + len(spelled[last]) < MAX_PIECES:
            size += len(spelled[last])
            last += 1
        if not size:
            return None
        pieces = [*context, *(piece for token in spelled[first:last] for piece in token)]
        rows = [row for i in range(first, last) for row in self._rows(lesson, i, spelled[i])]
        passage = Passage(
            pieces=np.array(pieces[-MAX_PIECES:], np.int64),
            nll_weight=np.array([row.nll_weight for row in rows], np.float32),
            teacher_ids=np.zeros((size, TOP), np.int64),
            teacher_probs=np.zeros((size, TOP), np.float32),
            teacher_weight=np.array([row.teacher is not None for row in rows], np.float32),
        )
        for i, row in enumerate(rows):
            if row.teacher:
                passage.teacher_ids[i, : len(row.teacher)] = list(row.teacher)
                passage.teacher_probs[i, : len(row.teacher)] = list(row.teacher.values())
        return SpelledLesson(passage, tuple(map(len, spelled[first:last])))

    def _rows(self, lesson: Lesson, at: int, pieces: Sequence[int]) -> list[_Row]:
        """Return what is taught at each piece of one token."""
        kind = self.objective.kind
        if kind == "cross-entropy" or not pieces:
            return [_Row(1.0)] * len(pieces)
        log_probs = lesson.top_log_probs[at].astype(np.float32)
        known = np.isfinite(log_probs)
        tokens, probs = lesson.top_ids[at][known], np.exp(log_probs[known])
        if kind == "hybrid" and len(pieces) > 1:
            weight = self.objective.ngram_weight
            if weight is None:
                weight = float(probs[tokens == lesson.tokens[at]].sum())
            return [_Row(weight)] * len(pieces)
        spellings = [self._map.spelling(token) for token in tokens.tolist()]
        if kind == "hybrid":
            direct = [i for i, spelling in enumerate(spellings) if len(spelling) == 1]
            spellings, probs = [spellings[i] for i in direct], probs[direct]
        first, *further = trie_marginal(spellings, probs, pieces)
        # What is not known of the target is left over; inside a token, nothing is.
        mass = min(1.0, float(probs.sum()))
        first = {piece: share * mass for piece, share in first.items()}
        return [_Row(0.0, teacher) for teacher in (first, *further)]


@dataclass(frozen=True, slots=True)
class _Row:
    """What is taught at one piece."""

    nll_weight: float
    teacher: Mapping[int, float] | None = None
