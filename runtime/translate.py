"""From draft tokens to the target tokens they spell, and where the two line up.

A draft is read from left to right and cut into the longest runs that spell a target token
(OmniDraft, arXiv 2507.02659, section 3.1). Which runs do is known beforehand from both vocabularies
(`vocab_map.py`); others can be learned (`learning_translator.py`). A draft token can also hold
several whole target tokens.

What cannot be expressed ends the proposal. So does a run that breaks off before it spells anything:
`is_open` tells the drafter to go on for a token or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from .datatypes import AlignedSpan, Draft, Proposal
from .vocab_map import VocabMap


class Translator:
    """Translates drafts for one pair of vocabularies."""

    def __init__(self, vocab_map: VocabMap) -> None:
        self._map = vocab_map

    @property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Which draft tokens can become something of the target's, shape (draft vocab,)."""
        return self._map.usable

    def translate(self, draft: Draft, budget: int, committed: Sequence[int] = ()) -> Proposal:
        """Return a chain of at most `budget` target tokens that follow `committed`.

        The confidence of a token is the product of its pieces' probabilities.
        """
        pieces = draft.tokens
        tokens: list[int] = []
        spans: list[AlignedSpan] = []
        confidence: list[float] = []
        at = 0
        while at < len(pieces) and len(tokens) < budget:
            if (found := self._longest(pieces, at)) is not None:
                token, length = found
                tokens.append(token)
                spans.append(AlignedSpan(at, length))
                confidence.append(prod(draft.probs[at : at + length]))
                at += length
            elif covered := self._map.covers(pieces[at]):
                tokens += covered
                spans += [AlignedSpan(at, 1), *[AlignedSpan(at, 0)] * (len(covered) - 1)]
                confidence += [draft.probs[at], *[1.0] * (len(covered) - 1)]
                at += 1
            else:
                break
        chain = range(-1, min(len(tokens), budget) - 1)
        return Proposal(
            tokens=tuple(tokens[:budget]),
            parents=tuple(chain),
            confidence=tuple(confidence[:budget]),
            origin="drafter",
            draft=draft,
            spans=tuple(spans[:budget]),
        )

    def begin(self) -> None:
        """Hear that a request begins."""

    def learn(self, proposal: Proposal, truth: Sequence[int]) -> None:
        """Take note of the tokens that were committed where `proposal` stood."""

    def forget(self) -> None:
        """Drop what was learned of any text."""

    def save(self) -> None:
        """Write what is to outlive this process; raise `StateError` when refused."""

    def follow(self, node: int, piece: int) -> int:
        """Return where a trie walk from `node` gets with one more draft token.

        A piece that does not go on begins a new target token; the walk starts at 0.
        """
        further = self._map.step(node, piece)
        return further if further >= 0 else max(self._map.step(0, piece), 0)

    def is_open(self, node: int) -> bool:
        """Whether a walk stands inside a target token that no piece has finished yet."""
        return node > 0 and self._map.finished(node) < 0

    def _longest(self, pieces: Sequence[int], start: int) -> tuple[int, int] | None:
        """Return the target token that most pieces from `start` on spell, and their number."""
        found, node = None, 0
        for at in range(start, len(pieces)):
            node = self._map.step(node, pieces[at])
            if node < 0:
                break
            if (token := self._map.finished(node)) >= 0:
                found = token, at + 1 - start
        return found
