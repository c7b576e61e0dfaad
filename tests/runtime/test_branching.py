"""Beside a draft's tokens lie the next likely ones; what the target says stays what it is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, SamplingConfig, SpeculativeDecoder
from edgedraft.runtime.branching import branched
from edgedraft.runtime.datatypes import ROOT, Draft, Proposal
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.policy import reached
from edgedraft.runtime.translate import Translator
from fakes import TableModel, random_table, run
from toy_vocabularies import byte_level, pair

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

DRAFT, TARGET = 270, 380
PROMPT = tuple(byte_level(TARGET).encode("The quick brown fox", add_special_tokens=False).ids)
SHARED = [x for x in range(2, DRAFT) if pair().finished(pair().step(0, x)) >= 0]


def chain(pieces: list[int], rivals: list[tuple[int, float]], sure: float = 0.6) -> Proposal:
    draft = Draft(tuple(pieces), (sure,) * len(pieces), None, tuple(rivals))
    return Translator(pair()).translate(draft, 15)


def target_token(piece: int) -> int:
    return pair().finished(pair().step(0, piece))


def test_a_rival_stands_beside_the_token_that_it_might_have_been() -> None:
    a, b, c, d = SHARED[:4]
    plain = chain([a, b], [(c, 0.3), (d, 0.1)])
    assert len(plain.tokens) == 2
    tree = branched(plain, pair(), 15)
    assert sorted(tree.tokens) == sorted(map(target_token, (a, b, c, d)))
    assert tree.tokens[:2] == (target_token(a), target_token(b))  # 0.6 and 0.36, then 0.3
    assert tree.parents == (-1, 0, -1, 0)
    assert tree.confidence == pytest.approx((0.6, 0.6, 0.3, 0.1))
    assert tree.first_path().tokens == plain.tokens


def test_a_rival_that_is_no_whole_token_of_the_target_is_left_out() -> None:
    """Neither one that begins none nor one that only begins some."""
    vocab_map = pair(380, 270)
    nodes = [vocab_map.step(0, piece) for piece in range(380)]
    whole = next(x for x in range(2, 380) if nodes[x] >= 0 and vocab_map.finished(nodes[x]) >= 0)
    others = [x for x, at in enumerate(nodes) if at < 0 or vocab_map.finished(at) < 0]
    assert any(nodes[x] < 0 for x in others)
    for rival in others:
        draft = Draft((whole,), (0.6,), None, ((rival, 0.3),))
        plain = Translator(vocab_map).translate(draft, 15)
        assert branched(plain, vocab_map, 15).tokens == plain.tokens


def test_without_rivals_a_chain_stays_as_it_is() -> None:
    plain = chain(SHARED[:3], [])
    assert branched(plain, pair(), 15) is plain


@given(
    st.lists(st.sampled_from(range(2, DRAFT)), min_size=1, max_size=10),
    st.integers(1, 15),
    st.randoms(use_true_random=False),
)
def test_it_is_a_tree_with_the_likeliest_nodes_first(
    pieces: list[int], budget: int, random: object
) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    rivals = [(int(rng.integers(2, DRAFT)), float(0.4 * rng.random())) for _ in pieces]
    plain = chain(pieces, rivals)
    tree = branched(plain, pair(), budget)
    assert len(tree.tokens) <= budget
    assert all(-1 <= parent < i for i, parent in enumerate(tree.parents))
    assert all(b <= a + 1e-12 for a, b in pairwise(reached(tree)))
    siblings = [(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)]
    assert len(siblings) == len(set(siblings))
    whole = branched(plain, pair(), 99)
    assert whole.path(plain.tokens) and len(whole.path(plain.tokens)) == len(plain.tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("head", [None, 0.5])
def test_the_text_is_the_plain_one_and_comes_in_fewer_passes(
    temperature: float, head: float | None
) -> None:
    """The drafter thinks like the target, but for a wrong token that it likes a little better."""
    table = random_table(TARGET, 5)
    target_of = {target_token(piece): piece for piece in SHARED}
    table[:, [t for t in range(TARGET) if t not in target_of]] = -50.0
    small = np.full((DRAFT, DRAFT), -50.0, np.float32)
    for token, piece in target_of.items():
        for other, column in target_of.items():
            small[piece, column] = table[token, other]
        best = int(small[piece].argmax())
        small[piece, SHARED[(SHARED.index(best) + 1) % len(SHARED)]] = small[piece].max() + 0.1
    prompt = [target := target_token(SHARED[0]), target_token(SHARED[1]), target]
    config = DecodeConfig(
        max_tokens=60, ignore_eos=True, sampling=SamplingConfig(temperature=temperature, seed=2)
    )
    plain = run(TableModel(table, memory=0.0), config, prompt=prompt)
    passes = []
    for trees in (False, True):
        model, verifier = TableModel(small, memory=0.0, max_rows=1), TableModel(table, memory=0.0)
        model.acceptance = None if head is None else np.array([head], np.float32)
        drafter = DraftModel(model, pair(), trees=trees)
        decoder = SpeculativeDecoder(verifier, drafter)
        got = run(verifier, config, prompt=prompt, decoder=decoder)
        assert got.tokens == plain.tokens
        passes.append(len(verifier.passes))
    assert passes[1] < (0.9 if temperature else 0.6) * passes[0]


def test_what_a_head_leaves_over_is_shared_as_the_drafter_shares_it() -> None:
    row = np.full((DRAFT, DRAFT), -np.inf, np.float32)
    a, b, c = SHARED[:3]
    row[:, [a, b, c]] = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    for head, rival in ((None, 0.3), (0.8, 0.15)):
        model = TableModel(row, memory=0.0, max_rows=1)
        model.acceptance = None if head is None else np.array([head], np.float32)
        proposal = DraftModel(model, pair(), trees=True).propose(PROMPT, 15)
        first, second = proposal.children(ROOT)
        assert [proposal.tokens[x] for x in (first, second)] == [target_token(a), target_token(b)]
        stated = [proposal.confidence[x] for x in (first, second)]
        assert stated == pytest.approx([head or 0.6, rival], rel=1e-4)
