"""What a learner needs to go on is written as it is, or told to be damaged and left alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from damage import MUTATIONS, mutations
from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.lora import Lora, lora_shapes
from edgedraft.trainer.adamw import AdamState, Tensors
from edgedraft.trainer.evidence import Comparison, Evidence
from edgedraft.trainer.student import Student
from edgedraft.trainer.student_file import Progress, StudentFile

SHAPES = {
    "layers.0.q_proj": (6, 4),
    "layers.0.k_proj": (3, 4),
    "lm_head": (20, 4),
    "acceptance_head.widen": (4, 4),
}


def student_file(folder: Path, drafter: str = "drafter", target: str = "target") -> StudentFile:
    return StudentFile(folder / "student.bin", drafter, target, SHAPES)


def arrays(names: list[str], rank: int, seed: int) -> dict[str, FloatArray]:
    rng = np.random.default_rng(seed)
    shapes = lora_shapes({name: SHAPES[name] for name in names}, rank)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def state(names: list[str], steps: int) -> AdamState:
    return AdamState(steps, *(arrays(names, 2, seed) if steps else {} for seed in (1, 2, 3)))


def progress(steps: int = 7, head_steps: int = 3) -> Progress:
    """Return what cannot be told from anything else: a rank, an alpha and an order of its own."""
    own, head = ["lm_head", "layers.0.q_proj"], ["acceptance_head.widen"]
    lora = Lora(2, 0.5, arrays([*own, *head], 2, 0))
    student = Student(lora, state(own, steps), state(head, head_steps))
    evidence = Evidence([Comparison(40, 21, 20), Comparison(8, 3, 4)])
    return Progress(12, student, evidence, 5, 3)


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(x, other[n]) for n, x in one.items())


@pytest.mark.parametrize("head_steps", [0, 3])
@pytest.mark.parametrize("steps", [0, 7])
def test_what_was_written_is_read_again(tmp_path: Path, steps: int, head_steps: int) -> None:
    written = progress(steps, head_steps)
    student_file(tmp_path).write(written)
    read = student_file(tmp_path).read()
    assert (read.next_lesson, read.generation, read.owed) == (12, 5, 3)
    assert read.evidence.latest == written.evidence.latest
    ours, theirs = written.student, read.student
    assert ours is not None and theirs is not None
    assert (theirs.lora.rank, theirs.lora.alpha) == (2, 0.5)
    assert theirs.lora.modules == ours.lora.modules
    assert same(ours.lora.tensors, theirs.lora.tensors)
    assert (theirs.optimizer.count, theirs.acceptance.count) == (steps, head_steps)
    for name in ("means", "squares", "averages"):
        assert same(getattr(ours.optimizer, name), getattr(theirs.optimizer, name))
        assert same(getattr(ours.acceptance, name), getattr(theirs.acceptance, name))


def test_of_a_learner_that_has_not_begun_little_is_written(tmp_path: Path) -> None:
    assert student_file(tmp_path).read() is not None
    student_file(tmp_path).write(Progress(3))
    read = student_file(tmp_path).read()
    assert (read.next_lesson, read.student, read.generation, read.owed) == (3, None, None, 0)
    assert read.evidence.latest == ()


@pytest.mark.parametrize("other", [{"drafter": "another"}, {"target": "another"}])
def test_what_another_pair_has_learned_is_told_of_and_not_used(
    tmp_path: Path, other: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    student_file(tmp_path).write(progress())
    assert student_file(tmp_path, **other).read().student is None
    (message,) = caplog.messages
    assert "student.bin" in message and "something else" in message


def test_a_file_that_anything_happened_to_is_whole_or_told_of_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    student_file(tmp_path).write(progress())
    path = tmp_path / "student.bin"
    content = path.read_bytes()
    for spoilt in mutations(content, MUTATIONS, random.Random(0)):
        path.write_bytes(spoilt)
        caplog.clear()
        read = student_file(tmp_path).read()
        assert (read.student is not None) == (spoilt == content)
        if spoilt != content:
            (message,) = caplog.messages
            assert str(path) in message and "\n" not in message
            assert read.next_lesson == 0
