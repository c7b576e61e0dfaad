"""How a learner learns, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .adamw import AdamW
from .teacher import Objective

# What an acceptance head learns from (OmniDraft, arXiv 2507.02659, algorithms 3 and 4): joint, the
# lessons that the student is asked, which it learns from next; interleaved, a larger buffer. That,
# other than in the paper, is worth less: what the drafter has learned from, it drafts better than
# the rest.
Acceptance: TypeAlias = Literal["interleaved", "joint"]


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How to learn."""

    objective: Objective = field(default_factory=Objective)
    optimizer: AdamW = field(default_factory=AdamW)
    rank: int = 32
    alpha: float = 32.0
    modules: tuple[str, ...] | None = None  # None: all that the drafter's folder names
    update_every: int = 3  # lessons
    steps: int = 5  # of the optimiser, in one update
    # Steps on what was learned before, for every update, when there is nothing new to learn from.
    rehearsal_steps: int = 7
    positions: int = 128  # predicted pieces in one step
    acceptance: Acceptance | None = "joint"  # None: the head stays as it was shipped
    acceptance_steps: int = 3  # of an interleaved head, in one update; a joint one's are lessons
    threads: int = 1
    seed: int = 0


@dataclass(slots=True)
class LearnerStats:
    """What was done so far."""

    requests: int = 0
    steps: int = 0
    accepted: int = 0  # generations that came into use
    rolled_back: int = 0  # times that one went out of use
    discarded: int = 0  # updates and rehearsals with a number that is not finite
    begun_anew: int = 0  # students that were given up
    cpu_s: float = 0.0
