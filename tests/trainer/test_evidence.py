"""What lessons say of a student, and when that is enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgedraft.trainer.evidence import REMEMBERED, Comparison, Evidence, are_positive, compare
from edgedraft.trainer.lesson import Lesson
from edgedraft.trainer.step_graph import Prediction
from edgedraft.trainer.teacher import Objective, Teacher
from tiny_learner import tiny_pair


def told(*more: int) -> list[Comparison]:
    """Return lessons for which a student takes so many passes more."""
    return [Comparison(40, 20 + x, 20) for x in more]


@pytest.mark.parametrize(
    ("more", "is_worse"),
    [
        ([], False),
        ([1], False),
        ([0, 0], False),
        ([3, -2], False),
        ([2, 2], True),
        ([-2, -2], False),
    ],
)
def test_a_difference_within_its_standard_error_counts_as_none(
    more: Sequence[int], is_worse: bool
) -> None:
    evidence = Evidence()
    evidence.add(told(*more))
    assert evidence.is_worse(1.0) == is_worse
    evidence = Evidence()
    evidence.add(told(*(-x for x in more)))
    assert evidence.is_better(1.0) == is_worse


def test_more_standard_errors_ask_for_more_lessons() -> None:
    assert are_positive([1.0] * 5, 2.0)
    assert not are_positive([1.0] * 4, 2.0)


def test_only_the_latest_lessons_count() -> None:
    evidence = Evidence()
    evidence.add(told(*[-1] * REMEMBERED))
    assert evidence.is_full and evidence.is_better(2.0)
    for _ in range(REMEMBERED // 2):
        evidence.add(told(1, 1))
    assert evidence.is_worse(2.0)
    evidence.clear()
    assert not evidence.is_full and not evidence.is_worse(0.0)


def test_a_sudden_fall_counts_at_once_whatever_was_before() -> None:
    evidence = Evidence()
    evidence.add(told(*[-1] * 30))
    evidence.add(told(1, 1, -1, 1, 1, 1))
    assert evidence.is_better(2.0)  # not so sudden
    evidence.add(told(1, 1, 1, 2, 1, 1))
    assert evidence.is_worse(2.0) and not evidence.is_full


def test_a_sudden_fall_shows_in_few_lessons_at_a_time_and_lasts() -> None:
    evidence = Evidence(told(*[-1] * 30))
    for _ in range(2):
        evidence.add(told(1, 1, 1))
    assert evidence.latest == tuple(told(*[1] * 6))
    for _ in range(10):  # nothing is forgotten while all say the same
        evidence.add(told(1, 1, 1))
    assert evidence.is_full


def test_tokens_per_pass_are_of_all_lessons_together() -> None:
    evidence = Evidence()
    assert evidence.tokens_per_pass() == {"student": 0, "shipped": 0}
    evidence.add(told(-10, 0))
    assert evidence.tokens_per_pass() == {"student": 80 / 30, "shipped": 2.0}


def test_target_passes_are_counted_from_what_was_predicted() -> None:
    lesson = Teacher(tiny_pair(), Objective()).spell(Lesson.certain([1], list(range(40))))
    assert lesson is not None
    all_right = np.ones(lesson.passage.num_predicted, bool)
    right, wrong = (Prediction(hit, np.ones(len(hit))) for hit in (all_right, ~all_right))
    assert compare(lesson, right, wrong) == (40, 8, 40)
    assert compare(lesson, wrong, wrong) == (40, 40, 40)
