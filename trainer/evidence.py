"""Whether a drafter does better with what it learned, told by lessons before it learns from them.

That is a test on new data every time, and costs no data to learn from (Dawid 1984: prequential).
What counts is target passes (`rounds.py`), compared lesson by lesson with the drafter as shipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .rounds import count_matches, matches_of
from .step_graph import Prediction
from .teacher import SpelledLesson

REMEMBERED = 36  # lessons
_NEWEST = 6  # lessons
_SUDDEN = 2.0  # standard errors


class Comparison(NamedTuple):
    """Tokens of a lesson, and the target passes they take with what was learned and as shipped."""

    tokens: int
    student: int
    shipped: int


NOTHING = Comparison(0, 0, 0)  # to compare: a lesson that cannot be spelled


class Evidence:
    """What the latest lessons say."""

    def __init__(self, latest: Iterable[Comparison] = ()) -> None:
        self._latest = deque(latest, maxlen=REMEMBERED)

    @property
    def latest(self) -> tuple[Comparison, ...]:
        """All that it goes by, oldest first."""
        return tuple(self._latest)

    @property
    def is_full(self) -> bool:
        """Whether the next lesson takes the place of another."""
        return len(self._latest) == REMEMBERED

    def add(self, fresh: Sequence[Comparison]) -> None:
        """Take in new lessons. Where the newest say by themselves that the student does worse, and
        all together do not, the task is another one: what was said before does not count any more.
        """
        self._latest.extend(fresh)
        newest = self.latest[-_NEWEST:]
        is_sudden = are_positive(_differences(newest), _SUDDEN)
        if is_sudden and not self.is_worse(_SUDDEN):
            self._latest.clear()
            self._latest.extend(newest)

    def clear(self) -> None:
        """Forget all, since it was of another student."""
        self._latest.clear()

    def is_better(self, errors: float) -> bool:
        """Whether the student takes fewer passes, by more than so many standard errors."""
        return are_positive([-x for x in _differences(self._latest)], errors)

    def is_worse(self, errors: float) -> bool:
        """Whether the student takes more passes, by more than so many standard errors."""
        return are_positive(_differences(self._latest), errors)

    def tokens_per_pass(self) -> dict[str, float]:
        """Return the target tokens that a pass yields, with what was learned and as shipped."""
        tokens = sum(x.tokens for x in self._latest)
        return {
            "student": tokens / max(1, sum(x.student for x in self._latest)),
            "shipped": tokens / max(1, sum(x.shipped for x in self._latest)),
        }


def compare(lesson: SpelledLesson, student: Prediction, shipped: Prediction) -> Comparison:
    """Count what two predictions of a lesson come to."""
    passes = (
        count_matches(matches_of(x.hit.tolist(), lesson.lengths)).rounds for x in (student, shipped)
    )
    return Comparison(len(lesson.lengths), *passes)


def are_positive(differences: Sequence[float], errors: float) -> bool:
    """Whether the sum is above zero by more than so many of its standard errors: between equals,
    one of the two always does better.
    """
    return sum(differences) > errors * math.sqrt(sum(x * x for x in differences))


def _differences(comparisons: Iterable[Comparison]) -> list[int]:
    return [x.student - x.shipped for x in comparisons]
