"""Sampling with draft probabilities leaves the target's law as it is.

Laws are worked out exactly, by trying every outcome of drafting and verifying (`sampling_laws.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgedraft.runtime import SamplingConfig
from edgedraft.runtime.datatypes import Draft, Proposal
from edgedraft.runtime.lattice import lattice
from edgedraft.runtime.rejection import Dice, _coupled, verify_lattice
from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.runtime.vocabulary import Vocabulary
from sampling_laws import (
    Rounds,
    Rule,
    awkward_pair,
    careless_rule,
    dropping_rule,
    error,
    lattice_rule,
    law_of,
    line_rule,
    match_rule,
    paper_rule,
    plain_texts,
    shared_rule,
    simple_pair,
    toy,
)
from tokenizers_for_tests import byte_level_of

EXACT: dict[str, Rule] = {
    "lattice": lattice_rule,
    "line": line_rule,
    "shared": shared_rule,
    "token match": match_rule,
}
WITH_PROBABILITIES = [lattice_rule, line_rule, shared_rule]


@pytest.mark.parametrize(("alpha", "seed"), [(1.0, 0), (1.0, 1), (0.3, 2), (0.05, 3)])
@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_texts_have_exactly_the_targets_law(rule: Rule, alpha: float, seed: int) -> None:
    assert error(Rounds(toy(simple_pair(), alpha, seed), rule), [seed], 2) < 1e-9


@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_texts_of_awkward_vocabularies_have_exactly_the_targets_law(rule: Rule) -> None:
    models = toy(awkward_pair(), 0.5, 3)
    rounds = Rounds(models, rule, is_enough=lambda pieces: len(pieces) == 2)
    assert error(rounds, [0], 2) < 1e-9
    assert error(Rounds(models, rule), [8], 1) < 1e-9


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.5, top_k=3),
        SamplingConfig(temperature=1.0, top_p=0.7),
        SamplingConfig(temperature=1.5, min_p=0.3),
        SamplingConfig(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.4),
        SamplingConfig(temperature=0.7, top_k=4, frequency_penalty=0.8, banned_tokens=(3,)),
        SamplingConfig(temperature=0.0),
    ],
    ids=lambda s: f"t{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p} r{s.repetition_penalty}",
)
@pytest.mark.parametrize("rule", WITH_PROBABILITIES)
def test_truncations_and_penalties_hold_within_a_round(
    rule: Rule, sampling: SamplingConfig
) -> None:
    assert error(Rounds(toy(simple_pair(), 0.7, 5), rule, sampling), [0], 2) < 1e-9


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", WITH_PROBABILITIES)
def test_a_budget_of_nodes_changes_no_law(rule: Rule, budget: int) -> None:
    rounds = Rounds(toy(simple_pair(), 1.0, 1), rule, budget=budget)
    assert error(rounds, [0], 2) < 1e-9
    assert max(map(len, rounds.law([0]))) == budget + 1


@pytest.mark.parametrize(
    "is_enough",
    [
        lambda pieces: len(pieces) == 3 or pieces[-1:] == [1],
        lambda pieces: len(pieces) == 3 or pieces.count(0) == 2,
        lambda pieces: True,
    ],
    ids=["after a b", "after two a", "at once"],
)
@pytest.mark.parametrize("rule", WITH_PROBABILITIES)
def test_a_draft_may_end_for_what_is_in_it(
    rule: Rule, is_enough: Callable[[Sequence[int]], bool]
) -> None:
    assert error(Rounds(toy(simple_pair(), 1.0, 2), rule, is_enough=is_enough), [0], 2) < 1e-9


@pytest.mark.parametrize("rule", WITH_PROBABILITIES)
def test_pieces_may_be_kept_from_the_drafter(rule: Rule) -> None:
    assert error(Rounds(toy(simple_pair(), 1.0, 2), rule, mask=[2]), [0], 2) < 1e-9


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_merging_before_testing_bends_the_law(alpha: float) -> None:
    """OmniDraft's rule, as published: the tests above would notice."""
    rounds = Rounds(toy(simple_pair(), alpha, 1), paper_rule)
    assert error(rounds, [0], 1) > 1e-3
    assert error(rounds, [0], 2) > 1e-3


def test_rows_along_the_longest_match_bend_the_law_of_the_second_token() -> None:
    rounds = Rounds(toy(simple_pair(), 1.0, 1), careless_rule)
    assert error(rounds, [0], 1) < 1e-9
    assert error(rounds, [0], 2) > 1e-3


def test_a_draft_that_was_seen_and_dropped_bends_the_law() -> None:
    assert error(Rounds(toy(simple_pair(), 1.0, 1), dropping_rule), [0], 1) > 1e-3


@pytest.mark.parametrize("rule", WITH_PROBABILITIES)
def test_a_drafter_equal_to_its_target_is_never_refused(rule: Rule) -> None:
    names = Vocabulary(byte_level_of(["a", "b", "c"]))
    models = toy(VocabMap.build(names, names), 0.5, 0)
    models.draft[:] = [
        models.sampler(SamplingConfig(temperature=1), [0]).probabilities(row)
        for row in models.target
    ]
    assert {len(emitted) for emitted in Rounds(models, rule).law([1])} == {4}


def test_draft_probabilities_and_siblings_pay() -> None:
    """Mean tokens per round, over models that differ as much as any."""
    mean = {
        rule: sum(
            len(emitted) * probability
            for seed in range(4)
            for emitted, probability in Rounds(toy(simple_pair(), 1.0, seed), rule).law([0]).items()
        )
        / 4
        for rule in (match_rule, line_rule, lattice_rule)
    }
    assert mean[match_rule] + 0.1 < mean[line_rule] < mean[lattice_rule]


@pytest.mark.parametrize("rule", WITH_PROBABILITIES)
def test_real_dice_fall_by_the_same_law(rule: Rule) -> None:
    """Pearson's chi-square over texts of two tokens, five standard deviations allowed."""
    rounds = Rounds(toy(simple_pair(), 1.0, 4), rule)
    dice = Dice(np.random.default_rng(0))
    num_texts = 3000
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(num_texts):
        text: tuple[int, ...] = (0,)
        while len(text) < 3:
            text += rounds.play(text[-1:], dice)
        counts[text[1:3]] += 1
    law = plain_texts(rounds, [0], 2)
    statistic = sum((counts[x] - num_texts * p) ** 2 / (num_texts * p) for x, p in law.items())
    degrees = len(law) - 1
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5


def test_rows_of_laws_are_weights_of_any_scale_and_precision() -> None:
    models = toy(simple_pair(), 1.0, 0)
    draft = Draft((0, 1, 2), (0.5, 0.5, 0.5))
    proposal = lattice(draft, models.vocab_map, 9)
    rows = models.rows(0, proposal)
    laws = np.array([[2, 1, 1], [1, 4, 1], [1, 1, 2]])

    def verdicts(laws: np.ndarray) -> dict[object, float]:
        def play(dice: Dice) -> object:
            sampler = models.sampler(SamplingConfig(temperature=1), [0])
            return verify_lattice(proposal, laws, rows, sampler, models.marginal, dice)

        return law_of(play)

    expected = verdicts(laws / laws.sum(1, keepdims=True))
    assert verdicts(laws.astype(np.float32)) == pytest.approx(expected)


def test_dice_never_fall_on_what_has_no_weight() -> None:
    class Edge:
        """Draws the ends of the unit interval."""

        value = 0.0

        def random(self) -> float:
            return self.value

    edge = Edge()
    dice = Dice(edge)  # type: ignore[arg-type]
    assert dice.happens(1e-300) and not dice.happens(0.0)
    assert dice.draw(np.array([0.0, 0.3, 0.0])) == 1
    edge.value = np.nextafter(1.0, 0.0)
    assert dice.happens(1.0)
    for total in (1.0, np.nextafter(1.0, 2.0), 1.5, np.nextafter(2.0, 0.0), 1e-300):
        assert dice.draw(np.array([total, 0.0])) == 0


def test_a_refusal_by_rounding_alone_still_draws_from_the_target() -> None:
    class Refusing(Dice):
        def happens(self, probability: float) -> bool:
            return False

    p = np.array([0.25, 0.75, 0.0])
    assert _coupled(p, p, 1, Refusing(np.random.default_rng(0))) in (0, 1)


def test_a_proposal_of_another_kind_is_an_error() -> None:
    models = toy(simple_pair(), 1.0, 0)
    sampler = models.sampler(SamplingConfig(temperature=1), [0])
    dice = Dice(np.random.default_rng(0))
    proposal = Proposal.chain([0], [1.0], "test")
    with pytest.raises(AssertionError, match="lattice.py"):
        verify_lattice(
            proposal, np.ones((1, 3)), models.rows(0, proposal), sampler, models.marginal, dice
        )
