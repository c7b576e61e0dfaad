"""When a drafter learns: between requests, and never while somebody waits.

    idle      once nobody has asked anything for a moment, on a thread of its own
    always    right after each request as well, for a bounded time

Who learns, and how, is found among the installed packages (entry point group `edgedraft.learner`);
nothing of it is imported here. What it learned is an adapter in the store. A drafter opened with it
waits until the next request begins, so that no request sees two.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, TypeAlias

from .adapter_store import open_adapter_store
from .composite import CompositeProposer
from .datatypes import RoundTrace
from .draft_model import DraftModel
from .errors import DrafterError, EdgeDraftError, StateError
from .folder import ModelFolder
from .interfaces import LanguageModel, Learner, Proposer
from .merged_drafter import open_current_drafter
from .onnx_model import OnnxModel
from .tokenizer_file import TokenIds
from .training_files import open_training_files
from .vocab_map import VocabMap

Learn: TypeAlias = Literal["off", "idle", "always"]

_GROUP = "edgedraft.learner"
_REST_S = 0.5  # requests that follow each other faster are not to meet learning at all
_TURN_S = 3.0  # what follows a request in "always"
_PATIENCE_S = 5.0  # for the thread to end

_log = logging.getLogger(__name__)


def open_learning(
    learn: Learn, proposer: Proposer | None, ids: TokenIds, kept: Path | None
) -> Learning | None:
    """Let the drafter among the proposers learn for the target with these ids, whose state is kept
    in the folder `kept`; None for "off".

    Raises `DrafterError` where nothing can learn, `FolderError` for a drafter that cannot.
    """
    if learn == "off":
        return None
    drafter = proposer.drafter if isinstance(proposer, CompositeProposer) else None
    if not isinstance(drafter, DraftModel) or not isinstance(drafter.model, OnnxModel):
        raise DrafterError(
            "there is no drafter that could learn: name the folder of one, or leave learning off; "
            "n-grams learn by themselves"
        )
    if kept is None:
        raise StateError(
            "learning needs a place for what was learned: set EDGEDRAFT_STATE to a folder that "
            "can be written"
        )
    model, vocab_map = drafter.model, drafter.vocab_map
    learner = open_learner(model.folder, vocab_map, ids, kept)

    def reopen() -> OnnxModel:
        return open_current_drafter(model.folder, model.config, vocab_map, ids, kept)

    return Learning(learner, drafter, reopen, at_once=learn == "always")


def open_learner(folder: ModelFolder, vocab_map: VocabMap, ids: TokenIds, kept: Path) -> Learner:
    """Open what learns for a drafter, with its state in the folder `kept` of the target with these
    ids.

    Raises `DrafterError` where nothing can learn, `FolderError` for a drafter that cannot.
    """
    files = open_training_files(folder)
    store = open_adapter_store(kept, folder, ids)
    found = list(entry_points(group=_GROUP))
    if not found:
        raise DrafterError(f"no installed package has an entry point {_GROUP}: install edgedraft")
    learner: Learner = found[0].load()(files, vocab_map, store, kept, ids.fingerprint)
    return learner


class Learning:
    """Gives a learner its time, and the drafter what came of it."""

    def __init__(
        self,
        learner: Learner,
        drafter: DraftModel,
        reopen: Callable[[], LanguageModel],
        *,
        at_once: bool = False,
        rest_s: float = _REST_S,
    ) -> None:
        """`reopen` opens the drafter as it is after learning, `at_once` is "always", `rest_s` is
        for how long nobody has to ask anything before it learns.
        """
        self.learner = learner
        self._drafter = drafter
        self._reopen = reopen
        self._at_once = at_once
        self.rest_s = rest_s
        self._changed = threading.Condition()
        self._asked = False  # a request is running
        self._closed = False
        self._finished = 0  # requests
        self._done = 0  # requests after which there was nothing left to do
        self._turn = threading.Lock()  # to work
        # In the place of the drafter's, from the next request on.
        self._next: LanguageModel | None = None
        self._thread = threading.Thread(target=self._run, name="edgedraft-learning", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside onnxruntime must not outlive the interpreter

    def begin(self, prompt: Sequence[int]) -> None:
        """Hear that a request begins: learning stops, and what was learned is used."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()
        self.learner.interrupt()
        model, self._next = self._next, None
        if model is not None:
            self._drafter.use(model)
        self.learner.begin(prompt)

    def observe(self, trace: RoundTrace) -> None:
        """Hear of a round."""
        self.learner.observe(trace)

    def end(self) -> None:
        """Hear that the request is over."""
        self.learner.end()
        with self._changed:
            self._asked = False
            self._finished += 1
            self._changed.notify_all()

    def work_at_once(self) -> None:
        """Take the time that "always" takes behind a request."""
        if self._at_once:
            self._work(_TURN_S)

    def save(self) -> None:
        """Write what is to be learned from; raise `StateError` when refused."""
        self.learner.save()

    def close(self) -> None:
        """Learn no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.learner.interrupt()
        self._thread.join(_PATIENCE_S)
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            try:
                self.learner.close()
            except StateError as error:
                _log.warning("%s", error)

    def _run(self) -> None:
        while not self._closed:
            finished = self._rested()
            if finished is not None:
                while self._work(float("inf")):
                    pass  # what was learned is there for the next request: there may be more
                if not self._is_wanted():
                    self._done = finished

    def _rested(self) -> int | None:
        """Wait until there may be something to do; return how many requests are over if no other
        follows for a while.
        """
        with self._changed:
            self._changed.wait_for(self._has_work)
            finished = self._finished
            follows = self._changed.wait_for(
                lambda: self._is_wanted() or self._finished > finished, self.rest_s
            )
        return None if follows else finished

    def _has_work(self) -> bool:
        return self._closed or not (self._asked or self._finished == self._done)

    def _is_wanted(self) -> bool:
        """Whether there is something else to do."""
        return self._asked or self._closed

    def _work(self, seconds: float) -> bool:
        """Learn for so long at most; return whether the drafter is another one now."""
        with self._turn:
            if self._closed:
                return False
            try:
                is_better = self.learner.work(seconds, self._is_wanted)
                if is_better:
                    self._next = self._reopen()
                return is_better
            except Exception as error:  # whatever it is, an answer must not be lost to it
                is_ours = isinstance(error, EdgeDraftError)
                _log.warning("%s; nothing more is learned", error, exc_info=not is_ours)
                self._closed = True
                return False
