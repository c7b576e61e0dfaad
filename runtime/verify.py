"""Which proposed tokens the target agrees with."""

from __future__ import annotations

from .datatypes import ROOT, FloatArray, Proposal, Verdict
from .sampling import Sampler


def verify(proposal: Proposal, logits: FloatArray, sampler: Sampler, position: int) -> Verdict:
    """Walk down the proposal along the target's own choices.

    Row 0 of `logits`, shape (m + 1, vocab), belongs to the pending token at `position - 1`, row
    i + 1 to node i. The target chooses each token itself, greedily or with the noise of its
    position, and a proposed token only settles which row is read next: the text equals plain
    decoding's for every proposal (verification by exact match, as in Timor et al., arXiv
    2502.05202). The sampler learns of the accepted tokens on the way; the next token is left to
    the caller to commit.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = sampler.choose(logits[node + 1], position + len(path))
        child = proposal.child(node, token)
        if child is None:
            return Verdict(tuple(path), token)
        sampler.commit(token)
        path.append(child)
        node = child
