"""What learns: the LoRA as it is behind its latest step, and what its optimisers remember.

An acceptance head learns with the drafter, but from what the drafter does and not in the same
steps: so its part of the LoRA has an optimiser of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edgedraft.runtime.lora import Lora

from .adamw import AdamState, AdamW, Tensors


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class Student:
    """One state of learning."""

    lora: Lora
    optimizer: AdamState = field(default_factory=AdamState)  # of all but the acceptance head
    acceptance: AdamState = field(default_factory=AdamState)

    @property
    def average(self) -> Lora:
        """What it would draft with: steady, where its latest state is mostly noise."""
        return self._with({**self.optimizer.averages, **self.acceptance.averages})

    @property
    def judge(self) -> Lora:
        """What the acceptance head learns with: what would be drafted with, and its own latest
        state.
        """
        return self._with(self.optimizer.averages)

    def after(self, gradients: Tensors, how: AdamW) -> Student | None:
        """Return it behind one more step; None where a number would not be finite."""
        stepped = how.step(self._learning(gradients), gradients, self.optimizer)
        if stepped is None:
            return None
        return replace(self, lora=self._with(stepped[0]), optimizer=stepped[1])

    def after_judging(self, gradients: Tensors, how: AdamW) -> Student | None:
        """Return it behind one more step of the acceptance head; None where a number would not be
        finite.
        """
        stepped = how.step(self._learning(gradients), gradients, self.acceptance)
        if stepped is None:
            return None
        return replace(self, lora=self._with(stepped[0]), acceptance=stepped[1])

    def _learning(self, gradients: Tensors) -> Tensors:
        return {name: self.lora.tensors[name] for name in gradients}

    def _with(self, tensors: Tensors) -> Lora:
        return replace(self.lora, tensors={**self.lora.tensors, **tensors})
