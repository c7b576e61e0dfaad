"""Several proposers behind one seam: each round goes to the one that promises most.

Looking things up costs microseconds, so those proposers are always asked. A model's draft costs a
few steps. Whether they pay depends on what lies there for free, so what asking the model brought,
in tokens that were accepted, is remembered by how much that was; where it brought less than its
time is worth, the model is left alone but for a try now and then, as at first. Before it drafts for
a request it has to read the prompt: that has to pay within as many rounds as requests usually have,
and a try that begins with it is longer in coming.

Whoever promises most is wrong more often than its promises are on average: being chosen favours
those who promise too much. So what is counted here is how often a stated probability held among the
proposals that were chosen (`calibration.py`), and promises are compared after that correction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .calibration import Calibration
from .config import SamplingConfig
from .datatypes import NOTHING, Proposal
from .interfaces import Proposer
from .policy import DraftPolicy, reached

# Bounds of the tokens expected for free that share a record of what the model adds to them.
_EXPECTED = (1.2, 1.5, 2.0, 3.0, 5.0)
_MEMORY = 0.95  # of that record, per round in which the model was asked
# Rounds in which the model is left alone before it is tried (again): the fewest, at first and after
# it paid, and the most, since each try in vain doubles them.
_PATIENCE = (8, 1280)
_USUAL_ROUNDS = 64.0  # of a request, before there were any
_NEW_REQUEST = 0.2  # weight of the last one in the usual number


@dataclass(frozen=True, slots=True)
class _Trial:
    """A round in which the model was asked: what was submitted, and what would have been."""

    kind: int
    position: int
    submitted: Proposal
    instead: Proposal
    price: float  # tokens that the difference in time is worth


class CompositeProposer(Proposer):
    """Chooses among proposers that cost nothing and, at most, one that runs a model."""

    def __init__(
        self, free: Sequence[Proposer], drafter: Proposer | None, policy: DraftPolicy
    ) -> None:
        """`policy` is the decoder's: it knows what a pass costs."""
        self._free = tuple(free)
        self.drafter = drafter
        self._policy = policy
        self._calibrations: defaultdict[str, Calibration] = defaultdict(Calibration)  # by origin
        self._gains = [0.0] * (len(_EXPECTED) + 1)
        self._trial: _Trial | None = None  # not yet compared with what was committed
        self._left_alone = [0] * len(self._gains)
        self._patience = [_PATIENCE[0]] * len(self._gains)
        self._rounds = 0  # of the present request
        self._usual_rounds = _USUAL_ROUNDS

    def begin(self, sampling: SamplingConfig) -> None:
        """Tell every proposer how tokens are chosen."""
        self._trial = None  # what came of the last one of the former request stays unknown
        for calibration in self._calibrations.values():
            calibration.forget()
        if self._rounds:
            self._usual_rounds += _NEW_REQUEST * (self._rounds - self._usual_rounds)
        self._rounds = 0
        for proposer in self._all():
            proposer.begin(sampling)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Return the proposal that promises most for its time."""
        for calibration in self._calibrations.values():
            calibration.score(committed)
        self._learn_gain(committed)
        self._rounds += 1
        offers = [proposer.propose(committed, budget) for proposer in self._free] or [NOTHING]
        best = max(offers, key=self._value)
        if self.drafter is None:
            return self._chosen(best, committed)
        kind = bisect_right(_EXPECTED, 1 + sum(reached(self._corrected(best))))
        if not self._is_worth_asking(self.drafter, kind, committed):
            self._left_alone[kind] += 1
            return self._chosen(best, committed)
        drafted = self.drafter.propose(committed, budget)
        # Spent, whichever is submitted.
        best = replace(best, draft_s=drafted.draft_s, reading_s=drafted.reading_s)
        # Once a draft was drawn and looked at, leaving it out would bend the distribution.
        chosen = max(best, drafted, key=self._value) if drafted.rule is None else drafted
        self._left_alone[kind] = 0
        chosen = self._chosen(chosen, committed)
        ours, theirs = (self._submitted(x) for x in (chosen, self._corrected(best)))
        price = self._policy.price(drafted.draft_s)
        price += self._policy.row_price * (len(ours.tokens) - len(theirs.tokens))
        self._trial = _Trial(kind, len(committed), ours, theirs, price)
        return chosen

    def forget(self) -> None:
        """Drop every text seen so far."""
        for proposer in self._all():
            proposer.forget()
        for calibration in self._calibrations.values():
            calibration.forget()
        self._trial = None

    def save(self) -> None:
        """Write what any of the proposers wants to outlive this process."""
        for proposer in self._all():
            proposer.save()

    def _all(self) -> Iterator[Proposer]:
        yield from self._free
        if self.drafter is not None:
            yield self.drafter

    def _is_worth_asking(self, drafter: Proposer, kind: int, committed: Sequence[int]) -> bool:
        """Whether to ask the model, which may have to read first."""
        if self._policy.price(1.0) == 0:
            return True
        if self._gains[kind] <= 0 and self._left_alone[kind] < self._patience[kind]:
            return False
        reading = self._policy.price(drafter.reading_s(committed))
        if self._gains[kind] > 0:
            # What seemed too long once is tried again in the end: that, too, was only measured.
            pays = self._gains[kind] > reading / self._usual_rounds
            return pays or self._left_alone[kind] >= _PATIENCE[1]
        return self._left_alone[kind] >= self._patience[kind] * (1 + reading)

    def _learn_gain(self, committed: Sequence[int]) -> None:
        """Compare the last trial with the tokens that came."""
        if self._trial is None:
            return
        trial, self._trial = self._trial, None
        truth = committed[trial.position :]
        brought = len(trial.submitted.path(truth)) - len(trial.instead.path(truth))
        kind, gain = trial.kind, brought - trial.price
        self._gains[kind] += (1 - _MEMORY) * (gain - self._gains[kind])
        paid = self._gains[kind] > 0
        self._patience[kind] = _PATIENCE[0] if paid else min(2 * self._patience[kind], _PATIENCE[1])

    def _submitted(self, proposal: Proposal) -> Proposal:
        return proposal.head(self._policy.nodes_to_submit(proposal))

    def _value(self, proposal: Proposal) -> float:
        return self._policy.value(self._corrected(proposal))

    def _corrected(self, proposal: Proposal) -> Proposal:
        calibrated = self._calibrations[proposal.origin].calibrated
        return replace(proposal, confidence=tuple(map(calibrated, proposal.confidence)))

    def _chosen(self, proposal: Proposal, committed: Sequence[int]) -> Proposal:
        if proposal.rule is None:
            calibration = self._calibrations[proposal.origin]
            calibration.expect(len(committed), proposal)
        return self._corrected(proposal)
