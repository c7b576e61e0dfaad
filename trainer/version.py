"""One state of a drafter, and how well it drafts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgedraft.runtime.lora import Lora

from .adamw import AdamState
from .lesson import Lesson
from .rounds import Counts, count_matches, matches_of
from .step_graph import StepGraph, passes
from .teacher import Teacher


@dataclass(slots=True, eq=False)
class Version:
    """A drafter with what it learned, None for one as it was shipped."""

    lora: Lora | None
    optimizer: AdamState = field(default_factory=AdamState)
    counts: dict[int, Counts] = field(default_factory=dict)  # by the number of a lesson

    def score(self, lessons: Iterable[Lesson], graph: StepGraph, teacher: Teacher) -> bool:
        """Let one pass predict lessons that were not yet; return whether some are left then.

        Raises `Interrupted`.
        """
        spelled = []
        for lesson in lessons:
            if lesson.number in self.counts:
                continue
            if (found := teacher.spell(lesson)) is None:
                self.counts[lesson.number] = Counts()
            else:
                spelled.append((lesson.number, found))
        if not spelled:
            return False
        group = passes([x.passage for _, x in spelled])[0]
        predictions = graph.predictions(group, self.lora)
        for (number, found), prediction in zip(spelled, predictions, strict=False):
            matches = matches_of(prediction.hit.tolist(), found.lengths)
            self.counts[number] = count_matches(matches)
        return len(group) < len(spelled)

    def tokens_per_pass(self, weights: Mapping[int, float]) -> float:
        """Return the target tokens that a pass yields over lessons that were scored, each with its
        weight; 0 where there are none.
        """
        tokens = sum(weight * self.counts[number].tokens for number, weight in weights.items())
        rounds = sum(weight * self.counts[number].rounds for number, weight in weights.items())
        return tokens / rounds if rounds else 0.0

    def more_rounds(self, other: Version, weights: Mapping[int, float]) -> list[float]:
        """Return how many passes more than another it takes for each lesson, times its weight."""
        return [
            weight * (self.counts[number].rounds - other.counts[number].rounds)
            for number, weight in weights.items()
        ]

    def keep_only(self, lessons: Sequence[Lesson]) -> None:
        """Forget the counts of all other lessons."""
        self.counts = {x.number: self.counts[x.number] for x in lessons if x.number in self.counts}


def are_positive(differences: Sequence[float], errors: float) -> bool:
    """Whether the sum is above zero by more than so many of its standard errors: between equals,
    one of the two always does better.
    """
    return sum(differences) > errors * math.sqrt(sum(x * x for x in differences))
