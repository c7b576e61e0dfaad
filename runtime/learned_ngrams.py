"""The n-gram model of a target on this device: where it starts from and where it is kept.

It starts from what this device learned before, else from a seed that came with the drafter. Neither
being there or readable is no reason to stop: it then starts empty. Programs that use one target at
the same time add to each other's file, and what somebody erased meanwhile is not written again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
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
        self._version = _version(kept)  # of the file that we know
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
        if self._kept is None:
            return
        version = _version(self._kept)
        if version is None and self._version is not None:
            self.forget()
        elif version != self._version:
            self._load(self._kept, self._model.merge)
        self._model.save(self._kept, self._vocabulary)
        self._version = _version(self._kept)

    def _sow(self) -> None:
        if self._seed:
            self._load(self._seed)

    def _load(self, path: Path, load: Callable[[Path, str], None] | None = None) -> bool:
        if not path.exists():
            return False
        try:
            (load or self._model.load)(path, self._vocabulary)
        except StateError as error:
            _log.warning("%s", error)
            return False
        return True


def _version(path: Path | None) -> tuple[int, int] | None:
    """Return what tells a file from the one that was there before; None where there is none."""
    try:
        status = os.stat(path) if path else None
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns) if status else None
