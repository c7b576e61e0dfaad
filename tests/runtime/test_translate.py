"""Drafts become the target tokens they spell, the longest first."""

from __future__ import annotations

import pytest

from edgedraft.runtime.datatypes import AlignedSpan, Draft
from edgedraft.runtime.translate import Translator
from toy_vocabularies import TEXT, byte_level, pair, pieces_text

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

DRAFT, TARGET = 270, 380


def spelled(text: str) -> tuple[list[int], list[int]]:
    """Return the target's tokens of a text and their spelling."""
    tokens = byte_level(TARGET).encode(text, add_special_tokens=False).ids
    return tokens, [piece for token in tokens for piece in pair().spelling(token)]


def draft(pieces: list[int], probability: float = 0.5) -> Draft:
    return Draft(tuple(pieces), (probability,) * len(pieces))


@given(st.lists(st.sampled_from(TEXT.split(" ")), min_size=1).map(" ".join))
@settings(max_examples=60, deadline=None)
def test_a_proposal_has_the_bytes_of_its_draft(text: str) -> None:
    _, pieces = spelled(text)
    proposal = Translator(pair()).translate(draft(pieces), budget=1000)
    assert pieces_text(list(proposal.tokens), TARGET) == pieces_text(pieces, DRAFT)
    assert [s.start for s in proposal.spans] == [
        sum(s.length for s in proposal.spans[:i]) for i in range(len(proposal.spans))
    ]


def test_pieces_become_the_longest_token_they_spell() -> None:
    tokens, pieces = spelled("The shells she sells")
    assert len(pieces) > len(tokens), "some token takes several pieces"
    proposal = Translator(pair()).translate(draft(pieces), budget=100)
    assert list(proposal.tokens) == tokens
    assert proposal.is_chain
    for span, confidence in zip(proposal.spans, proposal.confidence, strict=True):
        assert confidence == 0.5**span.length


def test_the_budget_counts_target_tokens() -> None:
    tokens, pieces = spelled("The shells she sells are sea shells")
    proposal = Translator(pair()).translate(draft(pieces), budget=3)
    assert list(proposal.tokens) == tokens[:3]
    assert len(proposal.parents) == len(proposal.confidence) == len(proposal.spans) == 3


def test_a_drafted_end_proposes_the_stop_token_and_a_mark_proposes_nothing() -> None:
    assert Translator(pair()).translate(draft([0]), budget=4).tokens == (0,)
    assert Translator(pair()).translate(draft([1, 0]), budget=4).tokens == ()


def test_what_cannot_be_expressed_ends_the_proposal() -> None:
    tokens, pieces = spelled("The fox")
    proposal = Translator(pair()).translate(draft([*pieces, 1, *pieces]), budget=100)
    assert list(proposal.tokens) == tokens


def test_a_draft_token_may_hold_several_target_tokens() -> None:
    """Here the drafter has the larger vocabulary."""
    swapped = pair(TARGET, DRAFT)
    (long,) = byte_level(TARGET).encode(" shells", add_special_tokens=False).ids
    covered = swapped.covers(long)
    assert len(covered) > 1
    proposal = Translator(swapped).translate(Draft((long,), (0.7,)), budget=100)
    assert list(proposal.tokens) == covered
    assert pieces_text(covered, DRAFT) == b" shells"
    assert proposal.confidence == (0.7, *[1.0] * (len(covered) - 1))
    assert proposal.spans == (AlignedSpan(0, 1), *[AlignedSpan(0, 0)] * (len(covered) - 1))
    assert Translator(swapped).translate(Draft((long,), (0.7,)), budget=1).tokens == (covered[0],)


def test_a_walk_is_open_inside_a_token_only() -> None:
    translator = Translator(pair())
    tokens, pieces = spelled("The shells she sells are sea shells for sure, therefore")
    node, open_after = 0, []
    for piece in pieces:
        node = translator.follow(node, piece)
        open_after.append(translator.is_open(node))
    ends = set()
    at = 0
    for token in tokens:
        at += len(pair().spelling(token))
        ends.add(at - 1)
    assert not any(open_after[end] for end in ends)
    assert any(open_after) or all(len(pair().spelling(t)) == 1 for t in tokens)
