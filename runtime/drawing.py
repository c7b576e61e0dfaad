"""Drafts that are drawn from the drafter's distribution, and verified with it.

Drawn as the request's tokens are: temperature, top-k, top-p, min-p. Penalties and bans bend the
target's distribution only, which costs acceptance and nothing else. Draws and verification have
noise of their own, keyed by seed and position, so that an answer can be had again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .config import SamplingConfig
from .datatypes import Draft, FloatArray, Proposal, Verdict
from .lattice import lattice, line
from .rejection import Dice, verify_lattice
from .sampling import Sampler
from .trie_marginal import TrieMarginal

# Told apart in the counter of the noise.
_VERIFYING, _DRAFTING = 1, 2


class Choice(NamedTuple):
    """A draft token."""

    piece: int
    probability: float
    law: npt.NDArray[np.float64] | None = None  # where it was drawn: what it was drawn from
    rival: tuple[int, float] | None = None  # where wanted: the next likely one, and how likely


Choose: TypeAlias = Callable[[FloatArray], Choice]  # from a logits row, which may be written to


class DraftDrawing:
    """How one request's drafts are drawn and verified."""

    def __init__(
        self, sampling: SamplingConfig, marginal: TrieMarginal, draft_vocab: int, *, trees: bool
    ) -> None:
        """`trees` says whether the target verifies them; else drafts are cut into lines."""
        self._marginal = marginal
        self._trees = trees
        self._seed = sampling.seed
        unbent = replace(
            sampling,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias={},
            banned_tokens=(),
        )
        self._sampler = Sampler(unbent, (), draft_vocab)
        spelled = np.zeros(draft_vocab, np.bool_)
        spelled[marginal.vocab_map.node_piece[1:]] = True
        self._unspelled = np.flatnonzero(~spelled)  # could only be rejected

    def chooser(self, position: int) -> Choose:
        """Return what draws the tokens of the draft that follows `position` tokens."""
        dice = self._dice(position, _DRAFTING)

        def draw(row: FloatArray) -> Choice:
            row[self._unspelled] = -np.inf
            law = self._sampler.probabilities(row)
            piece = dice.draw(law)
            return Choice(piece, float(law[piece]), law)

        return draw

    def proposal(self, draft: Draft, budget: int) -> Proposal:
        """Return what the target verifies of a draft, with the rule that belongs to it."""
        cut = lattice if self._trees else line
        return replace(cut(draft, self._marginal.vocab_map, budget), rule=self._verify)

    def _verify(
        self, proposal: Proposal, logits: FloatArray, sampler: Sampler, position: int
    ) -> Verdict:
        assert proposal.draft is not None and proposal.draft.laws is not None
        return verify_lattice(
            proposal,
            proposal.draft.laws,
            logits,
            sampler,
            self._marginal,
            self._dice(position, _VERIFYING),
            is_line=not self._trees,
        )

    def _dice(self, position: int, purpose: int) -> Dice:
        noise = np.random.Philox(key=self._seed, counter=[0, position, purpose, 0])
        return Dice(np.random.Generator(noise))
