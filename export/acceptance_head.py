"""A drafter's acceptance head (docs/formats.md), as a part of its decode graph.

    certainty  = log(q / (1 - q)), q the probability of a row's likeliest token
    acceptance = sigmoid((1 + scale) certainty + out . (h + silu(W h)))

`edgedraft-train head` makes the file; what is computed here has to be what was trained there. A
test holds it: whoever trains need not have the exporter, and the other way round.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .errors import ExportError

HEAD = "acceptance_head.safetensors"
PREFIX = "acceptance_head."  # begins the names of its weights and modules, wherever others are
LEAST_ODDS = 1e-6  # float32 tells no less from none


class AcceptanceHead(nn.Module):
    """Says how likely each row's likeliest token is to be accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, width, bias=False)
        self.out = nn.Parameter(torch.empty(width))
        self.scale = nn.Parameter(torch.empty(()))

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """hidden (1, n, width), logits (1, n, vocab) -> (n,)"""
        # In as few nodes as possible: they are most of what a head costs.
        odds_against = 1 / logits.softmax(-1).amax(-1) - 1
        uncertainty = odds_against.clamp_min(LEAST_ODDS).log()
        change = (hidden + F.silu(self.widen(hidden))) @ self.out
        return (change - (1 + self.scale) * uncertainty).sigmoid()[0]


def read_head(file: Path, width: int) -> AcceptanceHead:
    """Read a head for hidden states of this width; raise ExportError if it is none."""
    head = AcceptanceHead(width)
    try:
        head.load_state_dict({name: x.float() for name, x in load_file(file).items()})
    except Exception as error:  # safetensors and torch raise families of their own
        raise ExportError(
            f"{file}: no acceptance head for hidden states of {width} ({error!s:.80}); make one "
            "with edgedraft-train head, or remove the file"
        ) from error
    return head.eval()
