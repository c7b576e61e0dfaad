"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on named arrays, with the gradient clipped to a
norm over all of them (Pascanu et al., arXiv 1211.5063). What is worth using is the average of the
tensors behind the latest steps (Polyak & Juditsky 1992): of a few answers each, steps are noise for
the most part.

Nothing is changed in place: whoever keeps tensors and the state that belongs to them can go back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from edgedraft.runtime.datatypes import FloatArray

Tensors: TypeAlias = Mapping[str, FloatArray]

_SOON = 10  # steps: an average of few ones forgets them sooner


@dataclass(frozen=True, slots=True)
class AdamW:
    """How a step is taken."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0
    warm_up: int = 10  # steps, since the first ones know little of how large gradients are
    averaging: float = 0.99  # what is left of an average after a step; less during the first ones

    def step(
        self, tensors: Tensors, gradients: Tensors, state: AdamState
    ) -> tuple[dict[str, FloatArray], AdamState] | None:
        """Return tensors and state behind one step; None where a number would not be finite."""
        square = sum(float(np.vdot(x, x)) for x in gradients.values())
        if not np.isfinite(square):
            return None
        # Never a division by zero, and no growth of gradients that are small.
        clip = np.float32(self.max_norm / max(square**0.5, self.max_norm))
        count = state.count + 1
        b1, b2 = (np.float32(x) for x in self.betas)
        # Both corrections for starting at zero, in one factor and the root's floor.
        rate = self.learning_rate * min(1.0, count / self.warm_up)
        size = np.float32(rate / (1 - self.betas[0] ** count))
        scale = np.float32((1 - self.betas[1] ** count) ** -0.5)
        decay = np.float32(1 - rate * self.weight_decay)
        left = np.float32(min(self.averaging, state.count / (state.count + _SOON)))
        after: dict[str, FloatArray] = {}
        averages: dict[str, FloatArray] = {}
        means: dict[str, FloatArray] = {}
        squares: dict[str, FloatArray] = {}
        for name, tensor in tensors.items():
            gradient = gradients[name] * clip
            mean = (1 - b1) * gradient
            spread = (1 - b2) * np.square(gradient)
            if name in state.means:
                mean += b1 * state.means[name]
                spread += b2 * state.squares[name]
            change = mean / (np.sqrt(spread) * scale + np.float32(self.epsilon))
            after[name] = tensor * decay - size * change
            if not np.isfinite(after[name]).all():
                return None
            means[name], squares[name] = mean, spread
            averages[name] = after[name]
            if name in state.averages:
                averages[name] = left * state.averages[name] + (1 - left) * after[name]
        return after, AdamState(count, means, squares, averages)


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class AdamState:
    """What the optimiser remembers of the gradients so far."""

    count: int = 0
    means: Tensors = field(default_factory=dict)
    squares: Tensors = field(default_factory=dict)
    averages: Tensors = field(default_factory=dict)  # of the tensors themselves
