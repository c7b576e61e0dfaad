"""A drafter and its acceptance head learn in one LoRA, each with an optimiser of its own."""

from __future__ import annotations

import numpy as np
import pytest

from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.lora import Lora
from edgedraft.trainer.adamw import AdamW
from edgedraft.trainer.student import Student

HOW = AdamW(learning_rate=0.1, warm_up=1)
OWN, HEAD = ("q.lora_A", "q.lora_B"), ("head.lora_A", "head.lora_B")


def tensors(names: tuple[str, ...], seed: int) -> dict[str, FloatArray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((2, 3), np.float32) for name in names}


@pytest.fixture
def student() -> Student:
    return Student(Lora(2, 2.0, tensors((*OWN, *HEAD), 0)))


def changed(before: Lora, after: Lora) -> set[str]:
    assert list(before.tensors) == list(after.tensors)
    return {
        name for name, x in before.tensors.items() if not np.array_equal(x, after.tensors[name])
    }


def test_a_step_of_either_moves_nothing_of_the_other(student: Student) -> None:
    drafted = student.after(tensors(OWN, 1), HOW)
    assert drafted is not None and changed(student.lora, drafted.lora) == set(OWN)
    judged = drafted.after_judging(tensors(HEAD, 2), HOW)
    assert judged is not None and changed(drafted.lora, judged.lora) == set(HEAD)
    assert (judged.optimizer.count, judged.acceptance.count) == (1, 1)
    assert judged.optimizer is drafted.optimizer and student.optimizer.count == 0


def test_what_is_used_is_the_average_of_both_and_the_head_learns_with_the_drafters(
    student: Student,
) -> None:
    assert changed(student.lora, student.average) == changed(student.lora, student.judge) == set()
    for seed in range(1, 5):
        drafted = student.after(tensors(OWN, seed), HOW)
        judged = drafted and drafted.after_judging(tensors(HEAD, seed), HOW)
        assert judged is not None
        student = judged
    assert changed(student.lora, student.average) == {*OWN, *HEAD}
    assert changed(student.lora, student.judge) == set(OWN)
    assert changed(student.average, student.judge) == set(HEAD)


def test_a_step_into_nowhere_is_none(student: Student) -> None:
    broken = tensors(HEAD, 1)
    broken[HEAD[0]][0, 0] = np.nan
    assert student.after_judging(broken, HOW) is None
    assert student.after({**tensors(OWN, 1), OWN[0]: broken[HEAD[0]]}, HOW) is None
