"""Every step has enough to learn from, half of it new."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgedraft.trainer.curriculum import curriculum, interleaved_curriculum
from edgedraft.trainer.learner_config import LearnerConfig
from edgedraft.trainer.lesson import Lesson
from edgedraft.trainer.step_graph import Passage
from edgedraft.trainer.teacher import Objective, Teacher
from tiny_learner import tiny_pair

CONFIG = LearnerConfig(steps=10, positions=25)


def lessons(first: int, count: int) -> list[Lesson]:
    """Return lessons of ten pieces that can be told apart."""
    return [Lesson.certain([1], [number] * 10) for number in range(first, first + count)]


def steps(new: list[Lesson], old: list[Lesson]) -> list[list[Passage]]:
    teacher = Teacher(tiny_pair(), Objective())
    return list(curriculum(new, old, teacher, CONFIG, np.random.default_rng(0)))


def told(passages: list[Passage]) -> list[int]:
    return [int(passage.pieces[-1]) for passage in passages]


def test_new_and_old_lessons_come_in_turn_and_every_new_one_as_often_as_the_others() -> None:
    flat = [number for step in steps(lessons(0, 5), lessons(20, 30)) for number in told(step)]
    assert len(flat) == 30
    assert [number < 20 for number in flat] == [True, False] * 15
    assert sorted(flat[::2]) == sorted([0, 1, 2, 3, 4] * 3)
    assert len(set(flat[1::2])) > 8


@pytest.mark.parametrize(("new", "old"), [(3, 0), (0, 3)])
def test_one_kind_alone_will_do(new: int, old: int) -> None:
    found = steps(lessons(0, new), lessons(20, old))
    assert [sum(x.num_predicted for x in step) for step in found] == [30] * CONFIG.steps


def test_from_nothing_there_is_nothing_to_learn() -> None:
    assert steps([], []) == []
    assert steps([Lesson.certain([], [5])], []) == []


def test_an_interleaved_acceptance_head_learns_from_all_that_is_recent() -> None:
    config = replace(CONFIG, acceptance="interleaved", acceptance_steps=4)
    teacher, rng = Teacher(tiny_pair(), Objective()), np.random.default_rng(0)
    found = [told(x) for x in interleaved_curriculum(lessons(0, 40), teacher, config, rng)]
    assert [len(step) for step in found] == [3] * 4
    assert len({x for step in found for x in step}) == 12
