"""A draft as the target tokens that can be verified with its probabilities.

Whether the target's row behind a proposed token is there must not depend on pieces that come later:
verification would otherwise learn, from the row alone, something about the next piece, and bend its
distribution. Longest match over the whole draft breaks that rule. These do not:

* `lattice`: every way to cut the draft into target tokens. Nodes are ordered by where they end in
  the draft, so any number of leading ones is settled by the pieces up to there.
* `line`: one way, for a target that cannot verify siblings. A token grows while what it is so far
  is a token too; that it ended there tells of the next piece only that it does not go on.
* `shared`: only pieces with the bytes of a target token, one for one.

Each has its own rule in `rejection.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import prod

from .datatypes import ROOT, AlignedSpan, Draft, Proposal
from .vocab_map import VocabMap


def lattice(draft: Draft, vocab_map: VocabMap, budget: int, origin: str = "drafter") -> Proposal:
    """Return the tree of all segmentations, its first `budget` nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    spans: list[AlignedSpan] = []
    walks = [(ROOT, 0, 0)]  # proposed token, trie node behind it, where in the draft it set out
    for at, piece in enumerate(draft.tokens):
        steps = [(parent, vocab_map.step(node, piece), start) for parent, node, start in walks]
        walks = [walk for walk in steps if walk[1] >= 0]
        for parent, node, start in list(walks):
            if (token := vocab_map.finished(node)) >= 0 and len(tokens) < budget:
                walks.append((len(tokens), 0, at + 1))
                tokens.append(token)
                parents.append(parent)
                spans.append(AlignedSpan(start, at + 1 - start))
    return _proposal(draft, tokens, parents, spans, origin)


def line(draft: Draft, vocab_map: VocabMap, budget: int, origin: str = "drafter") -> Proposal:
    """Return the chain of tokens each of which grows from token to token, at most `budget`."""
    pieces = draft.tokens
    tokens: list[int] = []
    spans: list[AlignedSpan] = []
    start = 0
    while start < len(pieces) and len(tokens) < budget:
        node, end = 0, start
        while (
            end < len(pieces)
            and (further := vocab_map.step(node, pieces[end])) >= 0
            and vocab_map.finished(further) >= 0
        ):
            node, end = further, end + 1
        if end == start:
            break
        tokens.append(vocab_map.finished(node))
        spans.append(AlignedSpan(start, end - start))
        start = end
    return _proposal(draft, tokens, range(ROOT, len(tokens) - 1), spans, origin)


def shared(draft: Draft, vocab_map: VocabMap, budget: int, origin: str = "drafter") -> Proposal:
    """Return the chain of the tokens that have the bytes of one piece each, at most `budget`."""
    tokens = list(takewhile(lambda token: token >= 0, map(vocab_map.direct, draft.tokens)))[:budget]
    spans = [AlignedSpan(start, 1) for start in range(len(tokens))]
    return _proposal(draft, tokens, range(ROOT, len(tokens) - 1), spans, origin)


def _proposal(
    draft: Draft,
    tokens: Sequence[int],
    parents: Sequence[int],
    spans: Sequence[AlignedSpan],
    origin: str,
) -> Proposal:
    confidence = [prod(draft.probs[s.start : s.start + s.length]) for s in spans]
    return Proposal(
        tokens=tuple(tokens),
        parents=tuple(parents),
        confidence=tuple(confidence),
        origin=origin,
        draft=draft,
        spans=tuple(spans),
    )
