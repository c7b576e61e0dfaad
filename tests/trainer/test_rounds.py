"""Rounds counted from what a drafter gets right, without drafting."""

from __future__ import annotations

import numpy as np

from edgedraft.trainer.rounds import (
    MAX_DRAFT_TOKENS,
    PIECE_CAP,
    Counts,
    count_matches,
    evaluated_pieces,
    matches_of,
    reachable_pieces,
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


def test_every_piece_of_a_round_up_to_the_first_wrong_one_is_compared() -> None:
    hits = [True, True, False, True, True, False]
    #        token 0 of two pieces, 1 wrong, 2 the round's next, 3 wrong
    assert evaluated_pieces(hits, [2, 1, 1, 1, 1]) == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 0),
        (4, 1),
        (5, 2),
    ]
    assert evaluated_pieces([False, True], [2]) == [(0, 0)], "behind a wrong piece nothing is"
    assert evaluated_pieces([True], [0, 1, 0]) == [(0, 0)], "what cannot be drafted ends a round"


def test_rounds_compare_what_they_accept_and_one_more_where_they_end_at_a_mistake() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        lengths = rng.integers(0, 3, 30).tolist()
        hits = (rng.random(sum(lengths)) < 0.7).tolist()
        evaluated = evaluated_pieces(hits, lengths)
        counts = count_matches(matches_of(hits, lengths))
        assert sum(place == 0 for _, place in evaluated) <= counts.rounds
        assert max((place for _, place in evaluated), default=0) < PIECE_CAP
        assert {piece for piece, _ in evaluated} <= set(reachable_pieces(hits, lengths))
        wrong = [piece for piece, _ in evaluated if not hits[piece]]
        assert len(wrong) <= counts.rounds, "a round ends at its first"


def test_no_round_gets_behind_a_wrong_piece_of_the_same_token() -> None:
    assert reachable_pieces([True, False, True, True], [3, 1]) == [0, 1, 3]
    assert reachable_pieces([], [0, 0]) == []
