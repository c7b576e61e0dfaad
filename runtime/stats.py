"""Counts and seconds of decoding; every ratio is derived from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .datatypes import RoundTrace


@dataclass(slots=True)
class RunStats:
    """What happened in one request, or in several added up."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, found in the cache
    rounds: int = 0  # target passes after the prefill
    proposed: int = 0
    evaluated: int = 0  # proposed tokens up to the first rejection
    accepted: int = 0
    emitted: int = 0
    accepted_by_origin: Counter[str] = field(default_factory=Counter)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    forward_s: float = 0.0
    other_s: float = 0.0

    def add_round(self, trace: RoundTrace) -> None:
        """Count one round."""
        self.rounds += 1
        self.proposed += len(trace.proposal.tokens)
        self.evaluated += trace.num_evaluated
        # Accepted tokens behind the end of the request were never emitted.
        accepted = min(trace.verdict.num_accepted, len(trace.emitted))
        self.accepted += accepted
        self.accepted_by_origin[trace.proposal.origin] += accepted
        self.emitted += len(trace.emitted)
        self.draft_s += trace.timings.draft_s
        self.forward_s += trace.timings.forward_s
        self.other_s += trace.timings.other_s

    def __add__(self, other: RunStats) -> RunStats:
        return RunStats(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    @property
    def decode_s(self) -> float:
        """Seconds after the prefill."""
        return self.draft_s + self.forward_s + self.other_s

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, prefill apart."""
        return _ratio(self.emitted, self.decode_s)

    @property
    def tokens_per_pass(self) -> float:
        """Block efficiency: emitted tokens per target pass, correction or bonus counted."""
        return _ratio(self.emitted, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed."""
        return _ratio(self.accepted, self.proposed)

    @property
    def alpha(self) -> float:
        """Accepted / evaluated."""
        return _ratio(self.accepted, self.evaluated)

    @property
    def overhead_s_per_round(self) -> float:
        """Our own seconds outside the target, per round."""
        return _ratio(self.draft_s + self.other_s, self.rounds)

    def summary(self, plain_token_s: float | None = None) -> str:
        """Return one readable line; with the measured seconds of a plain pass it also compares."""
        line = (
            f"{self.emitted} tokens, {self.tokens_per_second:.1f} tokens/s, accepted "
            f"{self.accepted}/{self.proposed}, "
            f"{self.tokens_per_pass:.2f} tokens per pass"
        )
        if plain_token_s is None or not self.emitted:
            return line
        return f"{line}, about {self.tokens_per_second * plain_token_s:.2f}x plain"

    def as_json(self) -> dict[str, Any]:
        """Return counts, seconds and ratios as a JSON object."""
        counts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        ratios = (
            "decode_s",
            "tokens_per_second",
            "tokens_per_pass",
            "acceptance_rate",
            "alpha",
            "overhead_s_per_round",
        )
        return {
            **counts,
            "accepted_by_origin": dict(self.accepted_by_origin),
            **{name: getattr(self, name) for name in ratios},
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
