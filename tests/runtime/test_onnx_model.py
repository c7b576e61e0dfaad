"""A graph and its cache: rows keep their bits, rollback leaves no trace, room grows in time."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, OnnxModel, SpeculativeDecoder, SuffixLookup
from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.onnx_model import VERIFY_ROWS
from fakes import OracleProposer, RandomTreeProposer, run
from graphs import TINY_VOCAB_SIZE

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

CONTRACTS = ("own", "genai", "concat")
IN_PLACE = ("own", "genai")
VOCAB = TINY_VOCAB_SIZE
TOKENS = np.random.default_rng(0).integers(VOCAB, size=2000).tolist()

Make = Callable[..., OnnxModel]


def filled(model: OnnxModel, length: int) -> OnnxModel:
    """Return the model with the first `length` of `TOKENS` in its cache."""
    model.rollback(0)
    model.extend(TOKENS[:length])
    return model


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "wishes",
    [
        {"contract": "own"},
        {"contract": "genai"},
        {"contract": "concat"},
        {"contract": "own", "logit_rows": False},
        {"contract": "own", "lone_logits_differ": True},
        {"contract": "own", "attention_bias": False},
        {"contract": "own", "cache_dtype": "float16"},
        {"contract": "own", "heads": 9, "kv_heads": 3, "seed": 1},
        {"contract": "genai", "position_ids": False},
        {"contract": "own", "heads": 2, "kv_heads": 1, "head_dim": 256},
        {"contract": "genai", "heads": 2, "kv_heads": 1, "head_dim": 256},
    ],
    ids=lambda w: " ".join(map(str, w.values())),
)
def test_a_row_is_the_same_bit_for_bit_for_every_row_count_and_whatever_follows_it(
    tiny_model: Make, wishes: dict[str, Any], threads: int
) -> None:
    model = tiny_model(threads=threads, context_length=900, **wishes)
    rng = np.random.default_rng(1)
    for length in (1, 2, 15, 16, 17, 31, 60, 63, 64, 127, 184, 255, 256, 300, 311, 511, 700):
        filled(model, length)
        truth = TOKENS[length : length + VERIFY_ROWS]
        expected = [model.forward(truth[:2])[0].copy()]
        for i in range(1, VERIFY_ROWS):  # plain decoding: a token and its dummy companion
            model.rollback(length + i)
            expected.append(model.forward([truth[i]])[0].copy())
        model.rollback(length)
        for rows in range(2, model.max_rows + 1):
            right = int(rng.integers(1, rows + 1))
            wrong = rng.integers(VOCAB, size=rows - right).tolist()
            model.rollback(length)
            logits = model.forward([*truth[:right], *wrong])
            for i in range(right):
                assert np.array_equal(logits[i], expected[i]), (length, rows, i)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_single_row_may_run_alone_where_a_benchmark_asks_for_it(
    tiny_model: Make, contract: str
) -> None:
    model = filled(tiny_model(contract=contract), 20)
    pair = model.forward([TOKENS[20]])[0].copy()
    model.rollback(20)
    model.single_rows = True
    alone = model.forward([TOKENS[20]])
    assert alone.shape == (1, VOCAB)
    np.testing.assert_allclose(alone[0], pair, atol=1e-4)
    assert model.length == 21


@settings(max_examples=40)
@given(
    contract=st.sampled_from(CONTRACTS),
    steps=st.lists(st.tuples(st.integers(1, 16), st.floats(0, 1)), min_size=1, max_size=12),
    prompt=st.integers(0, 40),
)
def test_rolling_back_and_going_on_equals_a_fresh_run(
    tiny_model: Make, contract: str, steps: list[tuple[int, float]], prompt: int
) -> None:
    model = _cached_model(tiny_model, contract)
    filled(model, prompt)
    tokens = TOKENS[:prompt]
    rng = np.random.default_rng(prompt)
    for rows, kept in steps:
        new = rng.integers(VOCAB, size=rows).tolist()
        model.forward(new)
        keep = int(kept * rows)
        model.rollback(len(tokens) + keep)
        model.rollback(len(tokens) + keep)  # twice is harmless
        tokens = [*tokens, *new[:keep]]
        assert model.length == len(tokens)
    logits = model.forward([3, 4]).copy()
    model.rollback(0)
    model.extend(tokens)
    np.testing.assert_array_equal(model.forward([3, 4]), logits)


_MODELS: dict[str, OnnxModel] = {}


def _cached_model(make: Make, contract: str) -> OnnxModel:
    if contract not in _MODELS:
        _MODELS[contract] = make(contract=contract)
    return _MODELS[contract]


@st.composite
def trees(draw: Any) -> tuple[list[int], list[int]]:
    """Return tokens and parents of 2 to 16 rows of which row 0 is the pending token."""
    count = draw(st.integers(2, 16))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, count))]
    return draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)), parents


@settings(max_examples=60)
@given(tree=trees(), prompt=st.integers(0, 50), data=st.data())
def test_every_path_of_a_tree_has_the_logits_of_a_chain_and_can_be_kept(
    tiny_model: Make, tree: tuple[list[int], list[int]], prompt: int, data: Any
) -> None:
    tokens, parents = tree
    model = filled(_cached_model(tiny_model, "own"), prompt)
    logits = model.forward(tokens, parents).copy()
    row = data.draw(st.integers(0, len(tokens) - 1))
    path: list[int] = []
    while row != -1:
        path.insert(0, row)
        row = parents[row]
    model.keep(prompt, path)
    assert model.length == prompt + len(path)
    after = model.forward([7, 8]).copy()

    filled(model, prompt)
    chain = model.forward([tokens[r] for r in path]).copy()
    np.testing.assert_allclose(logits[path], chain, atol=2e-4)
    np.testing.assert_allclose(after, model.forward([7, 8]), atol=2e-4)


def test_a_tree_sees_its_ancestors_only(tiny_model: Make) -> None:
    model = filled(tiny_model(contract="own"), 9)
    parents = [-1, 0, 0, 1, 2]
    first = model.forward([1, 2, 3, 4, 5], parents).copy()
    model.rollback(9)
    second = model.forward([1, 2, 99, 4, 5], parents).copy()
    same = [np.allclose(a, b, atol=1e-5) for a, b in zip(first, second, strict=True)]
    assert same == [True, True, False, True, False]


def test_a_tree_may_begin_a_sequence(tiny_model: Make) -> None:
    """GroupQueryAttention ignores position ids there, so the root has to go first."""
    model = tiny_model()
    with pytest.raises(ValueError, match="must have a single root"):
        model.forward([1, 2, 3], [-1, 0, -1])
    config = DecodeConfig(max_tokens=20)
    model.rollback(0)
    plain = run(model, config, prompt=[9])
    for seed in range(4):
        tree = RandomTreeProposer((9, *plain.tokens), VOCAB, seed)
        assert run(tiny_model(), config, tree, prompt=[9]).tokens == plain.tokens


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [-1, 2], [-2, 0]])
def test_parents_that_are_no_tree_are_refused(tiny_model: Make, parents: list[int]) -> None:
    with pytest.raises(ValueError, match="must come before it"):
        filled(tiny_model(contract="own"), 5).forward([1, 2], parents)


@pytest.mark.parametrize(
    "wishes", [{"contract": "genai"}, {"contract": "concat"}, {"attention_bias": False}]
)
def test_a_graph_without_a_bias_refuses_a_tree(tiny_model: Make, wishes: dict[str, Any]) -> None:
    model = filled(tiny_model(**wishes), 5)
    assert not model.supports_trees
    with pytest.raises(ValueError, match="chains only"):
        model.forward([1, 2, 3], [-1, 0, 0])


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("start", [230, 254, 255, 256, 257, 500])
def test_growing_the_cache_in_the_middle_of_an_answer_changes_nothing(
    tiny_model: Make, contract: str, start: int
) -> None:
    prompt = TOKENS[:start]
    config = DecodeConfig(max_tokens=40)
    model = tiny_model(contract=contract, context_length=600)
    plain = run(model, config, prompt=prompt)
    # A cache that had room from the start: blocks play no role here.
    roomy = tiny_model(contract=contract, context_length=900)
    filled(roomy, 850)
    roomy.rollback(0)
    expected = run(roomy, config, prompt=prompt)
    assert plain.tokens == expected.tokens
    assert np.array_equal(plain.rows, expected.rows)
    oracle = OracleProposer((*prompt, *plain.tokens), VOCAB, mistakes=0.2)
    output = run(tiny_model(contract=contract, context_length=600), config, oracle, prompt)
    assert np.array_equal(output.rows, plain.rows)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_context_can_be_filled_to_the_last_slot(tiny_model: Make, contract: str) -> None:
    model = tiny_model(contract=contract, context_length=300, max_positions=300)
    assert model.context_length == 299  # the companion of a lone token has the last slot
    filled(model, 298)
    last = model.forward([5]).copy()
    assert model.length == 299
    with pytest.raises(ValueError, match="300 tokens do not fit into a context of 299"):
        model.forward([5])
    assert model.length == 299
    model.rollback(290)
    model.forward([*TOKENS[290:298], 5])
    model.rollback(298)
    np.testing.assert_array_equal(model.forward([5]), last)


def test_rollback_refuses_a_length_that_the_cache_does_not_have(tiny_model: Make) -> None:
    model = filled(tiny_model(), 10)
    for length in (-1, 11):
        with pytest.raises(ValueError, match=r"length must be in \[0, 10\]"):
            model.rollback(length)


def test_padded_logit_columns_are_never_returned(tiny_model: Make) -> None:
    padded, bare = tiny_model(padded_columns=31), tiny_model()
    assert padded.vocab_size == VOCAB
    config = DecodeConfig(max_tokens=20)
    assert run(padded, config).tokens == run(bare, config).tokens
    assert run(padded, config, SuffixLookup()).rows.shape == (20, VOCAB)


@pytest.mark.parametrize("contract", IN_PLACE)
def test_a_graph_of_last_rows_only_decodes_plainly(tiny_model: Make, contract: str) -> None:
    wishes: dict[str, Any] = {"contract": contract, "logit_rows": False}
    model = tiny_model(last_row_only=True, **wishes)
    assert model.max_rows == 1
    assert model.single_rows
    whole = tiny_model(**wishes)
    whole.single_rows = True
    config = DecodeConfig(max_tokens=20)
    assert run(model, config, SuffixLookup()).tokens == run(whole, config).tokens


def test_a_half_precision_cache_keeps_its_type(tiny_model: Make) -> None:
    half = tiny_model(cache_dtype="float16")
    full = tiny_model()
    assert {array.dtype for array in half._runner.arrays} == {np.dtype(np.float16)}
    np.testing.assert_allclose(half.forward(TOKENS[:8]), full.forward(TOKENS[:8]), atol=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")
def test_the_cache_takes_memory_only_where_it_is_written(tiny_model: Make) -> None:
    wishes: dict[str, Any] = {"heads": 8, "kv_heads": 8, "head_dim": 64}
    small = filled(tiny_model(context_length=64, **wishes), 40)
    before = resident_bytes()
    large = filled(tiny_model(context_length=8192, **wishes), 40)  # 67 MB, were it all in use
    assert resident_bytes() - before < 45e6, "a session's own memory, and little else"
    np.testing.assert_array_equal(large.forward([1, 2]), small.forward([1, 2]))


@pytest.mark.parametrize("contract", IN_PLACE)
def test_a_text_longer_than_the_reserved_cache_keeps_its_bits(
    tiny_model: Make, contract: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ample = tiny_model(contract=contract, context_length=900)
    monkeypatch.setattr("edgedraft.runtime.in_place_runner._RESERVED", 64)
    growing = tiny_model(contract=contract, context_length=900)
    for start in range(0, 300, 20):
        piece = TOKENS[start : start + 20]
        np.testing.assert_array_equal(growing.forward(piece), ample.forward(piece))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize(
    "wishes",
    [
        {"contract": "own"},
        {"contract": "own", "heads": 3, "kv_heads": 1, "head_dim": 64},
        {"contract": "genai"},
        {"contract": "concat"},
    ],
    ids=lambda w: " ".join(map(str, w.values())),
)
def test_the_bits_of_a_prompt_do_not_depend_on_the_pieces_it_was_computed_in(
    tiny_model: Make, wishes: dict[str, Any]
) -> None:
    """So an answer does not depend on what an earlier request left in the cache."""
    model = tiny_model(context_length=900, **wishes)
    rng = np.random.default_rng(2)
    # The attention kernel works on tiles: one token more than a whole tile is the odd case.
    for length in (33, 49, 65, 97, 129, 161, 257, 300, 385, 513):
        rows: list[FloatArray] = []
        for longest in (128, 128, 16, 2, None):
            model.rollback(0)
            while (at := model.length) < length:
                step = longest or int(rng.integers(1, 128))
                model.extend(TOKENS[at : min(at + step, length)])
            rows.append(model.forward([1, 2]).copy())
        for other in rows[1:]:
            np.testing.assert_array_equal(other, rows[0])


def test_outputs_are_valid_until_the_next_pass_and_no_longer_than_promised(
    tiny_model: Make,
) -> None:
    model = filled(tiny_model(), 10)
    decoder = SpeculativeDecoder(model)
    for trace in decoder.rounds(TOKENS[:10], DecodeConfig(max_tokens=5)):
        (token,) = trace.emitted
        assert token == int(trace.logits[0].argmax())
