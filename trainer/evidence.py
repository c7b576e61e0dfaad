"""Whether a drafter does better with what it learned, told by lessons before it learns from them.

That is a test on new data every time, and costs no data to learn from (Dawid 1984: prequential).
What counts is target passes (`rounds.py`), compared lesson by lesson with the drafter as shipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgedraft.runtime.lora import Lora

from .lesson import Lesson
from .rounds import Counts, count_matches, matches_of
from .step_graph import StepGraph
from .teacher import Teacher

REMEMBERED = 36  # lessons
_SUDDEN = 2.0  # standard errors


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one lesson takes with what was learned, and as shipped."""

    student: Counts
    shipped: Counts


class Evidence:
    """What the latest lessons say."""

    def __init__(self) -> None:
        self._latest: deque[Comparison] = deque(maxlen=REMEMBERED)

    @property
    def is_full(self) -> bool:
        """Whether the next lesson takes the place of another."""
        return len(self._latest) == REMEMBERED

    def add(self, fresh: Sequence[Comparison]) -> None:
        """Take in new lessons. Where they say by themselves that the student does worse, the task
        is another one, and what was said before does not count any more.
        """
        if are_positive(_differences(fresh), _SUDDEN):
            self._latest.clear()
        self._latest.extend(fresh)

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
        totals = {"student": Counts(), "shipped": Counts()}
        for comparison in self._latest:
            for name, total in totals.items():
                total.add(getattr(comparison, name))
        return {name: total.tokens / max(1, total.rounds) for name, total in totals.items()}


def compare(lesson: Lesson, lora: Lora | None, graph: StepGraph, teacher: Teacher) -> Comparison:
    """Predict a lesson with a LoRA and without. Raises `Interrupted`."""
    if (spelled := teacher.spell(lesson)) is None:
        return Comparison(Counts(), Counts())

    def drafted(with_lora: Lora | None) -> Counts:
        (prediction,) = graph.predictions([spelled.passage], with_lora)
        return count_matches(matches_of(prediction.hit.tolist(), spelled.lengths))

    shipped = drafted(None)
    return Comparison(drafted(lora) if lora else shipped, shipped)


def are_positive(differences: Sequence[float], errors: float) -> bool:
    """Whether the sum is above zero by more than so many of its standard errors: between equals,
    one of the two always does better.
    """
    return sum(differences) > errors * math.sqrt(sum(x * x for x in differences))


def _differences(comparisons: Iterable[Comparison]) -> list[int]:
    return [x.student.rounds - x.shipped.rounds for x in comparisons]
