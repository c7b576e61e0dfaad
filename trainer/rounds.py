"""How many target tokens a pass yields, counted from what a drafter gets right of an answer.

A round begins behind the committed tokens, accepts the leading tokens of a draft that equal the
true answer, and emits one token more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MAX_DRAFT_TOKENS = 4  # k
PIECE_CAP = 8  # draft tokens in one round


@dataclass(slots=True)
class Counts:
    """What was counted over many rounds; every ratio follows from it."""

    tokens: int = 0
    rounds: int = 0
    first_right: int = 0  # positions at which the first drafted token is right

    def add(self, other: Counts) -> None:
        """Add what was counted elsewhere."""
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.first_right += other.first_right

    @property
    def tau(self) -> float:
        """Target tokens per target pass."""
        return self.tokens / self.rounds

    @property
    def first_rate(self) -> float:
        """Chance that the first drafted token is right, over all positions of the answers."""
        return self.first_right / self.tokens


def count_matches(matches: Sequence[int]) -> Counts:
    """Count the rounds of an answer, given how many drafted tokens are right at every position."""
    counts = Counts(tokens=len(matches), first_right=sum(count > 0 for count in matches))
    position = 0
    while position < len(matches):
        position += matches[position] + 1
        counts.rounds += 1
    return counts


def matches_of(hits: Sequence[bool], lengths: Sequence[int]) -> list[int]:
    """Return how many drafted tokens are right at every position, given which pieces of the answer
    are predicted and how many pieces spell each of its tokens.

    Greedy drafts are meant: behind right pieces they are what is predicted, so one forward pass
    over the answer tells all of them. A token without pieces cannot be drafted.
    """
    right: list[bool] = []
    at = 0
    for length in lengths:
        right.append(length > 0 and all(hits[at : at + length]))
        at += length
    return [_matches(right[i:], lengths[i:]) for i in range(len(right))]


def evaluated_pieces(hits: Sequence[bool], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return which pieces of an answer are compared with a draft when rounds follow each other
    through it, each with its place in its round: those that are right, and a round's first that is
    not. Arguments are those of `matches_of`.
    """
    starts = [0, *accumulate(lengths)]
    evaluated: list[tuple[int, int]] = []
    position = 0
    while position < len(lengths):
        first = starts[position]
        end = min(position + MAX_DRAFT_TOKENS, len(lengths))
        while position < end and lengths[position] and starts[position + 1] - first <= PIECE_CAP:
            pieces = range(starts[position], starts[position + 1])
            wrong = next((i for i in pieces if not hits[i]), None)
            evaluated += [(i, i - first) for i in pieces if wrong is None or i <= wrong]
            if wrong is not None:
                break
            position += 1
        position += 1  # the target's own token
    return evaluated


def reachable_pieces(hits: Sequence[bool], lengths: Sequence[int]) -> list[int]:
    """Return the pieces that a round can get to, wherever it begins: those behind which all pieces
    of their own token are right. Arguments are those of `matches_of`.
    """
    starts = [0, *accumulate(lengths)]
    return [
        at for start, end in pairwise(starts) for at in range(start, end) if all(hits[start:at])
    ]


def _matches(right: Sequence[bool], lengths: Sequence[int]) -> int:
    pieces = 0
    for count in range(min(len(right), MAX_DRAFT_TOKENS)):
        pieces += lengths[count]
        if not right[count] or pieces > PIECE_CAP:
            return count
    return min(len(right), MAX_DRAFT_TOKENS)
