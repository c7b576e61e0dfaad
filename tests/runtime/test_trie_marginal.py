"""Sums over subtrees equal sums over a dictionary of spellings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from edgedraft.runtime.trie_marginal import DoubleArray, TrieMarginal
from edgedraft.runtime.vocab_map import PairKey, VocabMap, _trie
from sampling_laws import awkward_pair, simple_pair
from toy_vocabularies import pair

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

Spelling = tuple[int, ...]
NUM_PIECES = 5


def table_of(spellings: Mapping[int, Spelling], num_tokens: int) -> VocabMap:
    """Return a pair of which only the trie matters."""
    unused = np.zeros(1, np.int32)
    return VocabMap(
        key=PairKey("", "", None, None, ()),
        direct_token=np.zeros(NUM_PIECES, np.int32),
        usable=np.ones(NUM_PIECES, np.bool_),
        spelling_start=np.zeros(num_tokens + 1, np.uint32),
        spelling_piece=unused,
        cover_start=unused,
        cover_token=unused,
        text_start=unused,
        text_byte=np.zeros(0, np.uint8),
        **dict(
            zip(
                ("first_child", "node_piece", "node_token"),
                _trie(spellings, NUM_PIECES),
                strict=True,
            )
        ),
    )


def spelled_by(table: VocabMap) -> dict[int, Spelling]:
    """Return the spellings that the trie holds, by token."""
    return {table.finished(n): path for n, path in nodes(table) if table.finished(n) >= 0}


def nodes(table: VocabMap) -> Iterator[tuple[int, Spelling]]:
    """Yield every node of the trie with the pieces that lead to it."""
    stack: list[tuple[int, Spelling]] = [(0, ())]
    while stack:
        node, path = stack.pop()
        yield node, path
        for piece in range(table.direct_token.size):
            if (child := table.step(node, piece)) >= 0:
                stack.append((child, (*path, piece)))


def assert_sums_agree(table: VocabMap, p: DoubleArray) -> None:
    """Compare every node with what the spellings themselves say."""
    marginal = TrieMarginal(table, p.size)
    arranged = marginal.arrange(p)
    spellings = spelled_by(table)
    unspelled = set(range(p.size)) - set(spellings)
    assert sorted(marginal.tokens.tolist()) == list(range(p.size))
    for node, path in nodes(table):
        begun = {t for t, s in spellings.items() if s[: len(path)] == path}
        longer = {t for t in begun if spellings[t] != path}
        by_piece: dict[int, set[int]] = defaultdict(set)
        for token in longer:
            by_piece[spellings[token][len(path)]].add(token)
        by_piece[marginal.unspelled] = others = unspelled if node == 0 else set()
        expected = np.zeros(marginal.unspelled + 1)
        for symbol, tokens in by_piece.items():
            expected[symbol] = p[list(tokens)].sum()
            if tokens:
                behind = marginal.tokens[marginal.begun_with(node, symbol)]
                assert set(behind.tolist()) == tokens
        np.testing.assert_allclose(marginal.next_pieces(arranged, node), expected, atol=1e-15)
        assert set(marginal.tokens[marginal.begun(node)].tolist()) == begun | others
        assert set(marginal.tokens[marginal.longer(node)].tolist()) == longer | others
        if (token := table.finished(node)) >= 0:
            assert marginal.tokens[marginal.begun(node)][0] == token
        finishing = {piece for piece in by_piece if (*path, piece) in spellings.values()}
        assert set(marginal.finishing(node).tolist()) == finishing


@settings(max_examples=150)
@given(
    spellings=st.lists(
        st.lists(st.integers(0, NUM_PIECES - 1), min_size=1, max_size=5).map(tuple),
        unique=True,
        max_size=30,
    ),
    others=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_node_sums_up_the_tokens_that_begin_like_it(
    spellings: list[Spelling], others: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_tokens = max(len(spellings) + others, 1)
    tokens = rng.permutation(num_tokens)[: len(spellings)].tolist()
    table = table_of(dict(zip(tokens, spellings, strict=True)), num_tokens)
    p = rng.dirichlet([0.3] * num_tokens) * (rng.random(num_tokens) < 0.8)
    assert_sums_agree(table, p)


@pytest.mark.parametrize("table", [simple_pair(), awkward_pair(), pair()], ids=["a", "b", "c"])
def test_pairs_of_tokenizers_sum_up_alike(table: VocabMap) -> None:
    num_tokens = table.spelling_start.size - 1
    assert_sums_agree(table, np.random.default_rng(0).dirichlet([0.2] * num_tokens))


def test_a_walk_down_the_trie_comes_to_each_token_as_often_as_the_target_says_it() -> None:
    table = pair()
    p = np.random.default_rng(1).dirichlet([0.3] * (table.spelling_start.size - 1))
    marginal = TrieMarginal(table, p.size)
    arranged = marginal.arrange(p)
    for token, spelling in spelled_by(table).items():
        probability, node = 1.0, 0
        for piece in spelling:
            if table.finished(node) >= 0:  # the walk went past a complete token
                left = arranged[marginal.begun(node)]
                probability *= 1 - left[0] / left.sum()
            masses = marginal.next_pieces(arranged, node)
            probability *= masses[piece] / masses.sum()
            node = table.step(node, piece)
        left = arranged[marginal.begun(node)]
        assert probability * left[0] / left.sum() == pytest.approx(p[token], rel=1e-9)


def test_padding_of_a_logits_row_is_spelled_by_nothing() -> None:
    marginal = TrieMarginal(simple_pair(), 9)
    p = np.arange(9.0)
    masses = marginal.next_pieces(marginal.arrange(p), 0)
    assert masses.tolist() == [0 + 3 + 4 + 5, 1, 2, 6 + 7 + 8]


def test_rows_that_are_too_narrow_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size must be >= 6, got 5"):
        TrieMarginal(simple_pair(), 5)
