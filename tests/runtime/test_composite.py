"""The round goes to the proposer that promises most; a model is not run for less than it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from edgedraft.runtime import Proposer, SamplingConfig
from edgedraft.runtime.composite import CompositeProposer
from edgedraft.runtime.datatypes import NOTHING, Proposal
from edgedraft.runtime.policy import DraftPolicy, PassCosts

POLICY = DraftPolicy(PassCosts({2: 0.010, 4: 0.011, 8: 0.0135}), overhead_s=0.0)


@dataclass
class Fixed(Proposer):
    """Always proposes the same, and counts how often it was asked and told to forget."""

    proposal: Proposal
    asked: int = 0
    forgot: int = 0
    saved: int = 0

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        self.asked += 1
        return self.proposal

    def forget(self) -> None:
        self.forgot += 1

    def save(self) -> None:
        self.saved += 1


def chain(*confidence: float, origin: str = "free", draft_s: float = 0.0) -> Proposal:
    count = len(confidence)
    return Proposal(tuple(range(count)), tuple(range(-1, count - 1)), confidence, origin,
                    draft_s=draft_s)  # fmt: skip


def test_the_likelier_of_two_free_proposals_wins() -> None:
    weak, strong = Fixed(chain(0.2)), Fixed(chain(0.9, 0.9, origin="strong"))
    for free in ([weak, strong], [strong, weak]):
        assert CompositeProposer(free, None, POLICY).propose([1], 8).origin == "strong"
    assert CompositeProposer([], None, POLICY).propose([1], 8) == NOTHING


def decode(composite: CompositeProposer, truth: Sequence[int], rounds: int) -> list[str]:
    """Commit `truth` over and over, one piece a round; return who was chosen each time."""
    committed: list[int] = [99]
    origins = []
    for _ in range(rounds):
        origins.append(composite.propose(committed, 8).origin)
        committed += truth
    return origins


def test_a_model_is_asked_where_it_brings_more_than_what_is_free() -> None:
    free = Fixed(Proposal.chain([7], [0.3], "free"))
    model = Fixed(chain(0.8, 0.8, 0.8, origin="model", draft_s=0.001))
    composite = CompositeProposer([free], model, POLICY)
    assert decode(composite, [0, 1, 2, 50], 100)[-50:] == ["model"] * 50


def test_a_model_that_costs_more_than_it_brings_is_soon_left_alone() -> None:
    free = Fixed(Proposal.chain([7], [0.3], "free"))
    model = Fixed(chain(0.8, origin="model", draft_s=0.009))
    composite = CompositeProposer([free], model, POLICY)
    decode(composite, [50], 300)  # the model is wrong
    assert free.asked == 300
    assert model.asked < 30


def test_a_model_that_only_says_what_is_there_for_free_is_left_alone() -> None:
    free = Fixed(chain(*[0.99] * 7))
    model = Fixed(chain(*[0.99] * 7, origin="model", draft_s=0.001))
    composite = CompositeProposer([free], model, POLICY)
    assert set(decode(composite, [0, 1, 2, 3, 4, 5, 6, 50], 100)) == {"free"}
    assert model.asked < 30


def test_a_model_left_alone_is_tried_again_and_taken_back() -> None:
    free = Fixed(Proposal.chain([7], [0.3], "free"))
    model = Fixed(chain(0.8, 0.8, 0.8, origin="model", draft_s=0.001))
    composite = CompositeProposer([free], model, POLICY)
    decode(composite, [50], 200)
    assert model.asked < 40
    assert decode(composite, [0, 1, 2, 50], 800)[-20:] == ["model"] * 20


def test_a_request_that_ended_says_nothing_about_its_last_draft() -> None:
    model = Fixed(chain(0.8, 0.8, 0.8, origin="model", draft_s=0.001))
    composite = CompositeProposer([], model, POLICY)
    decode(composite, [0, 1, 2, 50], 60)
    for _ in range(100):
        composite.begin(SamplingConfig())
        assert composite.propose([99], 8).origin == "model"


def test_tries_in_vain_become_rare() -> None:
    model = Fixed(chain(0.8, origin="model", draft_s=0.009))
    composite = CompositeProposer([], model, POLICY)
    decode(composite, [50], 300)
    asked = model.asked
    decode(composite, [50], 1200)
    assert model.asked - asked < 6


@dataclass
class Reader(Fixed):
    """Has to read each request's prompt before it drafts."""

    seconds: float = 0.0
    has_read: bool = False

    def begin(self, sampling: SamplingConfig) -> None:
        self.has_read = False

    def reading_s(self, committed: Sequence[int]) -> float:
        return 0.0 if self.has_read else self.seconds

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        self.has_read = True
        return super().propose(committed, budget)


@pytest.mark.parametrize(("rounds", "reads"), [(5, False), (100, True)])
def test_a_prompt_is_read_where_it_pays_within_the_rounds_that_requests_have(
    rounds: int, reads: bool
) -> None:
    """Three tokens a round are gained, and reading costs what twenty tokens take."""
    model = Reader(chain(0.8, 0.8, 0.8, origin="model", draft_s=0.001))
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.011, 8: 0.0135}), overhead_s=0.0)
    composite = CompositeProposer([], model, policy)
    decode(composite, [0, 1, 2, 50], 40)  # it is known to pay
    model.seconds = 0.200
    for _ in range(20):
        composite.begin(SamplingConfig())
        model.asked = 0
        decode(composite, [0, 1, 2, 50], rounds)
    assert model.asked == (rounds if reads else 0)


def test_a_try_that_begins_with_reading_comes_later_and_a_model_that_has_read_goes_on() -> None:
    for seconds, least in ((0.0, 8), (0.050, 40)):  # five tokens' time
        model = Reader(chain(0.8, 0.8, 0.8, origin="model", draft_s=0.001), seconds=seconds)
        policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.011, 8: 0.0135}), overhead_s=0.0)
        composite = CompositeProposer([], model, policy)
        decode(composite, [50], least - 2)
        assert not model.has_read
        decode(composite, [0, 1, 2, 50], 20)
        assert model.asked >= 10


def test_what_once_took_too_long_to_read_is_tried_again_in_the_end() -> None:
    model = Reader(chain(0.8, 0.8, 0.8, origin="model", draft_s=0.001))
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.011, 8: 0.0135}), overhead_s=0.0)
    composite = CompositeProposer([], model, policy)
    decode(composite, [0, 1, 2, 50], 40)
    model.seconds = 1e3
    composite.begin(SamplingConfig())
    decode(composite, [50], 1200)
    assert not model.has_read
    decode(composite, [50], 200)
    assert model.has_read


def test_what_was_expected_of_one_request_is_not_looked_for_in_the_next() -> None:
    proposer = Fixed(Proposal.chain([7], [0.95], "free"))
    composite = CompositeProposer([proposer], None, POLICY)
    for _ in range(200):
        composite.begin(SamplingConfig())
        (confidence,) = composite.propose([1, 2, 3], 8).confidence
        composite.begin(SamplingConfig())
        composite.propose([1, 2, 3, 4, 5, 6], 8)  # another text, and longer
    assert confidence == pytest.approx(0.935)


def test_time_spent_drafting_is_charged_to_whatever_is_submitted() -> None:
    composite = CompositeProposer(
        [Fixed(chain(0.9))], Fixed(chain(0.1, origin="model", draft_s=0.002)), POLICY
    )
    decode(composite, [0, 50], 8)
    chosen = composite.propose([99], 8)  # the first try
    assert chosen.origin == "free" and chosen.draft_s == 0.002


def test_a_proposer_that_promises_too_much_is_found_out() -> None:
    honest = Fixed(chain(0.8, 0.8, 0.8, origin="honest"))
    boaster = Fixed(Proposal.chain([9] * 3, [0.95] * 3, "boaster"))
    composite = CompositeProposer([honest, boaster], None, POLICY)
    committed = [5]
    origins = []
    for _ in range(60):
        chosen = composite.propose(committed, 8)
        origins.append(chosen.origin)
        committed += [0, 1, 2]  # what the honest one says
    assert origins[0] == "boaster"
    assert set(origins[20:]) == {"honest"}
    assert composite.propose(committed, 8).confidence[0] > 0.8, "and its promises are believed"


def test_only_what_was_chosen_counts() -> None:
    chosen = Fixed(chain(0.9, origin="chosen"))
    other = Fixed(Proposal.chain([9], [0.5], "other"))
    composite = CompositeProposer([chosen, other], None, POLICY)
    committed = [5]
    for _ in range(30):
        composite.propose(committed, 8)
        committed += [0]
    chosen.proposal = NOTHING
    assert composite.propose(committed, 8).confidence == (pytest.approx(0.55),)


def test_forgetting_and_saving_reach_every_proposer() -> None:
    proposers = [Fixed(NOTHING), Fixed(NOTHING), Fixed(NOTHING)]
    composite = CompositeProposer(proposers[:2], proposers[2], POLICY)
    composite.forget()
    composite.save()
    assert [(p.forgot, p.saved) for p in proposers] == [(1, 1)] * 3


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_is_handed_on(budget: int) -> None:
    class Exact(Proposer):
        def propose(self, committed: Sequence[int], given: int) -> Proposal:
            assert given == budget
            return NOTHING

    CompositeProposer([Exact()], Exact(), POLICY).propose([1], budget)
