"""What a request may choose: frozen, validated when made, every message names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Verification: TypeAlias = Literal["coupled", "lattice"]


def _require(ok: bool, name: str, rule: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {rule}, got {got}")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the next token is chosen from a logits row; the default is greedy."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the most probable token
    repetition_penalty: float = 1.0  # prompt and output, as in CTRL (arXiv 1909.05858, section 4.1)
    presence_penalty: float = 0.0  # output only, once a token appeared
    frequency_penalty: float = 0.0  # output only, per appearance
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    seed: int = 0
    # How a sampled answer is verified. "coupled": the same seed gives the text that plain decoding
    # gives. "lattice": another text of the same distribution, faster at high temperature, since the
    # drafter's probabilities count; no difference without a drafter model, or when greedy.
    verification: Verification = "coupled"

    def __post_init__(self) -> None:
        finite = math.isfinite
        _require(
            finite(self.temperature) and self.temperature >= 0,
            "temperature",
            ">= 0",
            self.temperature,
        )
        _require(self.top_k >= 0, "top_k", ">= 0 (0 is off)", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(0 <= self.min_p < 1, "min_p", "in [0, 1)", self.min_p)
        _require(
            finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "> 0 (1 is off)",
            self.repetition_penalty,
        )
        _require(finite(self.presence_penalty), "presence_penalty", "finite", self.presence_penalty)
        _require(
            finite(self.frequency_penalty), "frequency_penalty", "finite", self.frequency_penalty
        )
        _require(
            not any(math.isnan(b) or b == math.inf for b in self.logit_bias.values()),
            "logit_bias",
            "finite or -inf",
            dict(self.logit_bias),
        )
        _require(0 <= self.seed < 2**64, "seed", "in [0, 2**64)", self.seed)
        _require(
            self.verification in get_args(Verification),
            "verification",
            " or ".join(map(repr, get_args(Verification))),
            repr(self.verification),
        )

    @property
    def uses_draft_laws(self) -> bool:
        """Whether drafts are to be sampled, and verified with the probabilities they had."""
        return self.verification == "lattice" and self.temperature > 0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """One request."""

    max_tokens: int = 128
    max_draft_tokens: int = 15  # 0 is plain decoding; 15 and the pending token make 16 rows
    stop: tuple[str, ...] = ()  # text that ends the answer; it is not part of the answer
    ignore_eos: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", ">= 1", self.max_tokens)
        _require(self.max_draft_tokens >= 0, "max_draft_tokens", ">= 0", self.max_draft_tokens)
        _require(all(self.stop), "stop", "non-empty strings", list(self.stop))
