"""How much of a proposal is verified: never more than pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, Proposal, RoundTrace, SpeculativeDecoder, Verdict
from edgedraft.runtime.datatypes import Timings
from edgedraft.runtime.policy import ConstantPolicy, DraftPolicy, GammaPolicy, PassCosts
from fakes import PROMPT, OracleProposer, TableModel, random_table, run

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

COSTS = {2: 0.010, 4: 0.011, 8: 0.0135, 16: 0.018}
OVERHEAD_S = 2e-4  # what a policy assumes before it has seen a round


def chain(*confidence: float) -> Proposal:
    return Proposal.chain([1] * len(confidence), confidence, "test")


def value(proposal: Proposal, count: int, costs: PassCosts) -> float:
    """Return the expected tokens when `count` nodes are submitted, less what plain decoding brings
    in that time.
    """
    reached: list[float] = []
    for parent, confidence in zip(proposal.parents, proposal.confidence, strict=True):
        reached.append(confidence * (reached[parent] if parent >= 0 else 1.0))
    plain_s = costs.seconds(1) + OVERHEAD_S
    return 1 + sum(reached[:count]) - (costs.seconds(count + 1) + OVERHEAD_S) / plain_s


def test_costs_are_interpolated_between_measurements_and_extended_beyond() -> None:
    costs = PassCosts(COSTS)
    assert costs.seconds(2) == costs.seconds(1) == 0.010
    assert costs.seconds(3) == pytest.approx(0.0105)
    assert costs.seconds(6) == pytest.approx(0.01225)
    assert costs.seconds(16) == pytest.approx(0.018)
    assert costs.seconds(24) == pytest.approx(0.0225)
    assert PassCosts({4: 0.02}).seconds(9) == 0.02


def test_every_cached_token_adds_its_share_and_more_to_more_rows() -> None:
    costs = PassCosts({2: 0.010, 8: 0.013}, {2: 2e-6, 8: 8e-6})
    assert costs.seconds(2, 1000) == pytest.approx(0.012)
    assert costs.seconds(5, 1000) == pytest.approx(0.0115 + 0.005)
    assert costs.seconds(8) == 0.013


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), min_size=1, max_size=8),
)
def test_costs_never_fall_with_more_rows(measured: dict[int, float]) -> None:
    costs = PassCosts(measured)
    seconds = [costs.seconds(rows) for rows in range(1, 80)]
    assert all(b >= a - 1e-12 for a, b in zip(seconds, seconds[1:], strict=False))
    assert min(seconds) > 0


def test_costs_need_a_measurement() -> None:
    with pytest.raises(ValueError, match="at least one row count"):
        PassCosts({})


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    count = draw(st.integers(0, 15))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(count))
    confidence = tuple(draw(st.floats(0, 1)) for _ in range(count))
    return Proposal((1,) * count, parents, confidence, "test")


@settings(max_examples=300)
@given(
    proposal=proposals(),
    measured=st.dictionaries(
        st.sampled_from([2, 3, 4, 8, 12, 16]), st.floats(1e-3, 0.1), min_size=1
    ),
)
def test_no_other_number_of_nodes_would_bring_more_for_its_time(
    proposal: Proposal, measured: dict[int, float]
) -> None:
    costs = PassCosts(measured)
    count = DraftPolicy(costs).nodes_to_submit(proposal)
    values = [value(proposal, n, costs) for n in range(len(proposal.tokens) + 1)]
    assert values[count] == pytest.approx(max(values), abs=1e-9)
    assert DraftPolicy(costs).value(proposal) == pytest.approx(max(values), abs=1e-9)
    assert values[count] >= -1e-9  # not less than plain decoding


def test_hopeless_nodes_are_not_submitted_and_certain_ones_are() -> None:
    policy = DraftPolicy(PassCosts(COSTS))
    assert policy.nodes_to_submit(chain(*[0.0] * 15)) == 0
    assert policy.nodes_to_submit(chain(*[1.0] * 15)) == 15
    assert policy.nodes_to_submit(chain()) == 0
    assert policy.nodes_to_submit(chain(0.9, 0.9, 0.9, 0.0, 1.0, 1.0)) == 3


def test_weak_tokens_are_bought_for_a_strong_continuation() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 3: 0.0115, 16: 0.0116}))
    assert policy.nodes_to_submit(chain(0.1, 0.1)) == 1
    assert policy.nodes_to_submit(chain(0.3, 0.3, *[1.0] * 13)) == 15


def test_siblings_add_up_and_cost_rows() -> None:
    costs = PassCosts(COSTS)
    wide = Proposal((1, 2, 3), (-1, -1, -1), (0.3, 0.3, 0.3), "test")
    assert DraftPolicy(costs).nodes_to_submit(wide) == 3
    assert value(wide, 3, costs) > value(chain(0.3, 0.3, 0.3), 3, costs)


def test_where_rows_are_dear_only_the_companion_row_is_used() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 16: 0.300}))
    # The second row is there anyway: no pass has a single one.
    assert policy.nodes_to_submit(chain(*[0.9] * 15)) == 1


def test_a_row_that_pays_behind_a_short_text_may_not_pay_behind_a_long_one() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 16: 0.011}, {2: 2e-6, 16: 40e-6}))
    doubtful = chain(0.5, 0.5, 0.5)
    assert policy.nodes_to_submit(doubtful) == 3
    policy.begin_round(4000)
    assert policy.nodes_to_submit(doubtful) == 1
    policy.begin_round(10)
    assert policy.nodes_to_submit(doubtful) == 3


def test_what_time_brings_is_learned_in_plain_rounds_whatever_the_context() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.014}, {2: 1e-5, 4: 1e-5}), overhead_s=0.0)
    policy.begin_round(1000)
    assert policy.price(0.020) == pytest.approx(1.0)
    for _ in range(80):
        observed(policy, accepted=0, other_s=0.0, forward_s=0.026)  # as planned
    lost = policy.price(0.020)
    policy.begin_round(0)
    assert policy.price(0.010) == pytest.approx(lost, rel=1e-3)
    assert lost < 0.9


def test_without_costs_everything_is_submitted() -> None:
    assert DraftPolicy().nodes_to_submit(chain(0.0, 0.0)) == 2


def test_gamma_stops_behind_the_token_that_makes_the_draft_doubtful() -> None:
    policy = GammaPolicy(0.3)
    assert policy.wants_more(0.71, step_s=1.0) and not policy.wants_more(0.69, step_s=0.0)
    assert policy.nodes_to_submit(chain(0.9, 0.9, 0.8, 1.0, 1.0)) == 3  # 0.81, then 0.648
    assert policy.value(chain(0.9, 0.9, 0.8, 1.0)) == pytest.approx(1 + 0.9 + 0.81 + 0.648)
    assert policy.nodes_to_submit(chain(1.0, 1.0)) == 2
    assert policy.nodes_to_submit(chain()) == 0
    assert GammaPolicy(0.0).nodes_to_submit(chain(0.99, 1.0)) == 1
    assert GammaPolicy(1.0).nodes_to_submit(chain(0.0, 0.0)) == 2


@pytest.mark.parametrize("accepted", [0, 4])
def test_rules_for_comparison_learn_nothing_of_costs(accepted: int) -> None:
    for policy in (ConstantPolicy(4), GammaPolicy(0.5)):
        before = policy.nodes_to_submit(chain(0.4, 0.9)), policy.price(1.0)
        for _ in range(50):
            observed(policy, accepted=accepted, other_s=0.1)
        assert (policy.nodes_to_submit(chain(0.4, 0.9)), policy.price(1.0)) == before
        assert policy.price(1.0) == 0


@pytest.mark.parametrize("policy", [ConstantPolicy(3), GammaPolicy(0.5)])
def test_output_stays_plain_with_rules_for_comparison(policy: DraftPolicy) -> None:
    table = random_table(23, 0)
    config = DecodeConfig(max_tokens=40)
    plain = run(TableModel(table), config)
    model = TableModel(table)
    proposer = OracleProposer((*PROMPT, *plain.tokens), 23, mistakes=0.3)
    decoder = SpeculativeDecoder(model, proposer, policy)
    assert run(model, config, decoder=decoder).tokens == plain.tokens
    assert max(model.passes) == (4 if policy.most else 3)  # 0.7, then 0.49
    assert max(budget for _, budget in proposer.asked) == (policy.most or 15)


def observed(
    policy: DraftPolicy,
    accepted: int,
    other_s: float,
    draft_s: float = 0.0,
    forward_s: float = 0.01,
) -> None:
    """Tell the policy of a round of four proposed tokens."""
    proposal = Proposal.chain([1] * 4, [0.5] * 4, "test")
    verdict = Verdict(tuple(range(accepted)), next_token=1)
    timings = Timings(draft_s, forward_s, other_s)
    nothing = np.zeros((0, 0), np.float32)
    policy.observe(RoundTrace(proposal, verdict, (), nothing, timings, None))


def test_the_overhead_of_a_round_makes_drafting_more_attractive() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.014}))
    doubtful = chain(0.3, 0.15)
    assert policy.nodes_to_submit(doubtful) == 1
    for _ in range(80):
        observed(policy, accepted=0, other_s=0.1)
    assert policy.nodes_to_submit(doubtful) == 2


def test_where_drafts_are_usually_right_a_doubtful_token_is_not_worth_a_row() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.014}))
    doubtful = chain(0.3, 0.9)
    assert policy.nodes_to_submit(doubtful) == 2
    for _ in range(80):
        observed(policy, accepted=4, other_s=2e-4)
    assert policy.nodes_to_submit(doubtful) == 1
    assert policy.price(0.010) > 2


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_where_everything_takes_longer_drafts_stay_as_they_are(slower: float) -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.011, 8: 0.0135, 16: 0.018}))
    proposal = replace(chain(0.8, 0.6, 0.5, 0.2, 0.1), draft_s=0.002 * slower)
    nothing = np.zeros((0, 0), np.float32)
    timings = Timings((0.002 + 1e-4) * slower, 0.0115 * slower, 1e-4 * slower)
    for _ in range(200):
        policy.observe(RoundTrace(proposal, Verdict((0, 1), 1), (), nothing, timings, None))
    steady = DraftPolicy(PassCosts({2: 0.010, 4: 0.011, 8: 0.0135, 16: 0.018}))
    for _ in range(200):
        timings = Timings(0.0021, 0.0115, 1e-4)
        trace = RoundTrace(replace(proposal, draft_s=0.002), Verdict((0, 1), 1), (), nothing,
                           timings, None)  # fmt: skip
        steady.observe(trace)
    assert policy.price(0.003 * slower) == pytest.approx(steady.price(0.003), rel=1e-3)
    assert policy.row_price == pytest.approx(steady.row_price, rel=1e-3)
    assert policy.value(proposal) == pytest.approx(
        steady.value(replace(proposal, draft_s=0.002)), rel=1e-3
    )


def test_one_pass_that_something_interrupted_changes_little() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.014}))
    nothing = np.zeros((0, 0), np.float32)

    def observe(forward_s: float) -> None:
        timings = Timings(1e-4, forward_s, 1e-4)
        policy.observe(RoundTrace(chain(0.5), Verdict((), 1), (), nothing, timings, None))

    for _ in range(50):
        observe(0.010)
    before = policy.price(0.001)
    observe(3.0)
    assert policy.price(0.001) > 0.9 * before


def test_time_that_a_model_drafted_is_not_overhead() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.014}))
    proposal = replace(Proposal.chain([1], [0.5], "test"), draft_s=0.05, reading_s=0.2)
    nothing = np.zeros((0, 0), np.float32)
    for _ in range(50):
        timings = Timings(0.25, 0.01, 1e-4)
        policy.observe(RoundTrace(proposal, Verdict((), 1), (), nothing, timings, None))
    assert policy._overhead_s < 3e-4


def test_without_costs_time_is_free() -> None:
    policy = DraftPolicy()
    assert policy.price(1.0) == 0
    assert policy.value(chain(0.5, 0.5)) == 1.75


def test_the_loop_submits_what_the_policy_says_and_output_stays_plain() -> None:
    table = random_table(23, 0)
    config = DecodeConfig(max_tokens=40)
    plain = run(TableModel(table), config)
    truth = (*PROMPT, *plain.tokens)
    for mistakes, widest in ((0.95, 2), (0.0, 16)):
        model = TableModel(table)
        policy = DraftPolicy(PassCosts({2: 0.010, 16: 0.030}))
        proposer = OracleProposer(truth, 23, mistakes=mistakes)
        decoder = SpeculativeDecoder(model, proposer, policy)
        assert run(model, config, decoder=decoder).tokens == plain.tokens
        assert max(model.passes) == widest
    assert np.isfinite(policy._overhead_s)


def test_the_loop_tells_the_policy_how_full_the_cache_is() -> None:
    table = random_table(23, 0)
    config = DecodeConfig(max_tokens=60)
    truth = (*PROMPT, *run(TableModel(table), config).tokens)
    model = TableModel(table)
    # Behind forty tokens a row costs more than a whole plain pass.
    policy = DraftPolicy(PassCosts({2: 0.010, 16: 0.010}, {2: 0.0, 16: 0.010}))
    decoder = SpeculativeDecoder(model, OracleProposer(truth, 23, mistakes=0.0), policy)
    run(model, config, decoder=decoder)
    assert max(model.passes[:2]) > 2
    assert set(model.passes[-8:]) == {2}
