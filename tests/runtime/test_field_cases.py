"""Faults that people reported against other runtimes, tried on ours.

The numbers are those of the project's list of field cases. Cases 1 to 6 and 8 are in
test_drafting.py, since they need a drafter with a tokenizer of its own; 18 to 20 need adapters and
come with those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgedraft.runtime import (
    DecodeConfig,
    Engine,
    FolderError,
    OnnxModel,
    SamplingConfig,
    SessionConfig,
    SpeculativeDecoder,
    SuffixLookup,
)
from fakes import PROMPT, OracleProposer, TableModel, random_table, run
from graphs import (
    byte_level_tokenizer,
    decoder_graph,
    sentencepiece_tokenizer,
    tiny_target,
    write_target_folder,
)

ONE_THREAD = SessionConfig(threads=1)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Engine, Engine]]:
    """Return engines with and without drafting, for three kinds of tokenizer."""
    made = {}
    for name, tokenizer in (
        ("byte-level", byte_level_tokenizer()),
        ("sentencepiece", sentencepiece_tokenizer()),
        ("llama-2", sentencepiece_tokenizer(llama2_decoder=True)),
    ):
        folder = write_target_folder(
            tmp_path_factory.mktemp("field") / "t",
            tokenizer=tokenizer,
            chat_template=None,
            graph=decoder_graph(vocab_size=tokenizer.get_vocab_size()),
        )
        made[name] = (
            Engine.open(folder, session=ONE_THREAD, state_dir=folder / "state"),
            Engine.open(folder, drafters=["none"], session=ONE_THREAD),
        )
    return made


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "llama-2"])
def test_streamed_chunks_are_the_full_text_with_its_spaces(
    engines: dict[str, tuple[Engine, Engine]], name: str
) -> None:
    """Case 7: SentencePiece tokens decoded one by one lose their leading spaces."""
    engine, _ = engines[name]
    for seed in range(8):
        sampling = SamplingConfig(temperature=2.0, seed=seed)
        config = DecodeConfig(max_tokens=60, ignore_eos=True, sampling=sampling)
        pieces = list(engine.stream("it 's a test", config))
        ids = [t for p in pieces if p.trace for t in p.trace.emitted]
        text = "".join(p.text for p in pieces)
        whole = engine.tokenizer.decode(ids)
        if name == "byte-level" or "\ufffd" not in whole:
            assert text == whole
        assert not any(p.text.endswith("\ufffd") for p in pieces[:-9] if "\ufffd" not in whole)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "llama-2"])
@pytest.mark.parametrize(
    "prompt", ["ends with a space ", "and a newline\n", "see http:", "hal", " ", "\n\n", "é", "x"]
)
def test_awkward_prompt_endings_give_the_plain_output(
    engines: dict[str, tuple[Engine, Engine]], name: str, prompt: str
) -> None:
    """Case 9: a prompt that ends with a space, newline, `http:` or half a word; no BOS."""
    engine, plain = engines[name]
    config = DecodeConfig(max_tokens=40, ignore_eos=True)
    a, b = engine.generate(prompt, config), plain.generate(prompt, config)
    assert (a.token_ids, a.text) == (b.token_ids, b.text)


def test_nothing_follows_an_end_token_that_was_accepted_inside_a_run() -> None:
    """Case 10: EOS accepted in the middle of a block."""
    table = random_table(23, 8)
    long = run(TableModel(table), DecodeConfig(max_tokens=40))
    end = long.tokens[6]
    first = long.tokens.index(end)
    model, lookup = TableModel(table), SuffixLookup()

    class Both(OracleProposer):
        def propose(self, committed, budget):  # type: ignore[no-untyped-def]
            lookup.propose(committed, budget)
            return super().propose(committed, budget)

    proposer = Both((*PROMPT, *long.tokens), 23)
    decoder = SpeculativeDecoder(model, proposer, eos_token_ids=[end])
    output = run(model, DecodeConfig(max_tokens=40), decoder=decoder)
    assert output.tokens == long.tokens[: first + 1]
    assert output.finish == "stop"
    assert output.rounds == 1 and output.accepted > first - 1
    # What was accepted behind the end is in no cache and taught to no one.
    assert model.cache == [*PROMPT, *output.tokens[:-1]]
    list(decoder.rounds([*PROMPT, *output.tokens, 4], DecodeConfig(max_tokens=2)))
    known = lookup._automaton.tokens
    assert known[: len(PROMPT) + first + 2] == [*PROMPT, *output.tokens, 4]


@pytest.mark.parametrize(("max_tokens", "drafted"), [(2, 3), (128, 3), (128, 7), (1, 15)])
def test_the_number_of_tokens_asked_for_is_the_number_given(max_tokens: int, drafted: int) -> None:
    """Case 11: rejected drafts do not count."""
    table = random_table(23, 8)
    truth = (*PROMPT, *run(TableModel(table), DecodeConfig(max_tokens=200)).tokens)
    for mistakes in (0.0, 0.5, 1.0):
        config = DecodeConfig(max_tokens=max_tokens, max_draft_tokens=drafted)
        proposer = OracleProposer(truth, 23, mistakes=mistakes)
        output = run(TableModel(table), config, proposer)
        assert len(output.tokens) == max_tokens


@pytest.mark.parametrize("contract", ["own", "genai", "concat"])
@pytest.mark.parametrize("left", [1, 2, 3, 4, 5])
def test_drafts_shrink_where_the_context_ends(
    tiny_model: Callable[..., OnnxModel], contract: str, left: int
) -> None:
    """Case 12, the target's part: fewer than K+1 slots left."""
    context = 64
    prompt = [int(t) for t in np.random.default_rng(left).integers(290, size=context - left)]
    config = DecodeConfig(max_tokens=50, max_draft_tokens=4)
    plain = run(tiny_model(contract=contract, context_length=context), config, prompt=prompt)
    model = tiny_model(contract=contract, context_length=context)
    oracle = OracleProposer((*prompt, *plain.tokens), 290)
    output = run(model, config, oracle, prompt)
    assert (output.tokens, output.finish) == (plain.tokens, "context")
    assert len(output.tokens) == left
    assert np.array_equal(output.rows, plain.rows)
    assert all(committed + budget <= context - 1 for committed, budget in oracle.asked)


def test_a_recurrent_state_is_refused_when_the_folder_is_opened(tmp_path: Path) -> None:
    """Case 13: a state that cannot be rewound, never silent corruption."""
    for contract in ("own", "genai", "concat"):
        folder = tiny_target(tmp_path / contract, contract=contract, recurrent_state=True)
        with pytest.raises(FolderError, match="'past_conv.0'.*cannot be rolled back"):
            Engine.open(folder, session=ONE_THREAD)


@pytest.mark.parametrize("start", [30, 31, 32, 62, 63, 64, 126, 127, 128, 254, 255, 256])
def test_positions_stay_consecutive_around_powers_of_two(start: int) -> None:
    """Case 14: a hole in the cache's positions after a dropped round."""
    table = random_table(23, 8)
    prompt = [i % 23 for i in range(start)]
    config = DecodeConfig(max_tokens=12)
    plain = run(TableModel(table), config, prompt=prompt)
    model = TableModel(table)
    truth = (*prompt, *plain.tokens)
    decoder = SpeculativeDecoder(model, OracleProposer(truth, 23, mistakes=0.5, seed=start))
    given_up = decoder.rounds(prompt, config)
    next(given_up)
    given_up.close()
    for trace in decoder.rounds(prompt, config):
        assert model.cache == list(truth[: len(model.cache)])
        assert len(model.cache) >= start
        assert trace.emitted
    assert model.cache == list(truth[:-1])


def test_a_toy_target_is_sampled_from_its_exact_distribution_with_lookup() -> None:
    """Case 15, the sampling part: chi-square of the token pairs over three tokens."""
    table = np.array([[0.2, 1.0, -0.5], [0.8, 0.1, 0.3], [-1.0, 0.6, 0.9]], np.float32)
    for temperature in (0.3, 1.0, 2.0):
        pairs: Counter[tuple[int, int]] = Counter()
        decoder = SpeculativeDecoder(TableModel(table, memory=0), SuffixLookup())
        accepted = 0
        for seed in range(9):
            sampling = SamplingConfig(temperature=temperature, seed=seed)
            tokens = [seed % 3]
            for trace in decoder.rounds(tokens, DecodeConfig(max_tokens=390, sampling=sampling)):
                tokens += trace.emitted
                accepted += trace.verdict.num_accepted
            pairs.update(zip(tokens, tokens[1:], strict=False))
        assert accepted > 500  # copies are right by chance here, and must not bend the law
        chi_square = 0.0
        for last in range(3):
            law = np.exp(table[last].astype(float) / temperature)
            law /= law.sum()
            total = sum(pairs[last, token] for token in range(3))
            chi_square += sum(
                (pairs[last, token] - total * law[token]) ** 2 / (total * law[token])
                for token in range(3)
            )
        assert chi_square < 32  # six degrees of freedom: 1e-5


def test_the_same_seed_gives_the_same_text_with_and_without_lookup() -> None:
    """Case 15: same seed, same text."""
    table = random_table(30, 2)
    for seed in range(6):
        sampling = SamplingConfig(temperature=1.0, top_k=20, top_p=0.95, min_p=0.02, seed=seed)
        config = DecodeConfig(max_tokens=60, sampling=sampling)
        plain = run(TableModel(table), config)
        assert run(TableModel(table), config, SuffixLookup()).tokens == plain.tokens


@pytest.mark.parametrize("contract", ["own", "genai", "concat"])
def test_near_ties_are_decided_the_same_way_in_every_row_count(
    tiny_model: Callable[..., OnnxModel], contract: str
) -> None:
    """Case 16, as a probe of bits: near-tie logits in passes of one to sixteen rows."""
    model = tiny_model(contract=contract, near_ties=True)
    config = DecodeConfig(max_tokens=60)
    plain = run(model, config)
    best = np.sort(plain.rows, axis=1)[:, -2:]
    ulps = (best[:, 1] - best[:, 0]) / np.spacing(np.abs(best).max(axis=1))
    assert np.median(ulps) < 16
    for mistakes in (0.0, 0.2, 0.6):
        oracle = OracleProposer((*PROMPT, *plain.tokens), 290, mistakes=mistakes, seed=1)
        output = run(model, config, oracle)
        assert output.tokens == plain.tokens
        assert np.array_equal(output.rows, plain.rows)


def test_without_an_end_token_a_looping_text_runs_to_the_cap(tmp_path: Path) -> None:
    """Case 17: `eos_token_id=None` and a repeated n-gram."""
    table = np.full((4, 4), -9, np.float32)
    for token in range(4):
        table[token, (token + 1) % 4] = 9
    model = TableModel(table, memory=0)
    output = run(model, DecodeConfig(max_tokens=300), SuffixLookup(), prompt=[0, 1])
    assert output.tokens == tuple((2 + i) % 4 for i in range(300))
    assert output.finish == "length"
    assert output.rounds < 40
    folder = tiny_target(tmp_path / "t")
    manifest = folder / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"eos_token_ids": [\n  289\n ]', '"eos_token_ids": []')
    )
    engine = Engine.open(folder, session=ONE_THREAD)
    assert engine.target.folder.eos_token_ids == ()
    answer = engine.generate("the", DecodeConfig(max_tokens=50))
    assert (len(answer.token_ids), answer.finish_reason) == (50, "length")
