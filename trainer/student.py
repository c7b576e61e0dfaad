"""What learns: the LoRA as it is behind its latest step, and what its optimiser remembers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edgedraft.runtime.lora import Lora

from .adamw import AdamState, AdamW, Tensors


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class Student:
    """One state of learning."""

    lora: Lora
    optimizer: AdamState = field(default_factory=AdamState)

    @property
    def average(self) -> Lora:
        """What it would draft with: steady, where its latest state is mostly noise."""
        return replace(self.lora, tensors=self.optimizer.averages or self.lora.tensors)

    def after(self, gradients: Tensors, how: AdamW) -> Student | None:
        """Return it behind one more step; None where a number would not be finite."""
        stepped = how.step(self.lora.tensors, gradients, self.optimizer)
        if stepped is None:
            return None
        return Student(replace(self.lora, tensors=stepped[0]), stepped[1])
