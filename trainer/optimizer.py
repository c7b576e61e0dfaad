"""The optimisers of a drafter, or of its LoRA, and how their rates run.

Muon (Jordan et al. 2024) orthogonalises the momentum of every matrix; embeddings, norms and what is
added to a drafter take AdamW. All rates rise over the first steps, stay, and fall to zero over the
last part of the run. A run with a time limit can be shortened as long as the fall has not begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_MUON_RATE, _ADAMW_RATE = 0.02, 2e-3
_WARMUP_STEPS = 50
_WARMUP_SHARE = 0.1  # of a run that is shorter than ten times that
_DECAY_SHARE = 0.5  # of the run


class Optimizers:
    """Optimisers of several groups of parameters, each with its full rate, under one schedule."""

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        self._parts = parts

    def step(self, scale: float) -> None:
        """Take one step at `scale` times the full rates, and clear the gradients."""
        for optimizer in self._parts.values():
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on exactly here."""
        return {name: optimizer.state_dict() for name, optimizer in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another optimiser of the same model was."""
        for name, optimizer in self._parts.items():
            optimizer.load_state_dict(state[name])


def drafter_optimizers(model: nn.Module) -> Optimizers:
    """Return Muon for matrices and AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(parameter)
    return Optimizers(
        {
            "muon": torch.optim.Muon(matrices, lr=_MUON_RATE, weight_decay=0.0),
            "adamw": _adamw(others, _ADAMW_RATE),
        }
    )


def lora_optimizers(model: nn.Module, rate: float) -> Optimizers:
    """Return AdamW for whatever is not frozen."""
    return Optimizers({"adamw": _adamw([x for x in model.parameters() if x.requires_grad], rate)})


def head_optimizers(head: nn.Module, rate: float) -> Optimizers:
    """Return AdamW for an acceptance head."""
    return Optimizers({"adamw": _adamw(list(head.parameters()), rate)})


def _adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


def rate_scale(step: int, total_steps: int) -> float:
    """Return the share of the full rate at a step: rise, plateau, linear fall."""
    rise = min(1.0, (step + 1) / min(_WARMUP_STEPS, 1 + _WARMUP_SHARE * total_steps))
    fall = (total_steps - step) / (_DECAY_SHARE * total_steps)
    return max(0.0, min(rise, fall))


def decay_has_begun(step: int, total_steps: int) -> bool:
    """Return whether the rates fall at this step, so that the run cannot be shortened any more."""
    return step >= (1 - _DECAY_SHARE) * total_steps
