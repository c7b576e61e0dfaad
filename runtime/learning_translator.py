"""A translator that learns n-grams of draft tokens from what the target commits.

Two kinds: the spelling of every committed token, which is OmniDraft's cache (arXiv 2507.02659,
section 3.1) and of use where the table of all spellings is left out to see what it is worth; and,
where the target said what was drafted but the drafter had cut it differently, the drafter's way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from .datatypes import Proposal
from .errors import StateError
from .ngram_cache import NgramCache
from .translate import Translator
from .vocab_map import VocabMap

_log = logging.getLogger(__name__)


class LearningTranslator(Translator):
    """Translates with the table of a pair, a cache of learned n-grams, or both."""

    def __init__(
        self,
        vocab_map: VocabMap,
        *,
        static: bool = True,
        kept: Path | None = None,
    ) -> None:
        """Without `static`, only direct tokens and learned n-grams are known: the paper's cache,
        which begins empty. What is learned is read from and saved to the file `kept`.
        """
        super().__init__(vocab_map)
        self._static = static
        self._kept = kept
        self.cache = NgramCache()
        if kept is not None and kept.exists():
            try:
                self.cache.load(kept, vocab_map.key.draft, vocab_map.key.target)
            except StateError as error:
                _log.warning("%s", error)

    def begin(self) -> None:
        """Let n-grams of earlier requests be evicted first."""
        self.cache.begin_request()

    def learn(self, proposal: Proposal, truth: Sequence[int]) -> None:
        """Note the spellings of the committed tokens, and the drafter's own of the last one."""
        committed = list(islice(truth, len(proposal.tokens) + 1))
        for token in committed:
            self.cache.learn(self._map.spelling(token), token)
        wrong = next(
            (i for i, (t, p) in enumerate(zip(committed, proposal.tokens, strict=False)) if t != p),
            None,
        )
        if wrong is None or proposal.draft is None:
            return
        pieces = proposal.draft.tokens[proposal.spans[wrong].start :]
        text = b"".join(map(self._map.text, self._map.spelling(committed[wrong])))
        drafted = b""
        for count, piece in enumerate(pieces, 1):
            drafted += self._map.text(piece)
            if drafted == text:
                self.cache.learn(pieces[:count], committed[wrong])
            if len(drafted) >= len(text):
                break

    def forget(self) -> None:
        """Drop every learned n-gram."""
        self.cache.forget()

    def save(self) -> None:
        """Write the learned n-grams; raise `StateError` when refused."""
        if self._kept is not None:
            self.cache.save(self._kept, self._map.key.draft, self._map.key.target)

    def _longest(self, pieces: Sequence[int], start: int) -> tuple[int, int] | None:
        found = super()._longest(pieces if self._static else pieces[: start + 1], start)
        learned = self.cache.match(pieces, start)
        return learned if learned and (found is None or learned[1] > found[1]) else found
