"""What each step of an update learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle

import numpy as np

from .learner_config import LearnerConfig
from .lesson import Lesson
from .step_graph import Passage
from .teacher import Teacher

_LESSONS = 4  # that one step of an acceptance head is made of, at most


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
    yield from _steps(turns, config.steps, config.positions)


def interleaved_curriculum(
    recent: Sequence[Lesson],
    teacher: Teacher,
    config: LearnerConfig,
    rng: np.random.Generator,
) -> Iterator[list[Passage]]:
    """Yield the passages of each step of an acceptance head that learns from a buffer."""
    # No more than the steps can use, since spelling takes time; short ones come several times.
    most = config.acceptance_steps * _LESSONS
    some = [recent[i] for i in rng.permutation(len(recent))[:most]]
    spelled = [x.passage for lesson in some if (x := teacher.spell(lesson))]
    yield from _steps(cycle(spelled), config.acceptance_steps, config.positions)


def _steps(turns: Iterator[Passage], count: int, positions: int) -> Iterator[list[Passage]]:
    for _ in range(count):
        passages: list[Passage] = []
        for passage in turns:
            passages.append(passage)
            if sum(x.num_predicted for x in passages) >= positions:
                break
        if passages:
            yield passages
