"""Exact laws of what sampling code emits, by trying every outcome of its dice.

The models are small and of order one: the next token depends on the last one alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias, TypeVar

import numpy as np

from edgedraft.runtime import SamplingConfig
from edgedraft.runtime.datatypes import NOTHING, Draft, FloatArray, Proposal, Verdict
from edgedraft.runtime.lattice import lattice, line, shared
from edgedraft.runtime.rejection import Dice, verify_lattice, verify_shared
from edgedraft.runtime.sampling import Sampler
from edgedraft.runtime.translate import Translator
from edgedraft.runtime.trie_marginal import DoubleArray, TrieMarginal
from edgedraft.runtime.verify import verify
from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.runtime.vocabulary import Vocabulary
from tokenizers_for_tests import byte_level_of, with_added

Outcome = TypeVar("Outcome", bound=Hashable)
Law: TypeAlias = dict[tuple[int, ...], float]


class _Branch(Dice):
    """Dice that fall as they are told, and then always the first way they can."""

    def __init__(self, told: Sequence[int]) -> None:
        self._told = told
        self.turns: list[tuple[int, int]] = []  # which way, of how many
        self.probability = 1.0

    def happens(self, probability: float) -> bool:
        p = min(float(probability), 1.0)
        return self._fall([1 - p, p]) == 1

    def draw(self, weights: DoubleArray) -> int:
        return self._fall(weights.tolist())

    def _fall(self, weights: list[float]) -> int:
        ways = [index for index, weight in enumerate(weights) if weight > 0]
        depth = len(self.turns)
        way = self._told[depth] if depth < len(self._told) else 0
        self.turns.append((way, len(ways)))
        self.probability *= weights[ways[way]] / sum(weights)
        return ways[way]


def law_of(function: Callable[[Dice], Outcome]) -> dict[Outcome, float]:
    """Return the probability of every outcome of a function of dice."""
    law: dict[Outcome, float] = defaultdict(float)
    told: list[int] = []
    while True:
        branch = _Branch(told)
        law[function(branch)] += branch.probability
        turns = branch.turns
        while turns and turns[-1][0] + 1 == turns[-1][1]:
            turns.pop()
        if not turns:
            return dict(law)
        told = [way for way, _ in turns]
        told[-1] += 1


def total_variation(one: Mapping[Outcome, float], other: Mapping[Outcome, float]) -> float:
    """Return the largest difference of the probabilities that two laws give to any event."""
    return sum(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in {*one, *other}) / 2


@dataclass(frozen=True, eq=False)
class Toy:
    """A drafter and a target of a few tokens."""

    vocab_map: VocabMap
    marginal: TrieMarginal
    draft: DoubleArray  # (draft, draft), laws by last piece
    target: FloatArray  # (target, target), logits by last token

    @property
    def vocab_size(self) -> int:
        return len(self.target)

    def rows(self, last: int, proposal: Proposal) -> FloatArray:
        """Return what one pass of the target over a proposal gives."""
        return self.target[[last, *proposal.tokens]]

    def sampler(self, sampling: SamplingConfig, history: Sequence[int]) -> _DicedSampler:
        """Return a sampler that has seen a prompt of one token, and the rest as output."""
        sampler = _DicedSampler(sampling, history[:1], self.vocab_size)
        for token in history[1:]:
            sampler.commit(token)
        return sampler


class _DicedSampler(Sampler):
    """Chooses by dice instead of by the noise of a position."""

    dice: Dice

    def choose(self, logits: FloatArray, position: int) -> int:
        return self.dice.draw(self.probabilities(logits))


@cache
def simple_pair() -> VocabMap:
    """Return the pair {a, b, c} and {a, b, c, ab, ac, abc}."""
    return VocabMap.build(
        Vocabulary(byte_level_of(["a", "b", "c"])),
        Vocabulary(byte_level_of(["a", "b", "c", "ab", "ac", "abc"])),
    )


@cache
def awkward_pair() -> VocabMap:
    """Return a pair with everything that can be in the way.

    "c" is no target token but begins and ends some; "a c" grows from "a ", which is none; " a" is
    there twice; two spaces are a draft token that begins no spelling; one token is special, and an
    end stands for another.
    """
    draft = byte_level_of(["a", "\u0120", "c", "\u0120\u0120"])
    target = byte_level_of(["a", "\u0120", "a\u0120c", "\u0120a", "ca", "caa"])
    target = with_added(target, " a")
    for tokenizer in (draft, target):
        tokenizer.add_special_tokens(["<end>", "<other>"])
    return VocabMap.build(
        Vocabulary(draft), Vocabulary(target), draft_end=4, draft_mark=5, target_stop_ids=[7]
    )


def toy(vocab_map: VocabMap, alpha: float, seed: int) -> Toy:
    """Return random models whose rows come from a symmetric Dirichlet distribution."""
    rng = np.random.default_rng(seed)
    num_pieces = vocab_map.direct_token.size
    num_tokens = vocab_map.spelling_start.size - 1
    draft = rng.dirichlet([alpha] * num_pieces, num_pieces)
    target = rng.dirichlet([alpha] * num_tokens, num_tokens)
    logits = np.log(np.maximum(target, 1e-30)).astype(np.float32)
    return Toy(vocab_map, TrieMarginal(vocab_map, num_tokens), draft, logits)


@dataclass(frozen=True, eq=False)
class Round:
    """What a rule of verification gets: a draft, and how many tokens may be proposed of it."""

    toy: Toy
    last: int
    draft: Draft
    laws: DoubleArray
    budget: int
    sampler: _DicedSampler
    dice: Dice


Rule: TypeAlias = Callable[[Round], tuple[Proposal, Verdict]]


def lattice_rule(r: Round) -> tuple[Proposal, Verdict]:
    proposal = lattice(r.draft, r.toy.vocab_map, r.budget)
    rows = r.toy.rows(r.last, proposal)
    return proposal, verify_lattice(proposal, r.laws, rows, r.sampler, r.toy.marginal, r.dice)


def line_rule(r: Round) -> tuple[Proposal, Verdict]:
    proposal = line(r.draft, r.toy.vocab_map, r.budget)
    rows = r.toy.rows(r.last, proposal)
    return proposal, verify_lattice(
        proposal, r.laws, rows, r.sampler, r.toy.marginal, r.dice, is_line=True
    )


def shared_rule(r: Round) -> tuple[Proposal, Verdict]:
    proposal = shared(r.draft, r.toy.vocab_map, r.budget)
    rows = r.toy.rows(r.last, proposal)
    return proposal, verify_shared(proposal, r.laws, rows, r.sampler, r.toy.vocab_map, r.dice)


def match_rule(r: Round) -> tuple[Proposal, Verdict]:
    """What `verify` does, with an independent draw in place of a position's noise."""
    proposal = Translator(r.toy.vocab_map).translate(r.draft, r.budget)
    r.sampler.dice = r.dice
    return proposal, verify(proposal, r.toy.rows(r.last, proposal), r.sampler, 0)


def paper_rule(r: Round) -> tuple[Proposal, Verdict]:
    """OmniDraft (arXiv 2507.02659), equations 1 and 2: approximate."""
    vocab_map = r.toy.vocab_map
    proposal = Translator(vocab_map).translate(r.draft, r.budget)
    rows = r.toy.rows(r.last, proposal)
    direct = [vocab_map.direct(piece) for piece in range(vocab_map.direct_token.size)]
    path: list[int] = []
    for node, (token, span) in enumerate(zip(proposal.tokens, proposal.spans, strict=True)):
        p, q = r.sampler.probabilities(rows[node]), proposal.confidence[node]
        if r.dice.happens(p[token] / q):
            r.sampler.commit(token)
            path.append(node)
            continue
        lifted = np.zeros(r.toy.vocab_size)
        for piece, mass in enumerate(r.laws[span.start]):
            if direct[piece] >= 0:
                lifted[direct[piece]] += mass
        if span.length > 1:
            lifted[token] = q
            if (first := direct[r.draft.tokens[span.start]]) >= 0:
                lifted[first] -= q
        rest = np.maximum(p - lifted, 0)
        return proposal, Verdict(tuple(path), r.dice.draw(rest if rest.any() else p))
    return proposal, Verdict(tuple(path), r.dice.draw(r.sampler.probabilities(rows[len(path)])))


def careless_rule(r: Round) -> tuple[Proposal, Verdict]:
    """The lattice's walk along the longest match: its rows tell of pieces not yet verified."""
    proposal = Translator(r.toy.vocab_map).translate(r.draft, r.budget)
    rows = r.toy.rows(r.last, proposal)
    return proposal, verify_lattice(proposal, r.laws, rows, r.sampler, r.toy.marginal, r.dice)


def dropping_rule(r: Round) -> tuple[Proposal, Verdict]:
    """The lattice's rule, except that a draft whose first piece does not please is forgotten."""
    if r.draft.tokens[0] == 0:
        return NOTHING, Verdict((), r.dice.draw(r.sampler.probabilities(r.toy.target[r.last])))
    return lattice_rule(r)


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of drafting and verifying, one after the other."""

    toy: Toy
    rule: Rule
    sampling: SamplingConfig = SamplingConfig(temperature=1.0)
    budget: int = 9
    is_enough: Callable[[Sequence[int]], bool] = lambda pieces: len(pieces) == 3
    mask: Sequence[int] = ()  # pieces that are never drafted
    _laws: dict[tuple[int, ...], Law] = field(default_factory=dict)

    def law(self, history: Sequence[int]) -> Law:
        """Return the probability of each run of tokens that one round emits."""
        key = tuple(history if self.sampling.has_penalties else history[-1:])
        if key not in self._laws:
            self._laws[key] = law_of(lambda dice: self.play(key, dice))
        return self._laws[key]

    def play(self, history: Sequence[int], dice: Dice) -> tuple[int, ...]:
        """Return the tokens that one round emits."""
        pieces = self.toy.vocab_map.spelling(history[-1]) or [0]
        start = len(pieces)
        laws = []
        while not self.is_enough(pieces[start:]):
            law = self.toy.draft[pieces[-1]].copy()
            law[list(self.mask)] = 0
            laws.append(law / law.sum())
            pieces.append(dice.draw(law))
        drafted = pieces[start:]
        probs = [float(law[piece]) for law, piece in zip(laws, drafted, strict=True)]
        proposal, verdict = self.rule(
            Round(
                self.toy,
                history[-1],
                Draft(tuple(drafted), tuple(probs)),
                np.array(laws),
                self.budget,
                self.toy.sampler(self.sampling, history),
                dice,
            )
        )
        return (*(proposal.tokens[node] for node in verdict.path), verdict.next_token)

    def texts(self, history: Sequence[int], length: int) -> Law:
        """Return the probability of each text of some tokens that the rounds emit."""
        law: Law = defaultdict(float)
        for emitted, probability in self.law(history).items():
            missing = length - len(emitted)
            endings = self.texts((*history, *emitted), missing) if missing > 0 else {(): 1.0}
            for ending, share in endings.items():
                law[(*emitted, *ending)[:length]] += probability * share
        return dict(law)


def plain_texts(rounds: Rounds, history: Sequence[int], length: int) -> Law:
    """Return the probability of each text that the target alone emits."""
    if length == 0:
        return {(): 1.0}
    toy = rounds.toy
    first = toy.sampler(rounds.sampling, history).probabilities(toy.target[history[-1]])
    return {
        (token, *ending): float(first[token]) * share
        for token in np.flatnonzero(first).tolist()
        for ending, share in plain_texts(rounds, (*history, token), length - 1).items()
    }


def error(rounds: Rounds, history: Sequence[int], length: int) -> float:
    """Return the total variation between texts of the rounds and those of the target alone."""
    return total_variation(rounds.texts(history, length), plain_texts(rounds, history, length))
