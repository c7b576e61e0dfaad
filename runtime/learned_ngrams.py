"""The n-gram model of a target on this device: where it starts from and where it is kept.

It starts from what this device learned before, else from a seed that came with the drafter. Neither
being there or readable is no reason to stop: it then starts empty.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from .datatypes import Proposal
from .errors import StateError
from .interfaces import Proposer
from .ngram_model import NgramModel

_log = logging.getLogger(__name__)


class LearnedNgrams(Proposer):
    """An `NgramModel` with its files."""

    def __init__(
        self, vocabulary: str, *, seed: Path | None = None, kept: Path | None = None
    ) -> None:
        """`vocabulary` is the fingerprint of the target's ids; `kept` is the device's own file,
        None for a model that is not to outlive the process.
        """
        self._model = NgramModel()
        self._vocabulary = vocabulary
        self._seed = seed
        self._kept = kept
        if not (kept and self._load(kept)):
            self._sow()

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Propose the continuations that contexts like this one had."""
        return self._model.propose(committed, budget)

    def forget(self) -> None:
        """Drop what was learned since the model was new; the kept file stays until `save`."""
        self._model.forget()
        self._sow()

    def save(self) -> None:
        """Write what was learned; raise `StateError` when the device refuses."""
        if self._kept:
            self._model.save(self._kept, self._vocabulary)

    def _sow(self) -> None:
        if self._seed:
            self._load(self._seed)

    def _load(self, path: Path) -> bool:
        if not path.exists():
            return False
        try:
            self._model.load(path, self._vocabulary)
        except StateError as error:
            _log.warning("%s", error)
            return False
        return True
