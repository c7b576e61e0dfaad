"""Several proposers behind one seam: each round goes to the one that promises most per second.

Looking things up costs microseconds, so those proposers are always asked. A model's draft costs a
few steps, so it is asked only while its drafts have lately brought more than what lies there for
free; now and then it is tried again, since texts change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

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
        self._first_promise = self._promise = float("inf")  # tokens per second; inf: not tried yet

    def begin(self, sampling: SamplingConfig) -> None:
        """Tell every proposer how tokens are chosen."""
        for proposer in self._all():
            proposer.begin(sampling)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Return the proposal with the best expected tokens per second."""
        worth = self._policy.tokens_per_second
        best = max(
            (proposer.propose(committed, budget) for proposer in self._free),
            key=worth,
            default=NOTHING,
        )
        if self._drafter is None:
            return best
        if worth(best) >= self._promise:
            self._promise += _RECOVERY * (self._first_promise - self._promise)
            return best
        drafted = self._drafter.propose(committed, budget)
        promise = worth(drafted)
        if self._promise == float("inf"):
            self._first_promise = self._promise = promise
        self._promise += (1 - _MEMORY) * (promise - self._promise)
        if drafted.rule is not None:
            return drafted  # once looked at, leaving it out would bend the distribution
        # The time is spent, whichever is submitted.
        best = replace(best, draft_s=drafted.draft_s)
        return max(best, drafted, key=worth)

    def forget(self) -> None:
        """Drop every text seen so far."""
        for proposer in self._all():
            proposer.forget()

    def save(self) -> None:
        """Write what any of the proposers wants to outlive this process."""
        for proposer in self._all():
            proposer.save()

    def _all(self) -> Iterator[Proposer]:
        yield from self._free
        if self._drafter is not None:
            yield self._drafter
