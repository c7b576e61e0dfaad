"""Records passed between the stages of one round.

    draft  ->  translate  ->  verify  ->  commit
    Draft      Proposal       Verdict     RoundTrace

A draft is in the drafter's vocabulary, everything after it in the target's. A proposal is a tree
of tokens in topological order: every node comes after its parent. The usual proposal is a chain.
`ROOT` stands for the pending token, the last committed one, which leads the verify pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]
FinishReason: TypeAlias = Literal["stop", "length", "context", "cancelled"]

ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter wrote in one round, in its own vocabulary."""

    tokens: tuple[int, ...]  # k
    # k: how likely each token is, given those before it: accepted, as an acceptance head has it, or
    # said by the drafter, where there is none and where tokens are drawn
    probs: tuple[float, ...]
    # (k, draft vocab): what each token was drawn from; None for the likeliest tokens
    laws: npt.NDArray[np.float64] | None = field(default=None, compare=False)
    # k where wanted: the next likely token in the place of each, and how likely it is
    rivals: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AlignedSpan:
    """The draft tokens behind one proposed token."""

    start: int
    length: int  # 0: a further target token inside the draft token at `start`


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that the target is asked to verify in one pass."""

    tokens: tuple[int, ...]  # m nodes
    parents: tuple[int, ...]  # m indices of earlier nodes, or ROOT
    confidence: tuple[float, ...]  # m: probability that the node is right, given that its parent is
    origin: str  # which proposer it came from
    draft: Draft | None = None  # what it was translated from
    spans: tuple[AlignedSpan, ...] = ()  # m where there is a draft
    draft_s: float = 0.0  # seconds a model took to draft this round, used or not
    reading_s: float = 0.0  # and before that, to read a text that was new to it
    # How it has to be verified, and then whole: (proposal, logits, sampler, position) -> verdict.
    # None: by what the target chooses, which is exact for any part of any proposal.
    rule: Callable[[Proposal, FloatArray, Any, int], Verdict] | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], confidence: Sequence[float], origin: str) -> Proposal:
        """Make a proposal in which each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(confidence), origin)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before: verification is then bit-identical."""
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that proposes `token`, if there is one."""
        return next((i for i in self.children(node) if self.tokens[i] == token), None)

    def children(self, node: int) -> Iterator[int]:
        """Yield the nodes that follow `node`."""
        return (i for i in range(node + 1, len(self.tokens)) if self.parents[i] == node)

    def path(self, truth: Iterable[int]) -> tuple[int, ...]:
        """Return the nodes that say what a text says, as far as there are some."""
        path: list[int] = []
        node: int | None = ROOT
        for token in truth:
            assert node is not None
            if (node := self.child(node, token)) is None:
                break
            path.append(node)
        return tuple(path)

    def first_path(self) -> Proposal:
        """Return the chain of first children, for a model that cannot verify siblings."""
        path: list[int] = []
        node = ROOT
        for i, parent in enumerate(self.parents):
            if parent == node:
                path.append(i)
                node = i
        return Proposal.chain(
            [self.tokens[i] for i in path], [self.confidence[i] for i in path], self.origin
        )

    def head(self, count: int) -> Proposal:
        """Return the first `count` nodes; topological order keeps them a tree."""
        if count >= len(self.tokens):
            return self
        return replace(
            self,
            tokens=self.tokens[:count],
            parents=self.parents[:count],
            confidence=self.confidence[:count],
            spans=self.spans[:count],
        )


NOTHING = Proposal((), (), (), "none")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decided about one proposal."""

    path: tuple[int, ...]  # accepted nodes from the root down
    next_token: int  # correction after a rejection, bonus after a path that ended at a leaf

    @property
    def num_accepted(self) -> int:
        """Number of proposed tokens that were accepted."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the seconds of one round went."""

    draft_s: float  # proposing and choosing how much to submit
    forward_s: float  # inside the target's pass
    other_s: float  # verification, bookkeeping, text


@dataclass(frozen=True, slots=True, eq=False)  # holds an array
class RoundTrace:
    """One finished round, as statistics and the learner read it."""

    proposal: Proposal
    verdict: Verdict
    emitted: tuple[int, ...]  # accepted path and next token, cut where generation ended
    # (len(emitted), vocab), the row each emitted token came from; valid until the next round
    logits: FloatArray
    timings: Timings
    finish_reason: FinishReason | None  # set on the last round only

    @property
    def num_evaluated(self) -> int:
        """Number of proposed tokens that were compared: those accepted and the first one that was
        not.
        """
        reached_leaf = not any(
            parent == (self.verdict.path[-1] if self.verdict.path else ROOT)
            for parent in self.proposal.parents
        )
        return self.verdict.num_accepted + (0 if reached_leaf else 1)
