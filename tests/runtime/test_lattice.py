"""What is proposed of a draft depends on no piece that comes later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgedraft.runtime.datatypes import ROOT, AlignedSpan, Draft, Proposal
from edgedraft.runtime.lattice import lattice, line, shared
from edgedraft.runtime.vocab_map import VocabMap
from sampling_laws import awkward_pair, simple_pair

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

PAIRS = st.sampled_from([simple_pair(), awkward_pair()])
PIECES = st.lists(st.integers(0, 2), max_size=7)
BUDGETS = st.integers(0, 12)
Path = tuple[tuple[int, int, int], ...]  # token, start, end


def draft_of(pieces: Sequence[int]) -> Draft:
    return Draft(tuple(pieces), tuple(0.5 + 0.1 * i for i in range(len(pieces))))


def paths(proposal: Proposal) -> list[Path]:
    """Return the way from the root to each node."""
    found: list[Path] = []
    for token, parent, span in zip(proposal.tokens, proposal.parents, proposal.spans, strict=True):
        before = () if parent == ROOT else found[parent]
        found.append((*before, (token, span.start, span.start + span.length)))
    return found


def segmentations(pieces: Sequence[int], table: VocabMap) -> set[Path]:
    """Return every way to cut a leading part of the pieces into tokens."""
    spelled = {
        tuple(table.spelling(token)): token for token in table.node_token.tolist() if token >= 0
    }
    known: set[Path] = {()}
    for end in range(1, len(pieces) + 1):
        for path in list(known):
            start = path[-1][2] if path else 0
            if (token := spelled.get(tuple(pieces[start:end]), -1)) >= 0 and start < end:
                known.add((*path, (token, start, end)))
    return known - {()}


@given(table=PAIRS, pieces=PIECES)
def test_a_lattice_holds_every_segmentation_once(table: VocabMap, pieces: list[int]) -> None:
    proposal = lattice(draft_of(pieces), table, 10_000)
    found = paths(proposal)
    assert len(found) == len(set(found))
    assert set(found) == segmentations(pieces, table)


@given(table=PAIRS, pieces=PIECES, other=PIECES, budget=BUDGETS, cut=st.integers(0, 7))
def test_nodes_of_a_lattice_are_settled_by_the_pieces_up_to_their_end(
    table: VocabMap, pieces: list[int], other: list[int], budget: int, cut: int
) -> None:
    changed = [*pieces[:cut], *other]
    cut = min(cut, len(pieces), len(changed))
    whole = [p for p in paths(lattice(draft_of(pieces), table, budget)) if p[-1][2] <= cut]
    again = [p for p in paths(lattice(draft_of(changed), table, budget)) if p[-1][2] <= cut]
    assert whole == again


@given(table=PAIRS, pieces=PIECES, budget=BUDGETS)
def test_a_budget_keeps_the_first_nodes(table: VocabMap, pieces: list[int], budget: int) -> None:
    draft = draft_of(pieces)
    for propose in (lattice, line, shared):
        assert propose(draft, table, budget) == propose(draft, table, 10_000).head(budget)


@given(table=PAIRS, pieces=PIECES)
def test_a_line_grows_from_token_to_token_as_far_as_it_can(
    table: VocabMap, pieces: list[int]
) -> None:
    draft = draft_of(pieces)
    proposal = line(draft, table, 10_000)
    assert proposal.is_chain
    assert set(paths(proposal)) <= set(paths(lattice(draft, table, 10_000)))
    spelled = {tuple(table.spelling(token)) for token in table.node_token.tolist() if token >= 0}
    end = 0
    for span in proposal.spans:
        assert span.start == end
        end = span.start + span.length
        assert all(tuple(pieces[span.start : i]) in spelled for i in range(span.start + 1, end + 1))
        assert tuple(pieces[span.start : end + 1]) not in spelled or end == len(pieces)
    assert end == len(pieces) or tuple(pieces[end : end + 1]) not in spelled


@given(table=PAIRS, pieces=PIECES)
def test_shared_tokens_stand_for_one_piece_each(table: VocabMap, pieces: list[int]) -> None:
    proposal = shared(draft_of(pieces), table, 10_000)
    count = len(proposal.tokens)
    assert list(proposal.tokens) == [table.direct(piece) for piece in pieces[:count]]
    assert proposal.spans == tuple(AlignedSpan(i, 1) for i in range(count))
    assert proposal.is_chain
    assert count == len(pieces) or table.direct(pieces[count]) < 0


def test_longer_tokens_come_first_among_those_that_end_alike() -> None:
    proposal = lattice(draft_of([0, 1, 2]), simple_pair(), 10_000)
    assert proposal.tokens == (0, 3, 1, 5, 2, 2)
    assert proposal.parents == (ROOT, ROOT, 0, ROOT, 1, 2)
    assert proposal.confidence == pytest.approx((0.5, 0.3, 0.6, 0.21, 0.7, 0.7))
