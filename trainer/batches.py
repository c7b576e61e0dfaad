"""Which examples every step of a run sees: a pure function of the examples and the seed, so that a
run can be taken up again at any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .examples import Example, Teacher
from .tokenizer import END_ID

BATCH_TOKENS = 4096
_WIDTH_STEP = 16


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Examples side by side, padded on the right with weight 0."""

    tokens: npt.NDArray[np.int64]  # (examples, width)
    weights: npt.NDArray[np.float32]  # (examples, width)
    teacher: Teacher | None  # (examples, width, K)


def plan_batches(
    texts: Sequence[Example],
    answers: Sequence[Example],
    epochs: int,
    seed: int,
    most_text_batches: int | None = None,
) -> list[list[Example]]:
    """Return what every step trains on: the texts once, then the answers again and again."""
    rng = np.random.default_rng(seed)
    plan = group(texts, rng)[:most_text_batches]
    for _ in range(epochs):
        plan += group(answers, rng)
    return plan


def group(
    examples: Sequence[Example], rng: np.random.Generator, max_tokens: int = BATCH_TOKENS
) -> list[list[Example]]:
    """Shuffle examples into groups of at most `max_tokens` tokens, those of like length together.

    An example longer than that gets a group of its own.
    """
    order = rng.permutation(len(examples))
    # A stable sort leaves examples of one width in random order.
    order = order[np.argsort([_width(examples[i]) for i in order], kind="stable")]
    groups: list[list[Example]] = []
    for i in order:
        example = examples[i]
        if not groups or (len(groups[-1]) + 1) * _width(example) > max_tokens:
            groups.append([])
        groups[-1].append(example)
    return [groups[i] for i in rng.permutation(len(groups))]


def collate(examples: Sequence[Example]) -> Batch:
    """Put examples side by side."""
    shape = (len(examples), max(map(_width, examples)))
    tokens = np.full(shape, END_ID, np.int64)
    weights = np.zeros(shape, np.float32)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        weights[row, : len(example.weights)] = example.weights
    return Batch(tokens, weights, _teacher(examples, tokens))


def _width(example: Example) -> int:
    return -(-len(example.tokens) // _WIDTH_STEP) * _WIDTH_STEP


def _teacher(examples: Sequence[Example], tokens: npt.NDArray[np.int64]) -> Teacher | None:
    """Put teachers side by side; an example without is certain of its own tokens."""
    most = max((e.teacher.ids.shape[1] for e in examples if e.teacher), default=0)
    if most == 0:
        return None
    ids = np.repeat(tokens[:, :, None], most, axis=2)
    probs = np.zeros(ids.shape, np.float32)
    probs[:, :, 0] = 1.0
    for row, example in enumerate(examples):
        if teacher := example.teacher:
            length, k = teacher.ids.shape
            ids[row, :length, :k] = teacher.ids
            probs[row, :length] = 0.0
            probs[row, :length, :k] = teacher.probs
    return Teacher(ids, probs)
