"""The acceptance head: how likely the drafter's next piece is to survive, all before it given.

It reads the row that the piece is drafted from, not the row that the piece has become (OmniDraft,
arXiv 2507.02659, section 3.3, and SpecDec++, arXiv 2405.19715, do the latter): so it can be part of
the decode graph, and no pass is spent on the confidence of the last piece. With `h` the hidden
state of the row and `q` the probability of its likeliest piece,

    certainty  = log(q / (1 - q))
    acceptance = sigmoid((1 + scale) certainty + out . (h + silu(W h)))

`scale` and `out` begin at zero: what was never trained says the drafter's own probability.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from edgedraft.runtime.state import write_atomic

from .errors import TrainError

FILE = "acceptance_head.safetensors"
_LEAST_REST = 1e-6  # of the other pieces together; float32 tells no less from nothing


class AcceptanceHead(nn.Module):
    """Logits of acceptance, one for every row."""

    def __init__(self, width: int) -> None:
        """Make a head that changes nothing, for hidden states of this width."""
        super().__init__()
        self.widen = nn.Linear(width, width, bias=False)
        self.out = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor, certainty: Tensor) -> Tensor:
        """hidden (n, width), certainty (n,) -> (n,)"""
        features = hidden + F.silu(self.widen(hidden))
        return (1 + self.scale) * certainty + features @ self.out


def certainty_of(logits: Tensor) -> Tensor:
    """Return log(q / (1 - q)) of the likeliest piece of every row.

    logits (n, vocab) -> (n,)
    """
    rest = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1) - 1
    return -rest.clamp_min(_LEAST_REST).log()


def acceptance_loss(logits: Tensor, labels: Tensor, rejection_weight: float) -> Tensor:
    """Return the mean cross-entropy, in which what is rejected counts `rejection_weight` times.

    The logits are taken for those of probabilities without that weight, and stay honest: with it,
    the best prediction of p would have the log-odds of p less the weight's logarithm.
    """
    weighted = logits - torch.tensor(rejection_weight).log()
    accepted = labels * F.softplus(-weighted)
    rejected = rejection_weight * (1 - labels) * F.softplus(weighted)
    return (accepted + rejected).mean()


def save_head(head: AcceptanceHead, folder: Path) -> None:
    """Write a head, in half precision as the drafter's weights are."""
    tensors = {name: x.detach().half().contiguous() for name, x in head.state_dict().items()}
    write_atomic(folder / FILE, save(tensors, metadata={"format": "pt"}))


def load_head(folder: Path, width: int) -> AcceptanceHead:
    """Read a drafter's head; raise `TrainError` when there is none, or one of another width."""
    head = AcceptanceHead(width)
    try:
        tensors = load((folder / FILE).read_bytes())
        head.load_state_dict({name: x.float() for name, x in tensors.items()})
    except Exception as error:  # safetensors and torch raise families of their own
        raise TrainError(
            f"{folder}: no acceptance head for hidden states of {width} ({error!s:.80}); make one "
            "with: edgedraft-train head"
        ) from error
    return head
