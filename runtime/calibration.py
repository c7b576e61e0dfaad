"""How often what a proposer calls likely turns out right.

A drafter's probabilities are its own, not the target's: a new domain makes it too sure of itself,
an easy text too modest. `Calibration` counts, for each range of stated probabilities, how many of
the proposed tokens the target would have said, and returns that rate instead. Old outcomes fade, so
it follows the text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .datatypes import ROOT, Proposal

_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # of the ranges that share counts
_MIDDLES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.935, 0.985)
_PRIOR_WEIGHT = 8.0
_DECAY = 0.98  # per counted outcome: about the last fifty matter


class Calibration:
    """Maps stated probabilities to counted ones, and remembers the last proposal to count it."""

    def __init__(self) -> None:
        self._right = [p * _PRIOR_WEIGHT for p in _MIDDLES]  # a start that believes what is stated
        self._counted = [_PRIOR_WEIGHT] * len(_MIDDLES)
        self._pending: tuple[int, Proposal] | None = None

    def calibrated(self, stated: float) -> float:
        """Return the counted probability of a token that was given the stated one."""
        i = bisect_right(_BOUNDS, stated)
        return self._right[i] / self._counted[i]

    def expect(self, position: int, proposal: Proposal) -> None:
        """Remember what was proposed for `position` on, to be compared by `score`."""
        self._pending = (position, proposal)

    def forget(self) -> None:
        """Drop the remembered proposal; the counts hold no text."""
        self._pending = None

    def score(self, committed: Sequence[int]) -> None:
        """Count the remembered proposal, as far as the committed tokens show what was right."""
        if self._pending is None:
            return
        position, proposal = self._pending
        self._pending = None
        node: int | None = ROOT
        for true in committed[position : position + len(proposal.tokens)]:
            if node is None:
                break
            for child in proposal.children(node):
                i = bisect_right(_BOUNDS, proposal.confidence[child])
                self._right[i] = self._right[i] * _DECAY + (proposal.tokens[child] == true)
                self._counted[i] = self._counted[i] * _DECAY + 1
            node = proposal.child(node, true)
