"""How much of a proposal is worth verifying.

A pass over more rows costs more, and a token deep in a draft is less likely to be reached. The
policy submits the number of nodes with the best expected tokens per second, nothing included:
submitting nothing is plain decoding, so a proposer whose confidence is honest can never make the
whole slower than that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from .datatypes import ROOT, Proposal, RoundTrace

_OVERHEAD_MEMORY = 0.95  # of the running mean
_TYPICAL_OVERHEAD_S = 2e-4


class PassCosts:
    """Seconds of one target pass, as a function of its rows."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """Take measured row counts, at least one; between them costs are interpolated, beyond them
        they grow linearly.
        """
        if not measured:
            raise ValueError("measured must hold at least one row count")
        self._rows = sorted(measured)
        # Noise must not make a wider pass look cheaper than a narrower one.
        self._seconds: list[float] = []
        for rows in self._rows:
            self._seconds.append(max([measured[rows], *self._seconds[-1:]]))

    def seconds(self, rows: int) -> float:
        """Return the cost of a pass with `rows` rows."""
        known, costs = self._rows, self._seconds
        i = min(max(bisect_left(known, rows), 1), len(known) - 1)
        if len(known) == 1 or rows <= known[0]:
            return costs[0]
        slope = (costs[i] - costs[i - 1]) / (known[i] - known[i - 1])
        return costs[i - 1] + slope * (rows - known[i - 1])


class DraftPolicy:
    """Chooses how many nodes of a proposal to submit."""

    def __init__(
        self, costs: PassCosts | None = None, overhead_s: float = _TYPICAL_OVERHEAD_S
    ) -> None:
        """Without `costs` every proposal is submitted whole; `overhead_s` is a first guess."""
        self._costs = costs
        self._overhead_s = overhead_s

    def nodes_to_submit(self, proposal: Proposal) -> int:
        """Return the number of leading nodes with the best expected tokens per second; all of them
        where a rule of its own verifies the proposal, since the choice must not look ahead then.
        """
        if self._costs is None or proposal.rule is not None:
            return len(proposal.tokens)
        return self._best(proposal)[0]

    def tokens_per_second(self, proposal: Proposal) -> float:
        """Return what the best number of leading nodes is expected to bring.

        Without costs a pass counts as one second, whatever its rows.
        """
        if self._costs is None:
            return 1 + sum(_reached(proposal))
        return self._best(proposal)[1]

    def _best(self, proposal: Proposal) -> tuple[int, float]:
        assert self._costs is not None
        fixed_s = self._overhead_s + proposal.draft_s
        expected = 1.0  # the target's own token comes for free
        best, best_rate = 0, expected / (self._costs.seconds(1) + fixed_s)
        for i, reached in enumerate(_reached(proposal)):
            expected += reached
            rate = expected / (self._costs.seconds(i + 2) + fixed_s)
            if rate > best_rate:
                best, best_rate = i + 1, rate
        return best, best_rate

    def observe(self, trace: RoundTrace) -> None:
        """Learn the time a round takes outside target and drafter."""
        spent = trace.timings.draft_s - trace.proposal.draft_s + trace.timings.other_s
        self._overhead_s += (1 - _OVERHEAD_MEMORY) * (spent - self._overhead_s)


def _reached(proposal: Proposal) -> list[float]:
    """Return for each node the probability that it is accepted."""
    reached: list[float] = []
    for parent, confidence in zip(proposal.parents, proposal.confidence, strict=True):
        reached.append(confidence * (1.0 if parent == ROOT else reached[parent]))
    return reached
