"""What each step of an update learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle

import numpy as np

from .learner_config import LearnerConfig
from .lesson import Lesson
from .step_graph import Passage
from .teacher import Teacher


def curriculum(
    new: Sequence[Lesson],
    old: Sequence[Lesson],
    teacher: Teacher,
    config: LearnerConfig,
    rng: np.random.Generator,
) -> Iterator[list[Passage]]:
    """Yield the passages of each step: a new lesson and an old one in turn, so that what was known
    is not forgotten. New ones come as often as each other, old ones are drawn.
    """
    order = rng.permutation(len(new))
    drawn = rng.integers(len(old), size=2 * config.steps) if old else ()
    pools = [
        [x.passage for lesson in lessons if (x := teacher.spell(lesson))]
        for lessons in ([new[i] for i in order], [old[i] for i in drawn])
    ]
    turns = chain.from_iterable(zip(*(cycle(pool) for pool in pools if pool), strict=True))
    for _ in range(config.steps):
        passages: list[Passage] = []
        for passage in turns:
            passages.append(passage)
            if sum(x.num_predicted for x in passages) >= config.positions:
                break
        if passages:
            yield passages
