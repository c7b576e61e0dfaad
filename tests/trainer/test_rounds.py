"""Rounds counted from what a drafter gets right, without drafting."""

from __future__ import annotations

import numpy as np

from edgedraft.trainer.rounds import (
    MAX_DRAFT_TOKENS,
    PIECE_CAP,
    Counts,
    count_matches,
    matches_of,
)


def test_a_round_emits_what_matches_and_one_token_more() -> None:
    assert count_matches([0, 0, 0]) == Counts(tokens=3, rounds=3, first_right=0)
    assert count_matches([4, 4, 4, 4, 4]) == Counts(tokens=5, rounds=1, first_right=5)
    assert count_matches([1, 0, 2, 1, 0]) == Counts(tokens=5, rounds=2, first_right=3)


def test_a_token_is_right_when_all_its_pieces_are_and_a_draft_ends_at_the_first_wrong_one() -> None:
    assert matches_of([True, True, False, True, True], [2, 1, 1, 1]) == [1, 0, 2, 1]


def test_a_token_without_pieces_cannot_be_drafted() -> None:
    assert matches_of([True, True], [1, 0, 1]) == [1, 0, 1]


def test_matches_are_those_of_drafting_token_by_token() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(0, 4, 12).tolist()
        hits = (rng.random(sum(lengths)) < 0.8).tolist()
        starts = np.cumsum([0, *lengths]).tolist()
        for i, count in enumerate(matches_of(hits, lengths)):
            drafted = pieces = 0
            for token in range(i, min(i + MAX_DRAFT_TOKENS, len(lengths))):
                own = hits[starts[token] : starts[token + 1]]
                pieces += len(own)
                if not own or not all(own) or pieces > PIECE_CAP:
                    break
                drafted += 1
            assert count == drafted
