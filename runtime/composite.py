"""Several proposers behind one seam: each round goes to the one that promises most per second.

Looking things up costs microseconds, so those proposers are always asked. A model's draft costs a
few steps, so it is asked only while its drafts have lately promised more than what lies there for
free; now and then it is tried again, since texts change.

Whoever promises most is wrong more often than its promises are on average: being chosen favours
those who promise too much. So what is counted here is how often a stated probability held among the
proposals that were chosen (`calibration.py`), and promises are compared after that correction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .calibration import Calibration
from .config import SamplingConfig
from .datatypes import NOTHING, Proposal
from .interfaces import Proposer
from .policy import DraftPolicy

_MEMORY = 0.9  # of the running mean of what the model's drafts promised
_RECOVERY = 0.02  # a round without the model brings its expectation this much nearer to the first


class CompositeProposer(Proposer):
    """Chooses among proposers that cost nothing and, at most, one that runs a model."""

    def __init__(
        self, free: Sequence[Proposer], drafter: Proposer | None, policy: DraftPolicy
    ) -> None:
        """`policy` is the decoder's: it knows what a pass costs."""
        self._free = tuple(free)
        self._drafter = drafter
        self._policy = policy
        self._calibrations: defaultdict[str, Calibration] = defaultdict(Calibration)  # by origin
        self._first_promise = self._promise = float("inf")  # tokens per second; inf: not tried yet

    def begin(self, sampling: SamplingConfig) -> None:
        """Tell every proposer how tokens are chosen."""
        for proposer in self._all():
            proposer.begin(sampling)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Return the proposal with the best expected tokens per second."""
        for calibration in self._calibrations.values():
            calibration.score(committed)
        offers = [proposer.propose(committed, budget) for proposer in self._free] or [NOTHING]
        best = max(offers, key=self._worth)
        if self._drafter is None:
            return self._chosen(best, committed)
        if self._worth(best) >= self._promise:
            self._promise += _RECOVERY * (self._first_promise - self._promise)
            return self._chosen(best, committed)
        drafted = self._drafter.propose(committed, budget)
        promise = self._worth(drafted)
        if self._promise == float("inf"):
            self._first_promise = self._promise = promise
        self._promise += (1 - _MEMORY) * (promise - self._promise)
        if drafted.rule is not None:
            return drafted  # once looked at, leaving it out would bend the distribution
        # The time is spent, whichever is submitted.
        best = replace(best, draft_s=drafted.draft_s)
        return self._chosen(max(best, drafted, key=self._worth), committed)

    def forget(self) -> None:
        """Drop every text seen so far."""
        for proposer in self._all():
            proposer.forget()
        for calibration in self._calibrations.values():
            calibration.forget()

    def save(self) -> None:
        """Write what any of the proposers wants to outlive this process."""
        for proposer in self._all():
            proposer.save()

    def _all(self) -> Iterator[Proposer]:
        yield from self._free
        if self._drafter is not None:
            yield self._drafter

    def _worth(self, proposal: Proposal) -> float:
        return self._policy.tokens_per_second(self._corrected(proposal))

    def _corrected(self, proposal: Proposal) -> Proposal:
        calibrated = self._calibrations[proposal.origin].calibrated
        return replace(proposal, confidence=tuple(map(calibrated, proposal.confidence)))

    def _chosen(self, proposal: Proposal, committed: Sequence[int]) -> Proposal:
        if proposal.is_chain:
            calibration = self._calibrations[proposal.origin]
            calibration.expect(len(committed), proposal.tokens, proposal.confidence)
        return self._corrected(proposal)
