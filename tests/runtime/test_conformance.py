"""What every proposer has to live up to: the output is plain decoding's, and it ends where plain
decoding's ends.

A proposer joins by an entry in `fakes.CHAIN_PROPOSERS` or `fakes.TREE_PROPOSERS`. Plain decoding is
checked against a loop written here, one fresh prefix per token, so that the two cannot share a
fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, OnnxModel, SamplingConfig, SpeculativeDecoder
from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.interfaces import LanguageModel, Proposer
from edgedraft.runtime.sampling import Sampler
from fakes import (
    CHAIN_PROPOSERS,
    PROMPT,
    TREE_PROPOSERS,
    AdversarialProposer,
    KnownText,
    OracleProposer,
    RandomTreeProposer,
    TableModel,
    random_table,
    run,
)
from graphs import TINY_VOCAB_SIZE

VOCAB = 23
SAMPLING = {
    "greedy": SamplingConfig(),
    "greedy with penalties": SamplingConfig(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "greedy with bias and bans": SamplingConfig(
        logit_bias={4: 3.0, 6: -2.0, 9: -np.inf}, banned_tokens=(2, 11)
    ),
    "temperature": SamplingConfig(temperature=1.0),
    "hot": SamplingConfig(temperature=2.0, seed=3),
    "top-k": SamplingConfig(temperature=0.8, top_k=5, seed=1),
    "top-p": SamplingConfig(temperature=0.8, top_p=0.9, seed=2),
    "min-p": SamplingConfig(temperature=1.5, min_p=0.1, seed=5),
    "everything": SamplingConfig(
        temperature=0.9,
        top_k=12,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={3: 1.0},
        banned_tokens=(7,),
        seed=2**63 + 11,
    ),
}
ALL_PROPOSERS = {**CHAIN_PROPOSERS, **TREE_PROPOSERS}


def written_out(
    row_of: Callable[[list[int]], FloatArray],
    vocab_size: int,
    config: DecodeConfig,
    prompt: Sequence[int] = PROMPT,
) -> list[int]:
    """Decode one token at a time from whole prefixes."""
    sampler = Sampler(config.sampling, prompt, vocab_size)
    tokens = list(prompt)
    for _ in range(config.max_tokens):
        tokens.append(sampler.choose(row_of(tokens), len(tokens)))
        sampler.commit(tokens[-1])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
@pytest.mark.parametrize("name", ALL_PROPOSERS)
def test_output_over_a_table_equals_plain_decoding(name: str, sampling: SamplingConfig) -> None:
    for seed in range(3):
        table = random_table(VOCAB, seed)
        config = DecodeConfig(
            max_tokens=40, sampling=replace(sampling, seed=(sampling.seed + seed) % 2**64)
        )
        plain = run(TableModel(table), config)
        model = TableModel(table)
        assert list(plain.tokens) == written_out(model.row, VOCAB, config)
        known = KnownText((*PROMPT, *plain.tokens), VOCAB, eos=(1,), seed=seed)
        output = run(model, config, ALL_PROPOSERS[name](known))
        assert output.tokens == plain.tokens
        assert np.array_equal(output.rows, plain.rows)
        assert output.finish == plain.finish == "length"
        assert model.cache == [*PROMPT, *plain.tokens[:-1]]  # it trails by one token
        assert max(model.passes) <= 16


CONTRACTS = ("own", "genai", "concat")


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
@pytest.mark.parametrize("contract", CONTRACTS)
def test_output_over_a_graph_equals_plain_decoding_bit_for_bit(
    tiny_model: Callable[..., OnnxModel], contract: str, sampling: SamplingConfig
) -> None:
    plain_model, model = tiny_model(contract=contract), tiny_model(contract=contract)
    for seed in range(2):
        config = DecodeConfig(
            max_tokens=30, sampling=replace(sampling, seed=(sampling.seed + seed) % 2**64)
        )
        plain = run(plain_model, config)
        known = KnownText((*PROMPT, *plain.tokens), model.vocab_size, eos=(1,), seed=seed)
        for name, make in CHAIN_PROPOSERS.items():
            output = run(model, config, make(known))
            assert output.tokens == plain.tokens, name
            assert np.array_equal(output.rows, plain.rows), name
            assert output.finish == "length"


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_plain_decoding_over_a_graph_equals_one_fresh_prefix_per_token(
    tiny_model: Callable[..., OnnxModel], contract: str, kind: str
) -> None:
    model = tiny_model(contract=contract)
    config = DecodeConfig(max_tokens=20, sampling=SAMPLING[kind])
    plain = run(model, config)

    def row_of(tokens: list[int]) -> FloatArray:
        model.rollback(0)
        return model.forward(tokens)[-1].copy()

    # Wide passes round differently in the last bits, so these are ids only.
    assert list(plain.tokens) == written_out(row_of, model.vocab_size, config)


@pytest.mark.parametrize("kind", ["greedy", "greedy with penalties", "top-p", "everything"])
@pytest.mark.parametrize("name", TREE_PROPOSERS)
def test_trees_over_an_fp32_graph_give_the_token_ids_of_plain_decoding(
    tiny_model: Callable[..., OnnxModel], name: str, kind: str
) -> None:
    model = tiny_model(contract="own")
    accepted = 0
    for seed in range(4):
        config = DecodeConfig(max_tokens=30, sampling=replace(SAMPLING[kind], seed=seed))
        plain = run(model, config)
        known = KnownText((*PROMPT, *plain.tokens), model.vocab_size, seed=seed)
        output = run(model, config, TREE_PROPOSERS[name](known))
        assert output.tokens == plain.tokens
        np.testing.assert_allclose(output.rows, plain.rows, atol=1e-4)
        accepted += output.accepted
    assert accepted > 30 or name != "random tree"


def test_a_tree_for_a_model_of_chains_only_still_gives_plain_output(
    tiny_model: Callable[..., OnnxModel],
) -> None:
    for contract in ("genai", "concat"):
        model = tiny_model(contract=contract)
        config = DecodeConfig(max_tokens=30)
        plain = run(model, config)
        known = KnownText((*PROMPT, *plain.tokens), model.vocab_size)
        for seed in range(3):
            tree = RandomTreeProposer(known.truth, known.vocab_size, seed)
            output = run(model, config, tree)
            assert output.tokens == plain.tokens
            assert np.array_equal(output.rows, plain.rows)
            assert output.accepted > 0


@pytest.mark.parametrize("contract", ["table", *CONTRACTS])
def test_a_proposer_that_knows_the_truth_has_everything_accepted(
    tiny_model: Callable[..., OnnxModel], contract: str
) -> None:
    def fresh() -> LanguageModel:
        if contract == "table":
            return TableModel(random_table(VOCAB, 0))
        return tiny_model(contract=contract)

    config = DecodeConfig(max_tokens=48, max_draft_tokens=5)
    plain = run(fresh(), config)
    oracle = OracleProposer((*PROMPT, *plain.tokens), 23)
    output = run(fresh(), config, oracle)
    assert output.tokens == plain.tokens
    assert output.rounds == 8  # five accepted and a bonus each
    assert output.accepted == 40


def test_a_proposer_that_is_always_wrong_costs_rounds_but_no_token() -> None:
    table = random_table(VOCAB, 4)
    config = DecodeConfig(max_tokens=20)
    plain = run(TableModel(table), config)
    bad = OracleProposer((*PROMPT, *plain.tokens), VOCAB, mistakes=1.0)
    output = run(TableModel(table), config, bad)
    assert (output.tokens, output.rounds, output.accepted) == (plain.tokens, 20, 0)


@pytest.mark.parametrize("name", ALL_PROPOSERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 16, 17])
def test_the_token_limit_is_met_exactly(name: str, max_tokens: int) -> None:
    table = random_table(VOCAB, 1)
    long = run(TableModel(table), DecodeConfig(max_tokens=60))
    known = KnownText((*PROMPT, *long.tokens), VOCAB)
    for max_draft_tokens in (1, 3, 15, 100):
        config = DecodeConfig(max_tokens=max_tokens, max_draft_tokens=max_draft_tokens)
        output = run(TableModel(table), config, ALL_PROPOSERS[name](known))
        assert output.tokens == long.tokens[:max_tokens]
        assert output.finish == "length"


@pytest.mark.parametrize("name", ALL_PROPOSERS)
def test_a_budget_of_zero_is_plain_decoding(name: str) -> None:
    table = random_table(VOCAB, 1)
    plain = run(TableModel(table), DecodeConfig(max_tokens=20))
    model = TableModel(table)
    known = KnownText((*PROMPT, *plain.tokens), VOCAB)
    config = DecodeConfig(max_tokens=20, max_draft_tokens=0)
    assert run(model, config, ALL_PROPOSERS[name](known)).tokens == plain.tokens
    assert set(model.passes) == {1}


@pytest.mark.parametrize("name", ALL_PROPOSERS)
def test_generation_ends_at_the_first_end_token_inside_an_accepted_run(name: str) -> None:
    table = random_table(VOCAB, 2)
    long = run(TableModel(table), DecodeConfig(max_tokens=60))
    for at in (0, 1, 4, 11):
        end = long.tokens[at]
        first = long.tokens.index(end)
        model = TableModel(table)
        known = KnownText((*PROMPT, *long.tokens), VOCAB, eos=(end,))
        decoder = SpeculativeDecoder(model, ALL_PROPOSERS[name](known), eos_token_ids=[end, 21])
        output = run(model, DecodeConfig(max_tokens=60), decoder=decoder)
        cut = min(first, long.tokens.index(21) if 21 in long.tokens else first)
        assert output.tokens == long.tokens[: cut + 1]
        assert output.finish == "stop"
        assert len(output.rows) == cut + 1
        assert model.cache == [*PROMPT, *output.tokens[:-1]]


@pytest.mark.parametrize("name", ALL_PROPOSERS)
def test_end_tokens_may_be_ignored_or_absent(name: str) -> None:
    table = random_table(VOCAB, 2)
    long = run(TableModel(table), DecodeConfig(max_tokens=30))
    known = KnownText((*PROMPT, *long.tokens), VOCAB, eos=long.tokens[2:4])
    for config, eos in ((DecodeConfig(30, ignore_eos=True), known.eos), (DecodeConfig(30), ())):
        output = run(TableModel(table), config, ALL_PROPOSERS[name](known), eos=eos)
        assert (output.tokens, output.finish) == (long.tokens, "length")


@pytest.mark.parametrize("name", ALL_PROPOSERS)
def test_generation_ends_where_the_caller_says_and_sees_each_token_once(name: str) -> None:
    table = random_table(VOCAB, 3)
    long = run(TableModel(table), DecodeConfig(max_tokens=60))
    for at in (0, 1, 5, 17, 18):
        seen: list[int] = []

        def is_last(token: int, seen: list[int] = seen, at: int = at) -> bool:
            seen.append(token)
            return len(seen) == at + 1

        model = TableModel(table)
        known = KnownText((*PROMPT, *long.tokens), VOCAB)
        output = run(
            model, DecodeConfig(max_tokens=60), ALL_PROPOSERS[name](known), is_last=is_last
        )
        assert tuple(seen) == output.tokens == long.tokens[: at + 1]
        assert output.finish == "stop"
        assert model.cache == [*PROMPT, *output.tokens[:-1]]


@pytest.mark.parametrize("name", ALL_PROPOSERS)
@pytest.mark.parametrize("room", [0, 1, 2, 3, 9, 20])
def test_a_full_context_ends_generation_where_it_ends_plain_decoding(name: str, room: int) -> None:
    table = random_table(VOCAB, 5)
    config = DecodeConfig(max_tokens=100)
    context = len(PROMPT) + room
    plain = run(TableModel(table, context_length=context), config)
    # The last token needs no slot of its own.
    assert len(plain.tokens) == room + 1
    assert plain.finish == "context"
    long = run(TableModel(table), config)
    known = KnownText((*PROMPT, *long.tokens), VOCAB)
    output = run(TableModel(table, context_length=context), config, ALL_PROPOSERS[name](known))
    assert (output.tokens, output.finish) == (plain.tokens, "context")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_graph_uses_its_context_to_the_last_slot_and_no_further(
    tiny_model: Callable[..., OnnxModel], contract: str
) -> None:
    # 30 slots: fewer than a block, and as many as the rotary table has rows.
    wishes: dict[str, Any] = {"contract": contract, "context_length": 30, "max_positions": 30}
    config = DecodeConfig(max_tokens=100)
    long = run(tiny_model(contract=contract, max_positions=1024), config)
    plain = run(tiny_model(**wishes), config)
    assert (len(plain.tokens), plain.finish) == (30 - len(PROMPT), "context")
    if contract != "concat":  # its position table depends on max_positions
        assert plain.tokens == long.tokens[: len(plain.tokens)]
    known = KnownText((*PROMPT, *plain.tokens, *long.tokens), TINY_VOCAB_SIZE)
    for name, make in CHAIN_PROPOSERS.items():
        output = run(tiny_model(**wishes), config, make(known))
        assert (output.tokens, output.finish) == (plain.tokens, "context"), name
        assert np.array_equal(output.rows, plain.rows), name


def test_a_model_of_single_rows_is_never_given_a_proposal() -> None:
    table = random_table(VOCAB, 5)
    model = TableModel(table, max_rows=1)
    proposer = OracleProposer(PROMPT, VOCAB)
    output = run(model, DecodeConfig(max_tokens=9), proposer)
    assert set(model.passes) == {1}
    assert proposer.asked == []
    assert output.tokens == run(TableModel(table), DecodeConfig(max_tokens=9)).tokens


def test_a_proposer_is_asked_for_no_more_than_fits() -> None:
    table = random_table(VOCAB, 5)
    model = TableModel(table, context_length=24, max_rows=6)
    proposer = OracleProposer(PROMPT, VOCAB, mistakes=1.0)
    run(model, DecodeConfig(max_tokens=40, max_draft_tokens=9), proposer)
    run(model, DecodeConfig(max_tokens=8, max_draft_tokens=9), proposer)
    starts = [i for i, (committed, _) in enumerate(proposer.asked) if committed == len(PROMPT)]
    assert len(starts) == 2
    for i, (committed, budget) in enumerate(proposer.asked):
        assert 1 <= budget <= min(9, 5, 24 - committed)
        if i >= starts[1]:  # a draft longer than what may be emitted is work for nothing
            assert budget <= len(PROMPT) + 8 - committed - 1


def test_adversarial_proposals_never_reach_the_model_wider_than_the_budget() -> None:
    model = TableModel(random_table(VOCAB, 5))
    adversary = AdversarialProposer(VOCAB, seed=1)
    run(model, DecodeConfig(max_tokens=50, max_draft_tokens=4), adversary)
    assert max(model.passes) == 5


def test_the_seed_alone_decides_a_sampled_text() -> None:
    table = random_table(VOCAB, 6)

    def text(seed: int, proposer: Proposer | None = None) -> tuple[int, ...]:
        sampling = SamplingConfig(temperature=1.0, seed=seed)
        return run(TableModel(table), DecodeConfig(30, sampling=sampling), proposer).tokens

    texts = {text(seed) for seed in range(10)}
    assert len(texts) == 10
    assert text(4) == text(4, OracleProposer((*PROMPT, *text(9)), VOCAB))
