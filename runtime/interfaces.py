"""The two seams of the decode loop, and one beside it.

Everything that verifies is a `LanguageModel`, everything that guesses is a `Proposer`. A model that
drafts for itself implements both. What makes a drafter better in the time between requests is a
`Learner`. Tests plug fakes into any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .config import SamplingConfig
from .datatypes import FloatArray, Proposal, RoundTrace


class LanguageModel(Protocol):
    """A causal model of one sequence, with a KV cache that can be rolled back."""

    @property
    def vocab_size(self) -> int:
        """Number of columns of a logits row; ids from here on are padding and never sampled."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens the cache can hold."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows the next `forward` may carry; 1 before the first means that the model cannot
        verify proposals.
        """
        ...

    @property
    def supports_trees(self) -> bool:
        """Whether `forward` accepts `parents` other than a chain's."""
        ...

    @property
    def length(self) -> int:
        """Number of tokens held in the cache."""
        ...

    @property
    def acceptance(self) -> FloatArray | None:
        """How likely each row's likeliest token of the last `forward` is to be accepted, given that
        all before it are, shape (rows,); None where the model cannot tell. Only a guess: nothing
        but the length of drafts may follow from it.
        """
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the cache without computing logits (prefill)."""
        ...

    def forward(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Append tokens and return their next-token logits, shape (rows, vocab_size).

        `parents[i]` is the row that row i continues, or -1 for the end of the cache; None means a
        chain. The array is valid until the next call.
        """
        ...

    def rollback(self, length: int) -> None:
        """Forget every cached token from position `length` on."""
        ...

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep only these rows (ascending) of the last pass, which began at position `start`."""
        ...


class Proposer(Protocol):
    """Anything that can guess what the target will say next.

    A proposer is pulled, never pushed: it gets the whole committed sequence and brings its own
    state up to date, whatever happened since (rejections, an edited prompt, a new conversation).
    Whoever inherits from this class needs `propose` only.
    """

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Propose at most `budget` tokens to follow `committed`."""
        ...

    def reading_s(self, committed: Sequence[int]) -> float:
        """Return the seconds that `propose` would first take to read what is new of this text."""
        return 0.0

    def begin(self, sampling: SamplingConfig) -> None:
        """Hear how the tokens of the request to come are chosen."""
        return

    def forget(self) -> None:
        """Drop every text seen so far."""
        return

    def save(self) -> None:
        """Write what is to outlive this process, if anything; raise `StateError` when refused."""
        return


class Learner(Protocol):
    """Learns from requests that are over.

    A request is heard of on the thread that serves it, also while another one is in `work`. Whoever
    begins a request lets `interrupted` be true first and calls `interrupt` then.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """Hear that a request begins."""
        ...

    def observe(self, trace: RoundTrace) -> None:
        """Hear of a round; this has to cost next to nothing."""
        ...

    def end(self) -> Any:
        """Hear that the request is over, however it ended; return what was kept of it."""
        ...

    def add(self, request: Any) -> None:
        """Take what `end` returned as one more request."""
        ...

    def passes(self, request: Any) -> tuple[int, int, int]:
        """Return the target tokens of what `end` returned, and the passes they take with the
        drafter as it was shipped and as it is now, at four drafted tokens a round. Not while
        another thread is in `work`.
        """
        ...

    def work(self, seconds: float, interrupted: Callable[[], bool]) -> bool:
        """Learn for so long at most; return whether the drafter is another one now. Then there may
        be more to do.
        """
        ...

    def interrupt(self) -> None:
        """Make `work` return soon; called from another thread."""
        ...

    def save(self) -> None:
        """Write what is to be learned from; raise `StateError` when refused."""
        ...

    def close(self) -> None:
        """Write all that would be lost, when nothing more is to be learned; raise `StateError` when
        refused.
        """
        ...
