"""Copying as a proposer: what followed the last time the text ended like this?

The index is a suffix automaton (Blumer et al. 1985) over everything the engine has seen: prompt,
output and earlier requests. It is built one token at a time and has at most two states per token.
The longest ending that occurred before needs no search: it is the suffix link of the newest state.
Each state remembers where it ended last, because the most recent continuation is the likeliest;
only the `_REFRESHED` longest endings are brought up to date per token, since in looping text there
are as many as tokens.

How far a copy can be trusted depends on how long the matching ending is and on how deep into the
copy one is. The lookup counts both while it runs: when the next call shows what was really
committed, the previous proposal is scored, the part that was never submitted included.
"""

from __future__ import annotations

from collections.abc import Sequence

from .datatypes import NOTHING, ROOT, Proposal
from .interfaces import Proposer

_REFRESHED = 16
_MAX_SESSION_TOKENS = 32_768  # at about 0.5 kB each
# Lower bounds of ending lengths that share their counts.
MATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 20)
_PRIOR_WEIGHT = 8.0
_DECAY = 0.98  # per counted outcome: about the last fifty matter
# Where counting starts: acceptance of the first, second and later tokens of a copy, by bucket, in
# SmolLM2's answers to training prompts (benchmarks/lookup_prior.py).
_PRIOR = (
    (0.26, 0.59, 0.74),
    (0.55, 0.65, 0.79),
    (0.64, 0.71, 0.81),
    (0.72, 0.75, 0.84),
    (0.77, 0.80, 0.87),
    (0.81, 0.84, 0.91),
    (0.90, 0.91, 0.94),
    (0.98, 0.98, 0.99),
)


class _SuffixAutomaton:
    """An online suffix automaton over integers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._last_end = [0]  # one past the last token of the state's most recent occurrence
        self._newest = 0
        # Length and one past the last token of earlier occurrences of the text's endings, longest
        # first.
        self.endings: list[tuple[int, int]] = []

    def append(self, token: int) -> None:
        """Add one token; amortised constant time."""
        self.tokens.append(token)
        end = len(self.tokens)
        next_, link, length = self._next, self._link, self._length
        state = self._add_state({}, 0, length[self._newest] + 1)
        walk = self._newest
        while walk != -1 and token not in next_[walk]:
            next_[walk][token] = state
            walk = link[walk]
        if walk != -1:
            target = next_[walk][token]
            if length[target] != length[walk] + 1:
                # The endings up to this length part ways with the longer ones: split them off.
                clone = self._add_state(dict(next_[target]), link[target], length[walk] + 1)
                self._last_end[clone] = self._last_end[target]
                link[target] = clone
                while walk != -1 and next_[walk].get(token) == target:
                    next_[walk][token] = clone
                    walk = link[walk]
                target = clone
            link[state] = target
        self._newest = state
        self.endings = []
        for _ in range(_REFRESHED):
            if state <= 0:
                break
            if self._last_end[state]:
                self.endings.append((length[state], self._last_end[state]))
            self._last_end[state] = end
            state = link[state]

    def _add_state(self, transitions: dict[int, int], link: int, length: int) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._last_end.append(0)
        return len(self._length) - 1


class SuffixLookup(Proposer):
    """Proposes the continuation of the longest ending that occurred before."""

    def __init__(
        self, *, tree: bool = False, max_session_tokens: int = _MAX_SESSION_TOKENS
    ) -> None:
        """Remember at most `max_session_tokens` tokens when a request begins, at about half a
        kilobyte each.

        With `tree`, shorter endings that went on differently are proposed beside the longest one's
        continuation; verifying them is exact, but not bit-identical to plain decoding
        (docs/decisions.md, "Chains by default").
        """
        self._tree = tree
        self._max_session_tokens = max_session_tokens
        self._automaton = _SuffixAutomaton()
        self._separator = -1  # between requests; each is used once, so that it matches nothing
        self._request_start = 0  # where the present request begins in the automaton's text
        self._request_offset = 0  # how many tokens of the request lie before that
        self._accepted = [[p * _PRIOR_WEIGHT for p in row] for row in _PRIOR]
        self._counted = [[_PRIOR_WEIGHT] * len(row) for row in _PRIOR]
        self._pending: tuple[int, int, list[int]] | None = None  # position, bucket, copy

    @property
    def match_length(self) -> int:
        """Length of the longest ending that occurred before the last proposal."""
        return max((length for length, _ in self._automaton.endings), default=0)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Copy up to `budget` tokens from behind the last occurrence of the longest ending."""
        self._catch_up(committed)
        copies: dict[int, tuple[list[int], list[float]]] = {}  # by first token
        for length, end in self._automaton.endings:
            copy = self._copy(end, budget)
            if copy and copy[0] not in copies:
                bucket = match_bucket(length)
                if not copies:
                    self._pending = (len(committed), bucket, copy)
                copies[copy[0]] = (copy, self._confidence(bucket, len(copy)))
            if copies and not self._tree:
                break
        if not copies:
            self._pending = None
            return NOTHING
        if len(copies) == 1:
            ((tokens, confidence),) = copies.values()
            return Proposal.chain(tokens, confidence, "lookup")
        return _tree(list(copies.values()), budget)

    def _copy(self, end: int, budget: int) -> list[int]:
        """Return what stands behind `end`, up to the end of its request."""
        # A copy that reaches the end of the text goes on with itself: the text is in a loop.
        text = self._automaton.tokens
        period = len(text) - end
        copy = [text[end + i % period] for i in range(budget)]
        return copy[: next((i for i, token in enumerate(copy) if token < 0), budget)]

    def _confidence(self, bucket: int, depth: int) -> list[float]:
        rates = [a / c for a, c in zip(self._accepted[bucket], self._counted[bucket], strict=True)]
        return [rates[min(i, 2)] for i in range(depth)]

    def forget(self) -> None:
        """Drop every token seen so far; the acceptance counts stay, they hold no text."""
        self._automaton = _SuffixAutomaton()
        self._request_start = self._request_offset = 0
        self._pending = None

    def _catch_up(self, committed: Sequence[int]) -> None:
        known = self._automaton.tokens[self._request_start :]
        done = self._request_offset + len(known)
        same = list(committed[self._request_offset : done]) == known
        if same and 0 < done <= len(committed):
            self._score(committed)
            new = committed[done:]
        else:
            self._pending = None
            new = self._start_request(committed)
        for token in new:
            self._automaton.append(token)

    def _start_request(self, committed: Sequence[int]) -> Sequence[int]:
        """Begin a new text behind a separator; return the part of it that is worth indexing."""
        limit, old = self._max_session_tokens, self._automaton.tokens
        if len(old) + len(committed) >= limit:
            room = max(0, min(limit // 2, limit - len(committed) - 1))
            kept = old[max(0, len(old) - room) :]
            self._automaton = _SuffixAutomaton()
            for token in kept:
                self._automaton.append(token)
        if self._automaton.tokens:
            self._automaton.append(self._separator)
            self._separator -= 1
        self._request_start = len(self._automaton.tokens)
        self._request_offset = max(0, len(committed) - limit)
        return committed[self._request_offset :]

    def _score(self, committed: Sequence[int]) -> None:
        """Compare the previous copy with what was committed after it, as far as that is known."""
        if self._pending is None:
            return
        position, bucket, copy = self._pending
        self._pending = None
        accepted, counted = self._accepted[bucket], self._counted[bucket]
        for depth, (guess, truth) in enumerate(zip(copy, committed[position:], strict=False)):
            column = min(depth, 2)
            accepted[column] = accepted[column] * _DECAY + (guess == truth)
            counted[column] = counted[column] * _DECAY + 1
            if guess != truth:
                break


def _tree(copies: Sequence[tuple[list[int], list[float]]], budget: int) -> Proposal:
    """Join copies that begin differently, likeliest nodes first."""
    nodes: list[tuple[float, int, int, float]] = []  # -reached, copy, depth, confidence
    left = 1.0  # probability that no earlier copy's first token is right
    for which, (tokens, confidence) in enumerate(copies):
        first = left * confidence[0]
        left -= first
        reached = 1.0
        for depth in range(len(tokens)):
            given_parent = confidence[depth] if depth else first
            reached *= given_parent
            nodes.append((-reached, which, depth, given_parent))
    # A child is never likelier than its parent, and comes after it where they are equal.
    nodes = sorted(nodes)[:budget]
    index = {(which, depth): i for i, (_, which, depth, _) in enumerate(nodes)}
    return Proposal(
        tokens=tuple(copies[which][0][depth] for _, which, depth, _ in nodes),
        parents=tuple(index[which, depth - 1] if depth else ROOT for _, which, depth, _ in nodes),
        confidence=tuple(c for *_, c in nodes),
        origin="lookup",
    )


def match_bucket(length: int) -> int:
    """Return the index of the bucket that endings of this length share."""
    for i, bound in enumerate(MATCH_BUCKETS):
        if length < bound:
            return i - 1
    return len(MATCH_BUCKETS) - 1
