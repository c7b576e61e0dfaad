"""How much of a proposal is worth verifying.

A pass over more rows costs more, and a token deep in a draft is less likely to be reached. Time has
a price: what it brings in tokens when it is spent as it usually is here. The policy submits the
number of nodes with the best expected tokens after that price, nothing included: submitting nothing
is plain decoding, so a proposer whose confidence is honest can never make the whole slower than
that. (Maximising a ratio of sums by pricing the denominator: Dinkelbach 1967.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from .datatypes import ROOT, Proposal, RoundTrace

_MEMORY = 0.95  # of running means, per round
_FIRST_ROUNDS = 20.0
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
        # Running sums over recent rounds; they begin with rounds of plain decoding.
        self._tokens = _FIRST_ROUNDS
        self._seconds = _FIRST_ROUNDS * (costs.seconds(1) + overhead_s if costs else 1.0)

    @property
    def row_price(self) -> float:
        """What one more row of a usual pass costs, in tokens."""
        costs = self._costs
        return self.price((costs.seconds(8) - costs.seconds(2)) / 6) if costs else 0.0

    def price(self, seconds: float) -> float:
        """Return the tokens that these seconds usually bring; nothing where passes cost nothing."""
        return seconds * self._tokens / self._seconds if self._costs else 0.0

    def nodes_to_submit(self, proposal: Proposal) -> int:
        """Return the number of leading nodes with the most expected tokens after the price of their
        time; all of them where a rule of its own verifies the proposal, since the choice must not
        look ahead then.
        """
        if self._costs is None or proposal.rule is not None:
            return len(proposal.tokens)
        return self._best(proposal)[0]

    def value(self, proposal: Proposal) -> float:
        """Return the expected tokens of the best number of leading nodes, after the price of the
        round's time, drafting included.
        """
        return self._best(proposal)[1]

    def observe(self, trace: RoundTrace) -> None:
        """Learn what a round brings and takes."""
        timings = trace.timings
        spent = timings.draft_s - trace.proposal.draft_s + timings.other_s
        self._overhead_s += (1 - _MEMORY) * (spent - self._overhead_s)
        if self._costs is not None:
            # Priced by the plan, not by the clock: a busy minute is no reason to draft otherwise.
            rows = len(trace.proposal.tokens) + 1
            round_s = self._costs.seconds(rows) + self._overhead_s + trace.proposal.draft_s
            self._tokens = _MEMORY * self._tokens + 1 + trace.verdict.num_accepted
            self._seconds = _MEMORY * self._seconds + round_s

    def _best(self, proposal: Proposal) -> tuple[int, float]:
        fixed = 1 - self.price(self._overhead_s + proposal.draft_s)
        passes = [self._pass_price(rows) for rows in range(1, len(proposal.tokens) + 2)]
        best, most = 0, fixed - passes[0]
        expected = fixed  # the target's own token comes for free
        for i, probability in enumerate(reached(proposal)):
            expected += probability
            if expected - passes[i + 1] > most:
                best, most = i + 1, expected - passes[i + 1]
        return best, most

    def _pass_price(self, rows: int) -> float:
        return self.price(self._costs.seconds(rows)) if self._costs else 0.0


def reached(proposal: Proposal) -> Iterator[float]:
    """Yield for each node the probability that it is accepted."""
    known: list[float] = []
    for parent, confidence in zip(proposal.parents, proposal.confidence, strict=True):
        known.append(confidence * (1.0 if parent == ROOT else known[parent]))
        yield known[-1]
