"""What a drafter has learned: low-rank additions to its weights (LoRA, arXiv 2106.09685).

A module that multiplies by W, (outputs, inputs), multiplies by

    W + (alpha / rank) * B @ A          A (rank, inputs), B (outputs, rank)

as in PEFT. Tensors are called `MODULE.lora_A` and `MODULE.lora_B`, everywhere: in the training
graph, in files, here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .datatypes import FloatArray

Shape: TypeAlias = tuple[int, int]

_A, _B = ".lora_A", ".lora_B"
# Multiplications. BLAS shares larger products out among all cores, and waits where one of them is
# busy: 15 ms a product, so that a merge took 370 ms instead of 55.
_SMALL_PRODUCT = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class Lora:
    """One low-rank addition per module, all of one rank."""

    rank: int
    alpha: float
    tensors: Mapping[str, FloatArray]

    @classmethod
    def initial(
        cls, modules: Mapping[str, Shape], rank: int, alpha: float, rng: np.random.Generator
    ) -> Lora:
        """Return where learning starts: A is drawn, B is zero, so nothing is added yet.

        `modules` says which are to learn, and the shape (outputs, inputs) of their weights.
        """
        tensors: dict[str, FloatArray] = {}
        for name, shape in lora_shapes(modules, rank).items():
            # The variance that the paper's own code draws with.
            deviation = (3 * shape[1]) ** -0.5 if name.endswith(_A) else 0
            tensors[name] = rng.normal(0, deviation, shape).astype(np.float32)
        return cls(rank, alpha, tensors)

    def equals(self, other: Lora | None) -> bool:
        """Whether another one adds the same, to the bit."""
        return (
            other is not None
            and (self.rank, self.alpha) == (other.rank, other.alpha)
            and self.tensors.keys() == other.tensors.keys()
            and all(np.array_equal(x, other.tensors[name]) for name, x in self.tensors.items())
        )

    @property
    def scale(self) -> float:
        """What B @ A is multiplied by."""
        return self.alpha / self.rank

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it changes."""
        return tuple(name.removesuffix(_A) for name in self.tensors if name.endswith(_A))

    def merged(self, weight: npt.NDArray[Any], module: str) -> FloatArray:
        """Return what the module multiplies by when its own weight, (outputs, inputs), is this."""
        a = self.tensors[module + _A] * np.float32(self.scale)
        b = self.tensors[module + _B]
        merged = np.empty(weight.shape, np.float32)
        rows = max(1, _SMALL_PRODUCT // a.size)
        for start in range(0, len(b), rows):
            part = slice(start, start + rows)
            np.matmul(b[part], a, out=merged[part])
            merged[part] += weight[part]
        return merged


def lora_shapes(modules: Mapping[str, Shape], rank: int) -> dict[str, Shape]:
    """Return the shapes of the tensors for modules with weights (outputs, inputs)."""
    shapes: dict[str, Shape] = {}
    for module, (outputs, inputs) in modules.items():
        shapes[module + _A] = rank, inputs
        shapes[module + _B] = outputs, rank
    return shapes
