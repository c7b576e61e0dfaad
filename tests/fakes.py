"""Exact stand-ins for the seams of the decode loop and for a tokenizer; `run` decodes with them.

`TableModel` is a model whose every logits row can be computed by hand, and which refuses any use
that the protocol forbids. The proposers know, or pretend to know, what the target will say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgedraft.runtime import DecodeConfig, SpeculativeDecoder
from edgedraft.runtime.datatypes import NOTHING, ROOT, FinishReason, FloatArray, Proposal
from edgedraft.runtime.interfaces import LanguageModel, Proposer
from edgedraft.runtime.suffix_lookup import SuffixLookup

_NUM_MOODS = 97
PROMPT = (3, 5, 8, 3, 5)


def random_table(vocab_size: int, seed: int, scale: float = 2.0) -> FloatArray:
    """Return bigram logits, shape (vocab_size, vocab_size)."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((vocab_size, vocab_size)) * scale).astype(np.float32)


class TableModel:
    """A bigram model behind the `LanguageModel` protocol.

    With `memory` each row also depends on every token before it, so that a wrong cache shows in the
    output. Rows behind the cache that a mask hides, and rows that were rolled back, count for
    nothing.
    """

    def __init__(
        self,
        table: FloatArray,
        *,
        memory: float = 1.0,
        context_length: int = 1024,
        max_rows: int = 16,
        supports_trees: bool = True,
    ) -> None:
        self._table = table
        width = max(_NUM_MOODS, table.shape[1])
        self._moods = random_table(width, 1_000_003, memory)[:_NUM_MOODS, : table.shape[1]]
        self._memory = memory
        self._limits = (table.shape[1], context_length, max_rows, supports_trees)
        self.acceptance: FloatArray | None = None
        self.cache: list[int] = []
        self._pass_start = 0
        self.passes: list[int] = []  # rows of each forward
        self.extended: list[int] = []  # tokens of each extend

    @property
    def vocab_size(self) -> int:
        return self._limits[0]

    @property
    def context_length(self) -> int:
        return self._limits[1]

    @property
    def max_rows(self) -> int:
        return self._limits[2]

    @property
    def supports_trees(self) -> bool:
        return self._limits[3]

    @property
    def length(self) -> int:
        return len(self.cache)

    def row(self, prefix: Sequence[int]) -> FloatArray:
        """Return the logits that follow a prefix: what every pass has to agree with."""
        row = self._table[prefix[-1]]
        if not self._memory:
            return row
        mood = 7
        for token in prefix:
            mood = (mood * 31 + token + 1) % _NUM_MOODS
        return row + self._moods[mood]

    def extend(self, tokens: Sequence[int]) -> None:
        self._append(tokens)
        self.extended.append(len(tokens))

    def forward(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        chain = list(range(-1, len(tokens) - 1))
        parents = chain if parents is None else list(parents)
        assert 1 <= len(tokens) <= self.max_rows, f"{len(tokens)} rows in one pass"
        assert len(parents) == len(tokens)
        assert all(-1 <= p < i for i, p in enumerate(parents)), f"no tree: {parents}"
        assert self.supports_trees or parents == chain, "this model verifies chains only"
        before = list(self.cache)
        self._append(tokens)
        self.passes.append(len(tokens))
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else before), token])
        return np.stack([self.row(path) for path in paths])

    def rollback(self, length: int) -> None:
        assert 0 <= length <= len(self.cache), f"rollback to {length} of {len(self.cache)}"
        del self.cache[length:]

    def keep(self, start: int, rows: Sequence[int]) -> None:
        assert start == self._pass_start, f"the last pass began at {self._pass_start}, not {start}"
        assert list(rows) == sorted(set(rows)), f"rows must ascend: {rows}"
        assert not rows or start + rows[-1] < len(self.cache), f"no such row: {rows}"
        self.cache[start:] = [self.cache[start + r] for r in rows]

    def _append(self, tokens: Sequence[int]) -> None:
        assert all(0 <= t < self._table.shape[0] for t in tokens), f"no such token: {tokens}"
        assert len(self.cache) + len(tokens) <= self.context_length, "the context is full"
        self._pass_start = len(self.cache)
        self.cache.extend(tokens)


@dataclass
class OracleProposer(Proposer):
    """Proposes what will really come, `mistakes` of it replaced by another token."""

    truth: Sequence[int]  # prompt and continuation
    vocab_size: int
    mistakes: float = 0.0
    seed: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)  # committed tokens, budget

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        self.asked.append((len(committed), budget))
        tokens = self.upcoming(len(committed), budget)
        return Proposal.chain(tokens, [1 - self.mistakes] * len(tokens), "oracle")

    def upcoming(self, position: int, count: int) -> list[int]:
        """Return the next tokens, some of them spoilt."""
        tokens = list(self.truth[position : position + count])
        tokens += [0] * (count - len(tokens))  # past the end of what is known
        spoilt = self._rng.random(count) < self.mistakes
        return [(t + 1) % self.vocab_size if s else t for t, s in zip(tokens, spoilt, strict=True)]


@dataclass
class RandomTreeProposer(Proposer):
    """Grows random trees in which the truth is hidden somewhere; siblings may be alike."""

    truth: Sequence[int]
    vocab_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for i in range(int(self._rng.integers(0, budget + 1))):
            parent = int(self._rng.integers(ROOT, i))
            if self._rng.random() < 0.5:
                parent = i - 1
            depth = 0 if parent == ROOT else depths[parent] + 1
            at = len(committed) + depth
            right = self._rng.random() < 0.6 and at < len(self.truth)
            tokens.append(self.truth[at] if right else int(self._rng.integers(self.vocab_size)))
            parents.append(parent)
            depths.append(depth)
        confidence = tuple(self._rng.random(len(tokens)).tolist())
        return Proposal(tuple(tokens), tuple(parents), confidence, "tree")


@dataclass
class AdversarialProposer(Proposer):
    """Does what a proposer may do but should not: too many tokens, repeats, nonsense confidence."""

    vocab_size: int
    tokens: Sequence[int] = ()  # to be proposed often: EOS, the last id of the vocabulary
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        kind = self._rng.integers(5)
        if kind == 0:
            return NOTHING
        count = budget + 5 if kind == 1 else int(self._rng.integers(1, budget + 1))
        pool = [*self.tokens, 0, self.vocab_size - 1, committed[-1]]
        tokens = [pool[i] for i in self._rng.integers(len(pool), size=count)]
        if kind == 2:
            tokens = [committed[-1]] * count
        confidence = [1.0, 0.0, 1e-30][kind % 3]
        return Proposal.chain(tokens, [confidence] * count, "adversary")


@dataclass(frozen=True)
class KnownText:
    """What a proposer under test is told: the sequence to come, and what may be proposed."""

    truth: Sequence[int]
    vocab_size: int
    eos: Sequence[int] = ()
    seed: int = 0


# Every proposer joins the conformance suite by an entry here.
CHAIN_PROPOSERS: dict[str, Callable[[KnownText], Proposer]] = {
    "oracle": lambda k: OracleProposer(k.truth, k.vocab_size),
    "good": lambda k: OracleProposer(k.truth, k.vocab_size, mistakes=0.2, seed=k.seed),
    "bad": lambda k: OracleProposer(k.truth, k.vocab_size, mistakes=1.0),
    "adversarial": lambda k: AdversarialProposer(k.vocab_size, k.eos, k.seed),
    "lookup": lambda k: SuffixLookup(),
}
TREE_PROPOSERS: dict[str, Callable[[KnownText], Proposer]] = {
    "lookup tree": lambda k: SuffixLookup(tree=True),
    "random tree": lambda k: RandomTreeProposer(k.truth, k.vocab_size, k.seed),
}


class ByteTokenizer:
    """Token ids are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256 or not skip_special_tokens).decode(errors="replace")


@dataclass(frozen=True)
class Output:
    """What a request gave."""

    tokens: tuple[int, ...]
    rows: FloatArray  # (tokens, vocab)
    finish: FinishReason | None
    rounds: int
    accepted: int


def run(
    target: LanguageModel,
    config: DecodeConfig,
    proposer: Proposer | None = None,
    prompt: Sequence[int] = PROMPT,
    eos: Sequence[int] = (),
    is_last: Callable[[int], bool] = lambda token: False,
    decoder: SpeculativeDecoder | None = None,
) -> Output:
    """Decode one request, copying what is valid until the next round only."""
    decoder = decoder or SpeculativeDecoder(target, proposer, eos_token_ids=eos)
    tokens: list[int] = []
    rows: list[FloatArray] = []
    accepted = rounds = 0
    finish = None
    for trace in decoder.rounds(prompt, config, is_last):
        assert finish is None, "a round after the last one"
        assert len(trace.emitted) == len(trace.logits)
        tokens += trace.emitted
        rows.append(trace.logits.copy())
        accepted += min(trace.verdict.num_accepted, len(trace.emitted))
        rounds += 1
        finish = trace.finish_reason
        if len(tokens) > 5000:
            raise AssertionError("the request does not end")
    stacked = np.concatenate(rows) if rows else np.zeros((0, target.vocab_size), np.float32)
    return Output(tuple(tokens), stacked, finish, rounds, accepted)
