"""How much of a proposal is verified: never more than pays."""

from __future__ import annotations

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, Proposal, SpeculativeDecoder
from edgedraft.runtime.policy import DraftPolicy, PassCosts
from fakes import PROMPT, OracleProposer, TableModel, random_table, run

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

COSTS = {2: 0.010, 4: 0.011, 8: 0.0135, 16: 0.018}
OVERHEAD_S = 2e-4  # what a policy assumes before it has seen a round


def chain(*confidence: float) -> Proposal:
    return Proposal.chain([1] * len(confidence), confidence, "test")


def rate(proposal: Proposal, count: int, costs: PassCosts) -> float:
    """Return the expected tokens per second when `count` nodes are submitted."""
    reached: list[float] = []
    for parent, confidence in zip(proposal.parents, proposal.confidence, strict=True):
        reached.append(confidence * (reached[parent] if parent >= 0 else 1.0))
    return (1 + sum(reached[:count])) / (costs.seconds(count + 1) + OVERHEAD_S)


def test_costs_are_interpolated_between_measurements_and_extended_beyond() -> None:
    costs = PassCosts(COSTS)
    assert costs.seconds(2) == costs.seconds(1) == 0.010
    assert costs.seconds(3) == pytest.approx(0.0105)
    assert costs.seconds(6) == pytest.approx(0.01225)
    assert costs.seconds(16) == pytest.approx(0.018)
    assert costs.seconds(24) == pytest.approx(0.0225)
    assert PassCosts({4: 0.02}).seconds(9) == 0.02


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
def test_no_other_number_of_nodes_would_bring_more_tokens_per_second(
    proposal: Proposal, measured: dict[int, float]
) -> None:
    costs = PassCosts(measured)
    count = DraftPolicy(costs).nodes_to_submit(proposal)
    rates = [rate(proposal, n, costs) for n in range(len(proposal.tokens) + 1)]
    assert rates[count] == pytest.approx(max(rates))
    assert rates[count] >= rates[0]  # not less than plain decoding
    # The last node submitted pays for itself; a tiny chance may vanish in the sum of the others.
    assert count == 0 or rates[count] >= rates[count - 1] * (1 - 1e-12)


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
    assert rate(wide, 3, costs) > rate(chain(0.3, 0.3, 0.3), 3, costs)


def test_where_rows_are_dear_only_the_companion_row_is_used() -> None:
    policy = DraftPolicy(PassCosts({2: 0.010, 16: 0.300}))
    # The second row is there anyway: no pass has a single one.
    assert policy.nodes_to_submit(chain(*[0.9] * 15)) == 1


def test_without_costs_everything_is_submitted() -> None:
    assert DraftPolicy().nodes_to_submit(chain(0.0, 0.0)) == 2


def test_the_overhead_of_a_round_makes_drafting_more_attractive() -> None:
    class SlowRound:
        class timings:  # noqa: N801
            draft_s, other_s = 0.05, 0.05

        class proposal:  # noqa: N801
            draft_s = 0.0

    policy = DraftPolicy(PassCosts({2: 0.010, 4: 0.014}))
    doubtful = chain(0.3, 0.5)
    assert policy.nodes_to_submit(doubtful) == 1
    for _ in range(50):
        policy.observe(SlowRound)  # type: ignore[arg-type]
    assert policy.nodes_to_submit(doubtful) == 2


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
