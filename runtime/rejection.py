"""Verification with draft probabilities: exact in law, for sampling at high temperature.

A drafted piece is kept as often as the target's distribution allows, and what replaces it otherwise
makes up the difference, so that the piece is a draw from the target (Leviathan et al., arXiv
2211.17192). The text is distributed exactly as plain decoding's, but no longer equal to it token by
token: that is `verify.py`. Merging pieces into tokens first and testing those, as in OmniDraft
(arXiv 2507.02659, section 3.1), is not exact: the law of a merged token is not the product of its
pieces' probabilities.

What must hold of a draft, for all rules here:

* Its pieces were drawn one after the other, each from its row of `laws`, shape (k, draft): the law
  really used, masked, tempered and truncated as it was. Rows need not sum to one.
* Where it ends depends on nothing but the pieces in it. No piece that was looked at is left out:
  not at the end, and not with the whole draft.
* The proposal is one that `lattice.py` made of it, or its first nodes. How many they are may depend
  on pieces up to the end of the last one, on no later ones.

Row 0 of `logits`, shape (m + 1, vocab), belongs to the pending token, row i + 1 to node i. The
sampler learns of the accepted tokens on the way; the next token is left to the caller to commit.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .datatypes import ROOT, FloatArray, Proposal, Verdict
from .sampling import Sampler
from .trie_marginal import DoubleArray, TrieMarginal
from .vocab_map import IntArray, VocabMap

Laws: TypeAlias = npt.NDArray[np.floating[Any]]


class Dice:
    """The chance that verification needs."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def happens(self, probability: float) -> bool:
        """Say yes this often; a probability may exceed 1."""
        return self._rng.random() < probability

    def draw(self, weights: DoubleArray) -> int:
        """Return an index as often as its share of the weights."""
        sums = weights.cumsum()
        return int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))


def verify_lattice(
    proposal: Proposal,
    laws: Laws,
    logits: FloatArray,
    sampler: Sampler,
    marginal: TrieMarginal,
    dice: Dice,
    *,
    is_line: bool = False,
) -> Verdict:
    """Walk down a `lattice` piece by piece, or down a `line`.

    Each piece is tested against the marginal of the target's distribution; where a token is
    complete, its share of the tokens that begin like it decides whether it is the one. In a line, a
    token with a row of its own says that the next piece does not prolong it to another token: that
    piece is then a draw from the others.
    """
    assert proposal.draft is not None, "made by lattice.py"
    vocab_map = marginal.vocab_map
    path: list[int] = []
    at, node = ROOT, 0  # the last accepted token, and the pieces behind it as a trie node
    p = marginal.arrange(sampler.probabilities(logits[0]))
    excluded: IntArray = np.zeros(0, np.intp)

    def ending_with(tokens: slice) -> Verdict:
        drawn = tokens.start + dice.draw(p[tokens])
        return Verdict(tuple(path), int(marginal.tokens[drawn]))

    for piece, law in zip(proposal.draft.tokens, laws, strict=True):
        q = law.astype(np.float64)
        q[excluded] = 0
        symbol = _coupled(marginal.next_pieces(p, node), q, piece, dice)
        if symbol != piece:
            return ending_with(marginal.begun_with(node, symbol))
        node = vocab_map.step(node, piece)
        excluded = excluded[:0]
        token, begun = vocab_map.finished(node), p[marginal.begun(node)]
        if token < 0 or not dice.happens(begun[0] / begun.sum()):
            continue
        child = proposal.child(at, token)
        if child is None:
            return Verdict(tuple(path), token)
        sampler.commit(token)
        path.append(child)
        if is_line:
            excluded = marginal.finishing(node)
        at, node = child, 0
        p = marginal.arrange(sampler.probabilities(logits[child + 1]))
    return ending_with(marginal.longer(node))


def verify_shared(
    proposal: Proposal,
    laws: Laws,
    logits: FloatArray,
    sampler: Sampler,
    vocab_map: VocabMap,
    dice: Dice,
) -> Verdict:
    """Walk down a chain of `shared` tokens (Timor et al., arXiv 2502.05202, algorithm 4).

    Where the drafter was kept to shared pieces, their law is its own, renormalised.
    """
    assert proposal.draft is not None, "made by lattice.py"
    path: list[int] = []
    for node, (piece, law) in enumerate(zip(proposal.draft.tokens, laws, strict=True)):
        p = sampler.probabilities(logits[node])
        # One place more, for pieces that are no token.
        tokens = np.where(vocab_map.direct_token >= 0, vocab_map.direct_token, p.size)
        q = np.zeros(p.size + 1)
        np.add.at(q, tokens, law)
        token = _coupled(np.append(p, 0), q, int(tokens[piece]), dice)
        if token != tokens[piece] or node == len(proposal.tokens):
            return Verdict(tuple(path), token)
        sampler.commit(token)
        path.append(node)
    return Verdict(tuple(path), dice.draw(sampler.probabilities(logits[len(path)])))


def _coupled(p: DoubleArray, q: DoubleArray, guess: int, dice: Dice) -> int:
    """Return a draw from p that equals `guess`, a draw from q, as often as any rule can make it.

    Both are weights; q may be shorter, having nothing behind its end.
    """
    p = p / p.sum()
    q = q / q.sum()
    if dice.happens(p[guess] / q[guess]):
        return guess
    rest = p.copy()
    rest[: q.size] = np.maximum(rest[: q.size] - q, 0)
    # What should always be kept may be refused by rounding, with nothing left to replace it.
    return dice.draw(rest if rest.any() else p)
