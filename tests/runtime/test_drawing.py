"""Drafts that are drawn: the whole loop emits the law of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, Proposal, Proposer, SamplingConfig, SpeculativeDecoder
from edgedraft.runtime.composite import CompositeProposer
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.drawing import DraftDrawing
from edgedraft.runtime.policy import DraftPolicy
from edgedraft.runtime.rejection import Dice
from edgedraft.runtime.sampling import Sampler
from fakes import TableModel, run
from sampling_laws import Toy, law_of, simple_pair, total_variation, toy

SAMPLINGS = {
    "plain": SamplingConfig(temperature=1.0, verification="lattice"),
    "truncated": SamplingConfig(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, verification="lattice"
    ),
    "penalised": SamplingConfig(
        temperature=1.3, repetition_penalty=1.4, presence_penalty=0.3, verification="lattice"
    ),
}
PROMPT = (0,)


class Guess(Proposer):
    """Always proposes the same token, as a free proposer might."""

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        return Proposal.chain([1][:budget], [0.4][:budget], "guess")


def drafter_of(models: Toy, *, trees: bool) -> DraftModel:
    with np.errstate(divide="ignore"):
        table = np.log(models.draft).astype(np.float32)
    return DraftModel(
        TableModel(table, memory=0.0, max_rows=1),
        models.vocab_map,
        target_vocab_size=models.vocab_size,
        trees=trees,
    )


def loop_law(
    models: Toy,
    sampling: SamplingConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    trees: bool,
    free: Sequence[Proposer] = (),
) -> dict[Any, float]:
    """Return the law of the first two tokens, over everything that chance can do in the loop."""
    config = DecodeConfig(max_tokens=2, max_draft_tokens=2, sampling=sampling)

    def decode(dice: Dice) -> tuple[int, ...]:
        monkeypatch.setattr(DraftDrawing, "_dice", lambda self, position, purpose: dice)
        monkeypatch.setattr(
            Sampler, "choose", lambda self, row, position: dice.draw(self.probabilities(row))
        )
        policy = DraftPolicy()
        proposer = CompositeProposer(free, drafter_of(models, trees=trees), policy)
        target = TableModel(models.target, memory=0.0, supports_trees=trees)
        decoder = SpeculativeDecoder(target, proposer, policy)
        return run(target, config, prompt=PROMPT, decoder=decoder).tokens

    return law_of(decode)


def plain_law(models: Toy, sampling: SamplingConfig) -> dict[Any, float]:
    law = {}
    for first, second in product(range(models.vocab_size), repeat=2):
        one = models.sampler(sampling, PROMPT).probabilities(models.target[PROMPT[-1]])[first]
        two = models.sampler(sampling, (*PROMPT, first)).probabilities(models.target[first])[second]
        law[first, second] = float(one * two)
    return law


@pytest.mark.parametrize("trees", [True, False], ids=["lattice", "line"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_loop_emits_the_law_of_plain_decoding(
    name: str, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = toy(simple_pair(), 0.5, seed=3)
    emitted = loop_law(models, SAMPLINGS[name], monkeypatch, trees=trees)
    assert total_variation(emitted, plain_law(models, SAMPLINGS[name])) < 1e-9


def test_a_free_proposal_beside_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who drafts is settled before anything is drawn."""
    models = toy(simple_pair(), 0.5, seed=4)
    sampling = SAMPLINGS["plain"]
    emitted = loop_law(models, sampling, monkeypatch, trees=True, free=[Guess()])
    assert total_variation(emitted, plain_law(models, sampling)) < 1e-9


def test_leaving_out_a_draft_that_was_looked_at_would_not_be_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above is not vacuous."""
    models = toy(simple_pair(), 0.5, seed=4)
    sampling = SAMPLINGS["plain"]
    propose = CompositeProposer.propose

    def choosy(self: CompositeProposer, committed: Sequence[int], budget: int) -> Proposal:
        proposal = propose(self, committed, budget)
        dull = proposal.draft is not None and proposal.draft.tokens[0] == 0
        return Guess().propose(committed, budget) if dull else proposal

    monkeypatch.setattr(CompositeProposer, "propose", choosy)
    emitted = loop_law(models, sampling, monkeypatch, trees=True)
    assert total_variation(emitted, plain_law(models, sampling)) > 1e-3


def test_the_same_seed_gives_the_same_answer_and_another_seed_another() -> None:
    models = toy(simple_pair(), 1.0, seed=5)

    def answer(seed: int) -> tuple[int, ...]:
        sampling = SamplingConfig(temperature=1.0, seed=seed, verification="lattice")
        config = DecodeConfig(max_tokens=40, sampling=sampling)
        target = TableModel(models.target, memory=0.0)
        return run(target, config, drafter_of(models, trees=True), prompt=PROMPT).tokens

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_a_greedy_request_is_drafted_and_verified_greedily() -> None:
    models = toy(simple_pair(), 1.0, seed=5)
    config = DecodeConfig(max_tokens=40, sampling=SamplingConfig(verification="lattice"))
    target = TableModel(models.target, memory=0.0)
    plain = run(target, config, prompt=PROMPT)
    output = run(
        TableModel(models.target, memory=0.0),
        config,
        drafter_of(models, trees=True),
        prompt=PROMPT,
    )
    assert output.tokens == plain.tokens


def test_an_unknown_verification_is_refused() -> None:
    with pytest.raises(ValueError, match="verification must be 'coupled' or 'lattice', got 'x'"):
        SamplingConfig(verification="x")  # type: ignore[arg-type]
