"""The draw: exact sets, exact probabilities, noise that belongs to a seed and a position."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from edgedraft.runtime import DecodeConfig, Proposal, SamplingConfig, SpeculativeDecoder
from edgedraft.runtime.interfaces import Proposer
from edgedraft.runtime.sampling import Sampler, noise
from edgedraft.runtime.verify import verify
from fakes import OracleProposer, RandomTreeProposer, TableModel, random_table

Row = npt.NDArray[np.float32]
ROW = np.array([2.0, 0.5, 1.0, -1.0, 3.0, 0.0], np.float32)


def sampler(row: Row = ROW, prompt: tuple[int, ...] = (0,), **choices: object) -> Sampler:
    return Sampler(SamplingConfig(**choices), prompt, row.size)  # type: ignore[arg-type]


def support(row: Row, **choices: object) -> list[int]:
    """Return the tokens that can be drawn."""
    return np.flatnonzero(sampler(row, **choices).probabilities(row)).tolist()


def assert_counts_follow(counts: Counter[object], law: dict[object, float]) -> None:
    """Compare counts with probabilities, five standard deviations allowed."""
    total = sum(counts.values())
    assert set(counts) <= {k for k, p in law.items() if p > 0}
    for outcome, p in law.items():
        deviation = 5 * (total * p * (1 - p)) ** 0.5 + 1e-9
        assert abs(counts[outcome] - total * p) <= deviation, (outcome, counts[outcome], total * p)


@pytest.mark.parametrize(
    "choices",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.0, "logit_bias": {3: 4.0, 4: -2.0}, "banned_tokens": (0,)},
    ],
    ids=str,
)
def test_counts_follow_the_stated_probabilities(choices: dict[str, object]) -> None:
    for row in (ROW, np.random.default_rng(0).normal(size=40).astype(np.float32)):
        draw = sampler(row, seed=5, **choices)
        draw.commit(2)
        counts = Counter(draw.choose(row, position) for position in range(3000))
        assert_counts_follow(counts, dict(enumerate(draw.probabilities(row))))


def test_counts_over_seeds_follow_the_probabilities_at_one_position() -> None:
    counts: Counter[object] = Counter()
    for seed in range(3000):
        counts[sampler(temperature=1.0, seed=seed).choose(ROW, 17)] += 1
    assert_counts_follow(counts, dict(enumerate(sampler(temperature=1.0).probabilities(ROW))))


@pytest.mark.parametrize("choices", [{"top_p": 0.9}, {"top_p": 0.9, "top_k": 30}, {"top_p": 0.3}])
def test_where_the_nucleus_is_looked_for_first_makes_no_difference(
    choices: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=300) * width).astype(np.float32) for width in (0.0, 0.5, 2.0, 9.0)]
    for row in rows:
        row[7:11] = row.max()  # ties
    found = [support(row, temperature=1.0, **choices) for row in rows]
    for guess in (0.0, 1.0, 1000.0):
        monkeypatch.setattr("edgedraft.runtime.sampling._NUCLEUS_GUESS", guess)
        assert [support(row, temperature=1.0, **choices) for row in rows] == found


def test_the_noise_of_a_token_does_not_depend_on_which_others_can_be_drawn() -> None:
    ids = np.arange(5000)
    everything = noise(3, 17, ids)
    assert np.array_equal(noise(3, 17, ids[40:50]), everything[40:50])
    assert 0 < everything.min() and everything.max() < 1
    assert abs(everything.mean() - 0.5) < 0.02
    for other in (noise(4, 17, ids), noise(3, 18, ids), noise(2**64 - 1, 17, ids)):
        assert abs(np.corrcoef(everything, other)[0, 1]) < 0.06
        assert abs(np.corrcoef(everything[1:], other[:-1])[0, 1]) < 0.06


def test_noise_is_what_any_language_can_compute() -> None:
    """A seed gives the same text in the next version, and on a phone."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    assert mixed(golden) == 0xE220A8397B1DCDAF  # SplitMix64's first number from seed 0
    for seed, position in ((0, 0), (3, 17), (2**64 - 1, 100_000)):
        ids = np.array([0, 1, 49151, 262143])
        stream = mixed(mixed(seed + golden & mask) + (position + 1) * golden & mask)
        bits = [mixed(stream + (i + 1) * golden & mask) >> 11 for i in ids.tolist()]
        assert noise(seed, position, ids).tolist() == [(b + 0.5) / 2**53 for b in bits]
        assert ids.tolist() == [0, 1, 49151, 262143]


def test_draws_at_neighbouring_positions_are_independent() -> None:
    draw = sampler(temperature=1.0, seed=3)
    p = draw.probabilities(ROW)
    chosen = [draw.choose(ROW, position) for position in range(4000)]
    pairs = Counter(zip(chosen[::2], chosen[1::2], strict=True))
    law = {(a, b): p[a] * p[b] for a in range(6) for b in range(6)}
    assert_counts_follow(pairs, law)  # type: ignore[arg-type]


def test_probabilities_are_the_softmax_of_the_written_formula() -> None:
    expected = np.exp(ROW / 0.7)
    np.testing.assert_allclose(
        sampler(temperature=0.7).probabilities(ROW), expected / expected.sum(), rtol=1e-6
    )


def test_noise_depends_on_seed_and_position_alone() -> None:
    rows = np.random.default_rng(1).normal(size=(50, 30)).astype(np.float32)
    one, other = (
        sampler(rows[0], temperature=1.0, seed=9),
        sampler(rows[0], temperature=1.0, seed=9),
    )
    forwards = [one.choose(row, i) for i, row in enumerate(rows)]
    backwards = [other.choose(rows[i], i) for i in reversed(range(50))]
    assert forwards == backwards[::-1]
    shifted = [one.choose(row, i + 1) for i, row in enumerate(rows)]
    assert forwards != shifted
    assert forwards != [
        sampler(rows[0], temperature=1.0, seed=10).choose(row, i) for i, row in enumerate(rows)
    ]


def test_cutting_tokens_off_changes_no_choice_that_was_kept() -> None:
    """A token's noise is its own: truncation does not shift it to another token."""
    rows = np.random.default_rng(1).normal(size=(80, 30)).astype(np.float32)
    free = sampler(rows[0], temperature=1.0, seed=9)
    for choices in ({"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.3}):
        cut = sampler(rows[0], temperature=1.0, seed=9, **choices)
        same = [
            cut.choose(row, i) == token
            for i, row in enumerate(rows)
            if cut.probabilities(row)[token := free.choose(row, i)] > 0
        ]
        assert len(same) > 20 and all(same)


def test_extreme_seeds_and_positions_work() -> None:
    for seed in (0, 2**32, 2**64 - 1):
        draw = sampler(temperature=1.0, seed=seed)
        assert all(0 <= draw.choose(ROW, position) < 6 for position in (0, 1, 2**31, 2**40))


def test_top_k_keeps_the_k_best_and_ties_at_the_border() -> None:
    row = np.array([1, 3, 2, 2, 0, 2], np.float32)
    assert support(row, temperature=1.0, top_k=1) == [1]
    assert support(row, temperature=1.0, top_k=2) == [1, 2, 3, 5]
    assert support(row, temperature=1.0, top_k=4) == [1, 2, 3, 5]
    assert support(row, temperature=1.0, top_k=5) == [0, 1, 2, 3, 5]
    for k in (0, 6, 100):
        assert support(row, temperature=1.0, top_k=k) == [0, 1, 2, 3, 4, 5]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    assert support(row, temperature=1.0, top_p=0.39) == [1]
    assert support(row, temperature=1.0, top_p=0.41) == [1, 3]
    assert support(row, temperature=1.0, top_p=0.69) == [1, 3]
    assert support(row, temperature=1.0, top_p=0.71) == [1, 2, 3]
    assert support(row, temperature=1.0, top_p=1e-9) == [1]
    assert support(row, temperature=1.0, top_p=1.0) == [0, 1, 2, 3]
    # Equal tokens are taken in the order of their ids.
    assert support(np.zeros(8, np.float32), temperature=1.0, top_p=0.3) == [0, 1, 2]


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("scale", [0.0, 0.1, 5.0])
def test_top_p_over_a_large_vocabulary_equals_sorting_all_of_it(top_p: float, scale: float) -> None:
    row = (np.random.default_rng(2).normal(size=5000) * scale).astype(np.float32)
    p = np.exp(row.astype(np.float64) - row.max())
    p /= p.sum()
    order = np.lexsort((np.arange(5000), -p))
    count = int((p[order].cumsum() < top_p).sum()) + 1
    kept = support(row, temperature=1.0, top_p=top_p)
    # One more or less where a sum meets top_p within rounding.
    assert abs(len(kept) - count) <= (1 if scale else 2)
    assert set(kept) >= set(order[: max(count - 2, 0)].tolist())


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert support(row, temperature=1.0, min_p=0.59) == [0, 1]
    assert support(row, temperature=1.0, min_p=0.61) == [0]
    assert support(row, temperature=1.0, min_p=0.29) == [0, 1, 2]
    # After the temperature: at 2 the ratios are the square roots.
    assert support(row, temperature=2.0, min_p=0.31) == [0, 1, 2, 3]


def test_truncations_apply_one_after_the_other() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # top-k leaves 4:3, of which the first has 0.571.
    assert support(row, temperature=1.0, top_k=2, top_p=0.56) == [0]
    assert support(row, temperature=1.0, top_k=2, top_p=0.58) == [0, 1]


def test_the_repetition_penalty_shrinks_what_prompt_and_output_hold() -> None:
    row = np.array([2.0, -2.0, 1.0, 0.0], np.float32)
    draw = sampler(row, prompt=(0, 1), temperature=1.0, repetition_penalty=2.0)
    expected = np.exp(np.array([1.0, -4.0, 1.0, 0.0]))
    np.testing.assert_allclose(draw.probabilities(row), expected / expected.sum(), rtol=1e-6)
    draw.commit(2)
    expected = np.exp(np.array([1.0, -4.0, 0.5, 0.0]))
    np.testing.assert_allclose(draw.probabilities(row), expected / expected.sum(), rtol=1e-6)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = np.zeros(4, np.float32)
    draw = sampler(
        row, prompt=(0, 0, 1), temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    np.testing.assert_allclose(draw.probabilities(row), 0.25)
    for token in (2, 2, 3):
        draw.commit(token)
    expected = np.exp(np.array([0, 0, -0.5 - 2 * 0.25, -0.5 - 0.25]))
    np.testing.assert_allclose(draw.probabilities(row), expected / expected.sum(), rtol=1e-6)


def test_bias_moves_and_bans_forbid_in_greedy_decoding_as_well() -> None:
    assert sampler().choose(ROW, 0) == 4
    assert sampler(banned_tokens=(4,)).choose(ROW, 0) == 0
    assert sampler(banned_tokens=(4,), logit_bias={4: 1e9, 3: 5.0}).choose(ROW, 0) == 3
    assert sampler(logit_bias={4: -np.inf}).choose(ROW, 0) == 0
    draw = sampler(temperature=3.0, banned_tokens=(4, 0))
    assert {draw.choose(ROW, i) for i in range(300)} == {1, 2, 3, 5}


def test_bans_hold_where_fewer_tokens_are_left_than_top_k_asks_for() -> None:
    draw = sampler(temperature=5.0, top_k=4, top_p=0.999, banned_tokens=(0, 1, 2, 5))
    assert {draw.choose(ROW, i) for i in range(300)} == {3, 4}
    assert np.flatnonzero(draw.probabilities(ROW)).tolist() == [3, 4]


def test_banning_every_token_is_an_error() -> None:
    draw = sampler(banned_tokens=tuple(range(6)))
    with pytest.raises(ValueError, match="every token is banned: remove entries"):
        draw.choose(ROW, 0)


def test_choosing_leaves_the_row_alone() -> None:
    row = ROW.copy()
    draw = sampler(row, temperature=0.5, repetition_penalty=1.3, logit_bias={1: 1.0}, top_p=0.5)
    draw.choose(row, 3)
    draw.probabilities(row)
    assert np.array_equal(row, ROW)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"temperature": -0.1}, "temperature must be >= 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be >= 0, got inf"),
        ({"top_k": -1}, r"top_k must be >= 0 \(0 is off\), got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"min_p": 1.0}, r"min_p must be in \[0, 1\), got 1.0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be > 0 \(1 is off\), got 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be finite, got inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be finite, got nan"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias must be finite or -inf, got"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*64\), got -1"),
        ({"seed": 2**64}, r"seed must be in \[0, 2\*\*64\), got"),
    ],
    ids=str,
)
def test_a_wrong_sampling_choice_is_named(choices: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**choices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_draft_tokens": -1}, "max_draft_tokens must be >= 0, got -1"),
        ({"stop": ("a", "")}, "stop must be non-empty strings"),
    ],
)
def test_a_wrong_request_is_named(choices: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 6])
def test_a_bias_outside_the_vocabulary_is_an_error(token: int) -> None:
    for choices in ({"logit_bias": {token: 1.0}}, {"banned_tokens": (token,)}):
        with pytest.raises(ValueError, match=r"ids must be in \[0, 6\)"):
            sampler(**choices)


def _three_token_law(sampling: SamplingConfig, tokens: int) -> dict[tuple[int, ...], float]:
    """Return the exact probability of every text of a three-token bigram model."""
    table = _TOY
    law = {}
    for text in itertools.product(range(3), repeat=tokens):
        p, last = 1.0, 0
        draw = Sampler(sampling, (0,), 3)
        for token in text:
            p *= float(draw.probabilities(table[last])[token])
            draw.commit(token)
            last = token
        law[text] = p
    return law


_TOY = np.array([[0.2, 1.0, -0.5], [0.8, 0.1, 0.3], [-1.0, 0.6, 0.9]], np.float32)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.3),
        SamplingConfig(temperature=1.0),
        SamplingConfig(temperature=2.0),
        SamplingConfig(temperature=1.0, top_k=2),
        SamplingConfig(temperature=1.0, top_p=0.7),
        SamplingConfig(temperature=1.0, min_p=0.4),
        SamplingConfig(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.4),
    ],
    ids=lambda s: f"t{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p} r{s.repetition_penalty}",
)
@pytest.mark.parametrize("kind", ["chain", "tree", "greedy guesses"])
def test_texts_through_the_speculative_loop_follow_the_exact_law(
    kind: str, sampling: SamplingConfig
) -> None:
    """Field case 15: a toy target of three tokens against its exact distribution."""
    counts: Counter[object] = Counter()
    model = TableModel(_TOY, memory=0)
    rng = np.random.default_rng(0)
    for seed in range(600):
        guesses = (0, *rng.integers(3, size=4).tolist())
        proposer: Proposer
        if kind == "chain":
            proposer = OracleProposer(guesses, 3)
        elif kind == "tree":
            proposer = RandomTreeProposer(guesses, 3, seed)
        else:
            proposer = OracleProposer((0, 1, 0, 1), 3)
        decoder = SpeculativeDecoder(model, proposer)
        config = DecodeConfig(max_tokens=3, sampling=replace(sampling, seed=seed))
        counts[tuple(t for trace in decoder.rounds([0], config) for t in trace.emitted)] += 1
    law = _three_token_law(sampling, 3)
    assert sum(law.values()) == pytest.approx(1)
    assert_counts_follow(counts, law)  # type: ignore[arg-type]


def test_verify_uses_the_noise_of_each_position_and_the_history_so_far() -> None:
    rows = np.stack([ROW, ROW[::-1], ROW]).copy()
    sampling = SamplingConfig(temperature=1.0, frequency_penalty=1.0, seed=4)
    for start in range(30):
        alone = Sampler(sampling, (0,), 6)
        chosen = []
        for i, row in enumerate(rows):
            chosen.append(alone.choose(row, start + i))
            alone.commit(chosen[-1])
        proposal = Proposal.chain(chosen[:2], (1, 1), "test")
        verdict = verify(proposal, rows, Sampler(sampling, (0,), 6), start)
        assert (verdict.path, verdict.next_token) == ((0, 1), chosen[2])


def test_decoding_from_a_table_of_many_seeds_never_meets_a_banned_token() -> None:
    table = random_table(9, 0)
    sampling = SamplingConfig(temperature=1.5, banned_tokens=(1, 2, 3))
    for seed in range(20):
        config = DecodeConfig(max_tokens=20, sampling=replace(sampling, seed=seed))
        proposer = OracleProposer((0, *[1, 2, 3] * 10), 9)
        for trace in SpeculativeDecoder(TableModel(table), proposer).rounds([0], config):
            assert not {1, 2, 3} & set(trace.emitted)
