"""The optimisers of a drafter and how their rates run.

Muon (Jordan et al. 2024) orthogonalises the momentum of every matrix; embeddings and norms take
AdamW. Both rates rise over the first steps, stay, and fall to zero over the last part of the run.
A run with a time limit can be shortened as long as the fall has not begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_RATES = {"muon": 0.02, "adamw": 2e-3}
_WARMUP_STEPS = 50
_DECAY_SHARE = 0.5  # of the run


class DrafterOptimizer:
    """Muon for matrices, AdamW for the rest, one schedule."""

    def __init__(self, model: nn.Module) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(parameter)
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(matrices, lr=_RATES["muon"], weight_decay=0.0),
            "adamw": torch.optim.AdamW(
                others, lr=_RATES["adamw"], betas=(0.9, 0.95), weight_decay=0.0
            ),
        }

    def step(self, scale: float) -> None:
        """Take one step at `scale` times the full rates, and clear the gradients."""
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = _RATES[name] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on exactly here."""
        return {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another optimiser of the same model was."""
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state[name])


def rate_scale(step: int, total_steps: int) -> float:
    """Return the share of the full rate at a step: rise, plateau, linear fall."""
    rise = min(1.0, (step + 1) / _WARMUP_STEPS)
    fall = (total_steps - step) / (_DECAY_SHARE * total_steps)
    return max(0.0, min(rise, fall))


def decay_has_begun(step: int, total_steps: int) -> bool:
    """Return whether the rates fall at this step, so that the run cannot be shortened any more."""
    return step >= (1 - _DECAY_SHARE) * total_steps
