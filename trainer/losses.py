"""Losses of a draft model, one value per predicted draft token.

`q` is the drafter's distribution, a softmax over its logits. The teacher `p` is either one token
(cross-entropy) or a distribution on few draft tokens, given as ids and probabilities, padded with
probability 0; it is nothing elsewhere. How a target's distribution becomes one over draft tokens is
the trie marginal's business (`trie_marginal.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

_FLOOR = 1e-4
_BLEND = 3.0

DistributionLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return -log q(token): what greedy answers teach, where p is certain of one token.

    logits (n, vocab), tokens (n,) -> (n,)
    """
    return F.cross_entropy(logits, tokens, reduction="none").float()


def forward_kl(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return KL(p || q) = sum_d p(d) log(p(d) / q(d)) (Hinton et al., arXiv 1503.02531).

    logits (n, vocab), ids (n, K), probs (n, K) -> (n,)
    """
    log_q = logits.float().log_softmax(-1).gather(1, ids)
    return (torch.xlogy(probs, probs) - probs * log_q).sum(-1)


def reverse_kl(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return KL(q || p') = sum_d q(d) log(q(d) / p'(d)) (OmniDraft, arXiv 2507.02659, equation 4).

    p' = (1 - e) p + e / vocab with e = 1e-4, since a drafter always gives some probability to
    tokens the teacher gives none.
    """
    log_q = logits.float().log_softmax(-1)
    floor = _FLOOR / logits.shape[-1]
    dense = torch.full_like(log_q, floor).scatter_add(1, ids, (1 - _FLOOR) * probs)
    return (log_q.exp() * (log_q - dense.log())).sum(-1)


def total_variation(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return TV(p, q) = 1 - sum_d min(p(d), q(d)): the chance that a sampled draft is rejected
    (Leviathan et al., arXiv 2211.17192).
    """
    q = logits.float().softmax(-1).gather(1, ids)
    return 1 - torch.minimum(q, probs).sum(-1)


def blended_kl_tv(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return w KL(p || q) + (1 - w) TV(p, q) with w = exp(-3 a), a the mean acceptance 1 - TV, held
    constant: KL leads while drafts are poor, TV once they are good (LK losses, arXiv 2602.23881).
    """
    variation = total_variation(logits, ids, probs)
    share = torch.exp(-_BLEND * (1 - variation.detach().mean()))
    return share * forward_kl(logits, ids, probs) + (1 - share) * variation


DISTRIBUTION_LOSSES: Mapping[str, DistributionLoss] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "lk": blended_kl_tv,
}
LOSSES = ("ce", *DISTRIBUTION_LOSSES)
