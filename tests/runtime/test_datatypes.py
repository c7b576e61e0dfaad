"""Proposals are trees in topological order, chains the usual case."""

from __future__ import annotations

import pytest

from edgedraft.runtime import Proposal
from edgedraft.runtime.datatypes import NOTHING, ROOT

#   ROOT ─┬─ 5 ─┬─ 7 ── 9
#         │     └─ 8
#         └─ 6 ─── 7
TREE = Proposal((5, 6, 7, 8, 7, 9), (-1, -1, 0, 0, 1, 2), (0.9, 0.1, 0.8, 0.2, 0.5, 0.7), "test")


def test_a_chain_links_each_token_to_the_one_before() -> None:
    chain = Proposal.chain([4, 5, 6], [0.9, 0.8, 0.7], "test")
    assert chain.parents == (ROOT, 0, 1)
    assert chain.is_chain and NOTHING.is_chain and not TREE.is_chain
    assert not Proposal((1, 2), (-1, -1), (1, 1), "siblings").is_chain


def test_children_are_found_by_parent_and_token() -> None:
    assert TREE.child(ROOT, 5) == 0
    assert TREE.child(ROOT, 6) == 1
    assert TREE.child(0, 7) == 2
    assert TREE.child(1, 7) == 4
    assert TREE.child(2, 9) == 5
    assert TREE.child(ROOT, 7) is None
    assert TREE.child(5, 7) is None
    assert NOTHING.child(ROOT, 1) is None


@pytest.mark.parametrize("count", range(8))
def test_the_head_of_a_tree_is_a_tree(count: int) -> None:
    head = TREE.head(count)
    assert head.tokens == TREE.tokens[:count]
    assert len(head.parents) == len(head.confidence) == min(count, 6)
    assert all(ROOT <= parent < i for i, parent in enumerate(head.parents))


def test_the_first_path_follows_first_children_to_a_leaf() -> None:
    path = TREE.first_path()
    assert path == Proposal.chain((5, 7, 9), (0.9, 0.8, 0.7), "test")
    assert path.first_path() == path
    assert NOTHING.first_path().tokens == ()
