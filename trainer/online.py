"""Learns on the device from what the target says there, between requests.

    lessons -> a few steps of the LoRA -> does it draft better? -> next generation, or nothing

An update begins after every few requests. First the adapter in use is compared with the drafter as
shipped on the requests that came since the last one, which it has not seen yet; if it is worse it
is taken out of use. Then a copy of it learns, from new lessons and from older ones in turn, and
takes its place unless it drafts worse than it, or than the drafter as shipped. That is asked of
lessons that were held back and of the last few requests, which the next update learns from; the
newer, the more they count. What counts is target tokens per pass (`rounds.py`).

An update is a chain of short passes. It stops when a request begins, and goes on later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, thread_time

import numpy as np

from edgedraft.runtime.adapter_store import SHIPPED, AdapterStore
from edgedraft.runtime.datatypes import RoundTrace
from edgedraft.runtime.errors import EdgeDraftError
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.training_files import TrainingFiles
from edgedraft.runtime.vocab_map import VocabMap

from .buffer import Buffer
from .curriculum import curriculum
from .learner_config import LearnerConfig, LearnerStats
from .lesson import Lesson, Recorder
from .step_graph import Interrupted, Passage, StepGraph
from .teacher import Teacher
from .version import Version, are_positive

_CHECKED = 6  # of the lessons that the active adapter has not seen
_REMEMBERED = 36  # of those, how it did
_SPARED = 4  # one new request in so many is learned from later, since it has to judge first
_JUDGES = 8  # lessons
# Standard errors. Rolling back loses all that was learned, a rejection the work of one update.
_ROLL_BACK, _REJECT = 2.0, 1.0
LESSONS = "lessons.bin"  # in a target's folder of device state


class OnlineLearner:
    """Learns what one drafter needs for one target. Requests and work may have threads of their
    own.
    """

    def __init__(
        self,
        files: TrainingFiles,
        vocab_map: VocabMap,
        store: AdapterStore,
        lessons: Path | None,
        target: str,
        config: LearnerConfig | None = None,
    ) -> None:
        """Learn into `store`, from what is kept in the file `lessons` of a target whose ids have
        the fingerprint `target`.
        """
        self.config = config or LearnerConfig()
        self.stats = LearnerStats()
        self._files = files
        self._store = store
        self._teacher = Teacher(vocab_map, self.config.objective)
        self._rng = np.random.default_rng(self.config.seed)
        self._buffer = Buffer(lessons, target, self._rng)
        self._lock = threading.Lock()  # of the buffer
        self._shipped = Version(None)
        self._active = self._shipped
        self._generation: int | None = None  # of the active version
        # Passes that active versions took more than the drafter as shipped, by unseen lesson.
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._recorder: Recorder | None = None
        self._inbox: deque[Sequence[Lesson]] = deque()  # requests not yet in the buffer
        self._fresh: list[list[Lesson]] = []  # requests that no update has seen
        self._spared: list[Lesson] = []  # lessons that have judged, but not yet taught
        self._update: Iterator[None] | None = None
        self._graph: StepGraph | None = None  # opened when there is something to do
        self._follow_store()

    def begin(self, prompt: Sequence[int]) -> None:
        """Hear that a request begins."""
        self._recorder = Recorder(prompt)

    def observe(self, trace: RoundTrace) -> None:
        """Take note of a round."""
        if self._recorder is not None:
            self._recorder.observe(trace)

    def end(self) -> list[Lesson]:
        """Hear that the request is over; return what it can teach."""
        if self._recorder is None:
            return []
        request = self._recorder.lessons()
        self._recorder = None
        self.add(request)
        return request

    def add(self, request: Sequence[Lesson]) -> None:
        """Learn from a request that was answered before."""
        self._inbox.append(request)

    def passes(self, request: Sequence[Lesson]) -> tuple[int, int, int]:
        """Return the tokens of a request, and the target passes they take with the drafter as it
        was shipped and as it is now, at four drafted tokens a round.
        """
        lessons = [replace(lesson, number=i) for i, lesson in enumerate(request)]
        if self._graph is None:
            self._graph = StepGraph(self._files, self.config.threads)
        shipped, current = Version(None), Version(self._active.lora)
        for version in (shipped, current):
            deque(self._score(version, lessons), maxlen=0)
        found = shipped.counts.values()
        tokens, passes = sum(x.tokens for x in found), sum(x.rounds for x in found)
        return tokens, passes, sum(x.rounds for x in current.counts.values())

    def work(self, seconds: float, interrupted: Callable[[], bool]) -> bool:
        """Learn until there is nothing to learn from, the time is over or something else is to be
        done; return whether another adapter is to be used now.

        Raises `StateError` when the device refuses, `TrainError` when onnxruntime does.
        """
        started, deadline = thread_time(), monotonic() + seconds
        before = self._generation
        self.save()
        if self._graph is not None:
            self._graph.resume()  # an `interrupt` from now on ends the pass that it finds
        try:
            while not interrupted() and monotonic() < deadline:
                if self._update is None:
                    if len(self._fresh) < self.config.update_every:
                        break
                    self._update = self._learn()
                if not self._advance():
                    self._update = None
                    self._take_in()
        finally:
            self.stats.cpu_s += thread_time() - started
        return self._generation != before

    def interrupt(self) -> None:
        """End the pass that `work` is in; may be called from another thread."""
        if self._graph is not None:
            self._graph.interrupt()

    def save(self) -> None:
        """Write the lessons; raise `StateError` when the device refuses."""
        self._take_in()
        with self._lock:
            self._buffer.save()

    def _take_in(self) -> None:
        with self._lock:
            while self._inbox:
                self._fresh.append(self._buffer.add(self._inbox.popleft()))
                self.stats.requests += 1

    def _advance(self) -> bool:
        """Do one pass of the update; return whether it goes on."""
        assert self._update is not None
        try:
            next(self._update)
        except StopIteration:
            return False
        except EdgeDraftError:
            self._update = None
            raise
        return True

    def _learn(self) -> Iterator[None]:
        """Make one update; whoever goes on with it may do so at any later time."""
        if self._graph is None:
            self._graph = StepGraph(self._files, self.config.threads)
        with self._lock:
            requests, self._fresh = self._fresh, []
        fresh = [lesson for request in requests for lesson in request]
        few = max(1, len(requests) // _SPARED)
        spared = [lesson for request in requests[-few:] for lesson in request]
        new = [*self._spared, *fresh[: len(fresh) - len(spared)]]
        self._spared = spared
        self._follow_store()
        yield from self._check_active(fresh)
        candidate = Version(self._active.lora or self._untaught(), self._active.optimizer)
        self.stats.losses = []
        for passages in self._curriculum(new, spared):
            while True:
                try:
                    is_sound = self._step(candidate, passages, self._graph)
                    break
                except Interrupted:
                    yield
            if not is_sound:
                self.stats.discarded += 1
                return
            yield
        if self.stats.losses:
            yield from self._judge(candidate, spared)

    def _check_active(self, fresh: Sequence[Lesson]) -> Iterator[None]:
        """Take the active adapter out of use if the drafter did better without."""
        if self._active is self._shipped:
            return
        fresh = fresh[-_CHECKED:]
        for version in (self._active, self._shipped):
            yield from self._score(version, fresh)
        weights = {lesson.number: 1.0 for lesson in fresh}
        losses = self._active.more_rounds(self._shipped, weights)
        self._losses.extend(losses)
        # All of a sudden, as after a change of task, or little by little.
        if any(are_positive(x, _ROLL_BACK) for x in (losses, list(self._losses))):
            self._losses.clear()
            self._store.use(SHIPPED)
            self._active, self._generation = self._shipped, None
            self.stats.rolled_back += 1

    def _judge(self, candidate: Version, unseen: Sequence[Lesson]) -> Iterator[None]:
        """Use the candidate from now on if it drafts no worse."""
        with self._lock:
            judges = {lesson.number: lesson for lesson in (*self._buffer.held_back, *unseen)}
        lessons = [judges[number] for number in sorted(judges)][-_JUDGES:]
        if not lessons:
            return
        versions = {"candidate": candidate, "before": self._active, "shipped": self._shipped}
        for version in versions.values():
            yield from self._score(version, lessons)
        ages = {x.number: lessons[-1].number - x.number for x in lessons}
        weights = {number: 0.5 ** (age / self.config.half_life) for number, age in ages.items()}
        others = (self._active, self._shipped)
        if any(are_positive(candidate.more_rounds(x, weights), _REJECT) for x in others):
            self.stats.rejected += 1
        else:
            assert candidate.lora is not None
            found = {name: x.tokens_per_pass(weights) for name, x in versions.items()}
            provenance = {"requests": self.stats.requests, "tokens_per_pass": found}
            self._generation = self._store.add(candidate.lora, provenance=provenance)
            self._active = candidate
            self.stats.accepted += 1
        for version in (self._active, self._shipped):
            version.keep_only(lessons)

    def _score(self, version: Version, lessons: Sequence[Lesson]) -> Iterator[None]:
        assert self._graph is not None
        is_open = True
        while is_open:
            with suppress(Interrupted):
                is_open = version.score(lessons, self._graph, self._teacher)
            yield

    def _step(self, version: Version, passages: Sequence[Passage], graph: StepGraph) -> bool:
        """Take one step; return False, and take none, if a number in it is not finite."""
        assert version.lora is not None
        lora = version.lora
        gradients = graph.gradients(passages, lora, self.config.objective.divergence)
        after = self.config.optimizer.step(lora.tensors, gradients.tensors, version.optimizer)
        if after is None:
            return False
        version.lora, version.optimizer = replace(lora, tensors=after[0]), after[1]
        self.stats.steps += 1
        self.stats.losses.append(gradients.loss)
        return True

    def _curriculum(
        self, new: Sequence[Lesson], spared: Sequence[Lesson]
    ) -> Iterator[list[Passage]]:
        with self._lock:
            old = [*self._buffer.older, *self._buffer.recent]
        apart = {lesson.number for lesson in (*new, *spared)}
        return curriculum(
            [lesson for lesson in new if not lesson.held_back],
            [lesson for lesson in old if lesson.number not in apart],
            self._teacher,
            self.config,
            self._rng,
        )

    def _untaught(self) -> Lora:
        shapes = self._files.shapes
        modules = {x: shapes[x] for x in self.config.modules or shapes}
        return Lora.initial(modules, self.config.rank, self.config.alpha, self._rng)

    def _follow_store(self) -> None:
        """Go on from what is in use, which somebody else may have chosen."""
        adapter = self._store.active()
        generation = adapter.generation if adapter else None
        if generation != self._generation:
            self._generation = generation
            self._active = Version(adapter.lora) if adapter else self._shipped
            self._losses.clear()


def open_learner(
    files: TrainingFiles, vocab_map: VocabMap, store: AdapterStore, kept: Path, target: str
) -> OnlineLearner:
    """Return the learner of a drafter and a target: what the entry point `edgedraft.learner` names.

    `kept` is the target's folder of device state, `target` the fingerprint of its ids.
    """
    return OnlineLearner(files, vocab_map, store, kept / LESSONS, target)
