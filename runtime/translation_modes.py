"""Other ways to turn drafts into target tokens, to compare with.

They do less than `Translator` and stand here so that a benchmark can say how much less:
`IntersectionTranslator` drafts only tokens that both vocabularies have (TLI of Timor et al., arXiv
2502.05202, as far as greedy drafts go), `ReencodeTranslator` tokenizes the drafted text again with
the target's tokenizer (SLEM of the same paper; universal assisted generation in transformers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .datatypes import Draft, Proposal
from .translate import Translator
from .vocab_map import VocabMap
from .vocabulary import Vocabulary

_LOOKBACK = 10  # committed tokens that are tokenized again together with a draft


class IntersectionTranslator(Translator):
    """Maps token to token; what the target does not have is not drafted."""

    @property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Draft tokens with a target token of the same bytes, and the end."""
        usable = self._map.direct_token >= 0
        if self._map.key.draft_end is not None:
            usable[self._map.key.draft_end] = True
        return usable

    def is_open(self, node: int) -> bool:
        """Never: every draft token is a whole target token."""
        return False

    def _longest(self, pieces: Sequence[int], start: int) -> tuple[int, int] | None:
        return super()._longest(pieces[: start + 1], start)


class ReencodeTranslator(Translator):
    """Tokenizes the text of the last committed tokens and the draft again."""

    def __init__(self, vocab_map: VocabMap, draft: Vocabulary, target: Vocabulary) -> None:
        super().__init__(vocab_map)
        self._draft = draft
        self._target = target

    def translate(self, draft: Draft, budget: int, committed: Sequence[int] = ()) -> Proposal:
        """Return what follows the committed tokens in the new tokenization, if it keeps them.

        A token that the draft's end cuts short is proposed all the same. All tokens share the
        probability of the whole draft evenly, since pieces and tokens are no longer aligned.
        """
        before = list(committed[-_LOOKBACK:])
        drafted = b"".join(self._draft.pieces[piece] for piece in draft.tokens)
        tokens = self._encode(b"".join(self._target.pieces[t] for t in before) + drafted)
        if tokens[: len(before)] == before:
            tokens = tokens[len(before) :]
        else:  # the seam moved, or a special token has no text
            tokens = self._encode(drafted)
        tokens = tokens[:budget]
        probability = float(np.prod(draft.probs)) ** (1 / max(1, len(tokens)))
        return Proposal.chain(tokens, [probability] * len(tokens), "drafter")

    def _encode(self, text: bytes) -> list[int]:
        # Half a character at the end of the draft is no text yet.
        tokenizer: Any = self._target.tokenizer
        ids: list[int] = tokenizer.encode(
            text.decode(errors="ignore"), add_special_tokens=False
        ).ids
        return ids
