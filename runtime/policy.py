"""How much of a proposal is worth verifying.

A pass over more rows costs more, and a token deep in a draft is less likely to be reached. Time has
a price: what it brings in tokens when it is spent as it usually is here. The policy submits the
number of nodes with the best expected tokens after that price, nothing included: submitting nothing
is plain decoding, so a proposer whose confidence is honest can never make the whole slower than
that. (Maximising a ratio of sums by pricing the denominator: Dinkelbach 1967.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from .datatypes import ROOT, Proposal, RoundTrace

_MEMORY = 0.95  # of running means, per round
_FIRST_ROUNDS = 20.0
_TYPICAL_OVERHEAD_S = 2e-4
# Bounds of how much slower passes are than planned. A plan that is much too slow is measured again
# (`plan.py`); what is slower than ten times is an interruption.
_PACES = 0.5, 10.0
# Usual probability of a draft token, given those before it: what the next step is expected to add.
_NEXT = 0.6


class PassCosts:
    """Seconds of one target pass, as a function of its rows and of the tokens in the cache.

    Attention reads the whole cache, for each row anew on most kernels: so every cached token adds
    its share, and a larger one to more rows.
    """

    def __init__(
        self, measured: Mapping[int, float], per_token: Mapping[int, float] | None = None
    ) -> None:
        """Take the seconds of passes over an empty cache by rows, at least one, and what each
        cached token adds to them; between known row counts costs are interpolated, beyond them they
        grow linearly.
        """
        if not measured:
            raise ValueError("measured must hold at least one row count")
        self._fixed = _rising(measured)
        self._per_token = _rising(per_token or {1: 0.0})
        self._known: dict[int, tuple[float, float]] = {}  # what was asked for before

    def seconds(self, rows: int, cached: int = 0) -> float:
        """Return the cost of a pass with `rows` rows behind `cached` tokens."""
        if rows not in self._known:
            self._known[rows] = _at(self._fixed, rows), _at(self._per_token, rows)
        fixed, per_token = self._known[rows]
        return fixed + cached * per_token


def _rising(measured: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the points in order; noise must not make a wider pass look cheaper."""
    rows = sorted(measured)
    return list(zip(rows, accumulate((measured[r] for r in rows), max), strict=True))


def _at(points: Sequence[tuple[int, float]], x: int) -> float:
    """Return the line through these points at x."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    i = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) / (x1 - x0) * (x - x0)


class DraftPolicy:
    """Chooses how long drafts are, and how many nodes of a proposal to submit."""

    most: int | None = None  # tokens in a draft, whatever they promise

    def __init__(
        self, costs: PassCosts | None = None, overhead_s: float = _TYPICAL_OVERHEAD_S
    ) -> None:
        """Without `costs` every proposal is submitted whole; `overhead_s` is a first guess."""
        self._costs = costs
        self._overhead_s = overhead_s  # like all seconds in here, as if passes took those planned
        self._pace = 1.0  # what they take of late over what they were planned to
        self._cached = 0
        # Running sums over recent rounds; they begin with rounds of plain decoding. Time counts in
        # plain rounds behind the same cache, since the next request may be longer or shorter.
        self._tokens = _FIRST_ROUNDS
        self._plain_rounds = _FIRST_ROUNDS

    def begin_round(self, cached: int) -> None:
        """Take note of the tokens in the cache, which the next pass has to attend to."""
        self._cached = cached

    @property
    def row_price(self) -> float:
        """What one more row of a usual pass costs, in tokens."""
        return self._worth((self._pass_s(8) - self._pass_s(2)) / 6)

    def price(self, seconds: float) -> float:
        """Return the tokens that these seconds by the clock usually bring; nothing where passes
        cost nothing.
        """
        return self._worth(seconds / self._pace)

    def wants_more(self, all_right: float, step_s: float) -> bool:
        """Whether one more token is worth a step of these seconds and a row of the target's pass,
        where the draft so far is all right with that probability.
        """
        return all_right * _NEXT > self.price(step_s) + self.row_price

    def nodes_to_submit(self, proposal: Proposal) -> int:
        """Return the number of leading nodes with the most expected tokens after the price of their
        time; all of them where a rule of its own verifies the proposal, since the choice must not
        look ahead then.
        """
        return len(proposal.tokens) if proposal.rule is not None else self._best(proposal)[0]

    def value(self, proposal: Proposal) -> float:
        """Return the expected tokens of the best number of leading nodes, after the price of the
        round's time, drafting included.
        """
        return self._best(proposal)[1]

    def observe(self, trace: RoundTrace) -> None:
        """Learn what a round brings and takes."""
        timings = trace.timings
        proposal = trace.proposal
        spent = timings.draft_s - proposal.draft_s - proposal.reading_s + timings.other_s
        self._overhead_s += (1 - _MEMORY) * (spent / self._pace - self._overhead_s)
        if self._costs is not None:
            pass_s = self._pass_s(len(proposal.tokens) + 1)
            # A busy minute, or a hot device, is no reason to draft otherwise: it slows all alike.
            # One pass that something interrupted says little of it.
            least, most = _PACES
            pace = min(timings.forward_s / pass_s, 2 * self._pace)
            pace = self._pace + (1 - _MEMORY) * (pace - self._pace)
            self._pace = min(max(pace, least), most)
            round_s = pass_s + self._overhead_s + proposal.draft_s / self._pace
            self._tokens = _MEMORY * self._tokens + 1 + trace.verdict.num_accepted
            self._plain_rounds = _MEMORY * self._plain_rounds + round_s / self._plain_s()

    def _best(self, proposal: Proposal) -> tuple[int, float]:
        if self._costs is None:
            return len(proposal.tokens), 1 + sum(reached(proposal))
        price = self._worth(1.0)
        fixed = 1 - price * (self._overhead_s + proposal.draft_s / self._pace)
        best, most = 0, fixed - price * self._pass_s(1)
        expected = fixed  # the target's own token comes for free
        for i, probability in enumerate(reached(proposal)):
            expected += probability
            if (value := expected - price * self._pass_s(i + 2)) > most:
                best, most = i + 1, value
        return best, most

    def _worth(self, planned_s: float) -> float:
        if self._costs is None:
            return 0.0
        return planned_s / self._plain_s() * self._tokens / self._plain_rounds

    def _pass_s(self, rows: int) -> float:
        return self._costs.seconds(rows, self._cached) if self._costs else 0.0

    def _plain_s(self) -> float:
        return self._pass_s(1) + self._overhead_s


class ConstantPolicy(DraftPolicy):
    """Drafts of one length, for comparison."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most


class GammaPolicy(DraftPolicy):
    """Drafts until it is likelier than gamma that something in them is wrong (OmniDraft, arXiv
    2507.02659, equation 7, as SpecDec++, arXiv 2405.19715), for comparison: it knows no costs.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self._gamma = gamma

    def wants_more(self, all_right: float, step_s: float) -> bool:
        """Whether the draft so far is likely enough to be right."""
        return 1 - all_right <= self._gamma

    def _best(self, proposal: Proposal) -> tuple[int, float]:
        count, expected = 0, 1.0
        for probability in reached(proposal):
            count, expected = count + 1, expected + probability
            if not self.wants_more(probability, 0.0):
                break
        return count, expected


def reached(proposal: Proposal) -> Iterator[float]:
    """Yield for each node the probability that it is accepted."""
    known: list[float] = []
    for parent, confidence in zip(proposal.parents, proposal.confidence, strict=True):
        known.append(confidence * (1.0 if parent == ROOT else known[parent]))
        yield known[-1]
