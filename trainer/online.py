"""Learns on the device from what the target says there, between requests.

    lessons -> does the student draft them better? -> a few steps -> next generation, or nothing

An update takes the next few lessons. First the student drafts them, which it has not learned from
yet: that tells whether what it learned before is to be used (`evidence.py`), and its acceptance
head learns from what became of the drafts. The student has to do better than the drafter as shipped
to come into use, and goes out of use where it does worse; while it is in use, the average of its
latest states is the next generation. Then it learns, in use or not, from the new lessons and from
older ones in turn. A student that does clearly worse for a long time begins anew.

One pass over the lessons is not all that they can teach. So each update is owed a rehearsal, steps
on what is kept, which is made when there is nothing new to learn from and what came of the update
is in use. The next new lessons tell what came of the rehearsal.

An update is a chain of short passes. It stops when a request begins, and goes on later. What ends
with the program goes on with the next one (`student_file.py`), whatever is drawn included.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic, thread_time

import numpy as np

from edgedraft.runtime.adapter_store import SHIPPED, AdapterStore
from edgedraft.runtime.datatypes import RoundTrace
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.training_files import TrainingFiles
from edgedraft.runtime.vocab_map import VocabMap

from .buffer import RECENT, Buffer
from .curriculum import curriculum, interleaved_curriculum
from .evidence import NOTHING, Comparison, Evidence, compare
from .learner_config import LearnerConfig, LearnerStats
from .lesson import Lesson, Recorder
from .step_graph import Passage, Prediction, StepGraph, in_full
from .student import Student
from .student_file import Progress, StudentFile
from .teacher import Teacher

# Standard errors of the evidence. What has proved itself stays in use while nothing speaks against
# it, and losing all that was learned takes more than not using it.
_BETTER, _WORSE, _HOPELESS = 1.5, 1.0, 2.0
_INTERLEAVED, _REHEARSAL = 1, 2  # what is drawn for these is drawn apart
# Rehearsals, after a time without rest: between two times that a student is asked it should not
# become another one, and an average looks back on as many steps.
_MOST_OWED = 16
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
        self._buffer = Buffer(lessons, target, self.config.seed)
        self._file = StudentFile(store.student_path, files.fingerprint, target, files.shapes)
        self._lock = threading.Lock()  # of the buffer and of what is fresh
        self._active: Lora | None = None  # what requests are drafted with; None: as shipped
        self._generation: int | None = None  # of what is active
        self._student: Student | None = None  # None: begins from nothing
        self._evidence = Evidence()  # about the student
        self._recorder: Recorder | None = None
        self._inbox: deque[Sequence[Lesson]] = deque()  # requests not yet in the buffer
        self._fresh: list[Lesson] = []  # not yet learned from, oldest first
        self._owed = 0  # rehearsals
        self._begun: Iterator[None] | None = None  # an update or a rehearsal, not yet over
        self._graph: StepGraph | None = None  # opened when there is something to do
        self._resume()

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
        graph = self._open_graph()
        graph.resume()
        found: list[Comparison] = []
        for spelled in filter(None, map(self._teacher.spell, request)):
            (shipped,) = (now,) = graph.predictions([spelled.passage], None)
            if self._active is not None:
                (now,) = graph.predictions([spelled.passage], self._active)
            found.append(compare(spelled, now, shipped))
        tokens = sum(x.tokens for x in found)
        return tokens, sum(x.shipped for x in found), sum(x.student for x in found)

    def work(self, seconds: float, interrupted: Callable[[], bool]) -> bool:
        """Learn until there is nothing to learn from, the time is over or something else is to be
        done; return whether another adapter is to be used now. Then there may be more to do.

        Raises `StateError` when the device refuses, `TrainError` when onnxruntime does.
        """
        started, deadline = thread_time(), monotonic() + seconds
        before = self._generation
        self.save()
        try:
            while monotonic() < deadline:
                if self._graph is not None:
                    self._graph.resume()
                # Only now: whoever was here and gone in between has left passes ended for good.
                if interrupted():
                    break
                self._begun = self._begun or self._due(self._generation != before)
                if self._begun is None:
                    break
                if next(self._begun, True):  # also one that raised is over
                    self._begun = None
                    self._save_student()
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

    def close(self) -> None:
        """Write all that would be lost, also of an update that is not over: only the rest of its
        steps is. Nothing is learned afterwards.
        """
        self.save()
        if self._begun is not None:
            self._save_student()

    def _following(self) -> int:
        """Return the number of the first lesson that was not learned from."""
        return self._fresh[0].number if self._fresh else self._buffer.count

    def _save_student(self) -> None:
        with self._lock:
            following = self._following()
        self._file.write(
            Progress(following, self._student, self._evidence, self._generation, self._owed)
        )

    def _resume(self) -> None:
        progress = self._file.read()
        self._follow_store()
        student = progress.student
        is_own = self._generation == progress.generation
        if not is_own and student is not None:
            # A kill came between this file and the adapter, or somebody chose another one.
            is_own = student.average.equals(self._active)
        if is_own:
            self._student, self._evidence = student, progress.evidence
            self._owed = progress.owed
        following = min(progress.next_lesson, self._buffer.count)  # the lessons may be lost
        self._fresh = [x for x in self._buffer.recent if x.number >= following]

    def _take_in(self) -> None:
        with self._lock:
            while self._inbox:
                self._fresh += self._buffer.add(self._inbox.popleft())
                self.stats.requests += 1
            self._fresh = self._fresh[-RECENT:]  # others are among the older ones

    def _due(self, is_awaited: bool) -> Iterator[None] | None:
        """Return what is to be done next, if anything, while somebody waits for what is done or
        not; whoever goes on with it may do so at any later time.
        """
        if len(self._fresh) >= self.config.update_every:
            return self._learn()
        return self._rehearse() if self._owed and not is_awaited else None

    def _learn(self) -> Iterator[None]:
        """Make one update."""
        with self._lock:
            fresh = self._fresh[: self.config.update_every]
        self._follow_store()
        if self._student is not None:
            yield from self._ask(fresh, self._student)
        student = self._student or Student(self._untaught())
        with self._lock:
            self._fresh = [x for x in self._fresh if x.number > fresh[-1].number]
        if self.config.rehearsal_steps:
            self._owed = min(self._owed + 1, _MOST_OWED)
        yield  # a request need not wait for the first step
        steps: Iterator[Callable[[Student], Student | None]] = chain(
            (partial(self._judge, passages=x) for x in self._interleaved_curriculum(fresh)),
            (partial(self._step, passages=x) for x in self._curriculum(fresh)),
        )
        yield from self._take(steps, student)

    def _rehearse(self) -> Iterator[None]:
        """Learn once more from lessons that were learned from."""
        self._owed -= 1
        self._follow_store()
        if self._student is not None:
            steps = (partial(self._step, passages=x) for x in self._rehearsal())
            yield from self._take(steps, self._student)

    def _take(
        self, steps: Iterable[Callable[[Student], Student | None]], student: Student
    ) -> Iterator[None]:
        """Let the student take these steps, unless it is lost in one."""
        for step in steps:
            after = yield from in_full(partial(step, student))
            if after is None:
                self.stats.discarded += 1
                self._begin_from(self._active)
                return
            self._student = student = after
            yield

    def _ask(self, fresh: Sequence[Lesson], student: Student) -> Iterator[None]:
        """Let the student draft lessons that it has not learned from, and use it or not."""
        average = student.average
        found: list[Comparison] = []
        for lesson in fresh:
            comparison, student = yield from in_full(partial(self._drafted, lesson, student))
            found.append(comparison)
            yield
        self._student = student
        self._evidence.add(found)
        if self._active is None:
            if self._evidence.is_better(_BETTER):
                self._use(average)
        elif self._evidence.is_worse(_WORSE):
            self._store.use(SHIPPED)
            self._active = self._generation = None
            self.stats.rolled_back += 1
            self._save_student()  # or, after a kill, it would be somebody else's choice
        else:
            self._use(average)
        if self._evidence.is_full and self._evidence.is_worse(_HOPELESS):
            self._begin_from(None)
            self.stats.begun_anew += 1

    def _drafted(self, lesson: Lesson, student: Student) -> tuple[Comparison, Student]:
        """Return what the student's drafts of a lesson come to, and the student whose acceptance
        head has learned from that: before the drafter does, which drafts too well what it knows.
        """
        if (spelled := self._teacher.spell(lesson)) is None:
            return NOTHING, student
        graph, passages = self._open_graph(), [spelled.passage]
        (shipped,) = graph.predictions(passages, None)
        if self.config.acceptance == "joint" and graph.has_acceptance_head:
            (drafted,), student = self._judged(student, passages)
        else:
            (drafted,) = graph.predictions(passages, student.average)
        return compare(spelled, drafted, shipped), student

    def _use(self, lora: Lora) -> None:
        provenance = {
            "requests": self.stats.requests,
            "tokens_per_pass": self._evidence.tokens_per_pass(),
        }
        self._generation = self._store.add(lora, provenance=provenance)
        self._active = lora
        self.stats.accepted += 1

    def _step(self, student: Student, passages: Sequence[Passage]) -> Student | None:
        """Return the student behind one step; None if a number in it is not finite."""
        divergence = self.config.objective.divergence
        gradients = self._open_graph().gradients(passages, student.lora, divergence)
        after = student.after(gradients.tensors, self.config.optimizer)
        if after is not None:
            self.stats.steps += 1
        return after

    def _judged(
        self, student: Student, passages: Sequence[Passage]
    ) -> tuple[list[Prediction], Student]:
        """Return what the student predicts, and the student behind one step of its acceptance head:
        as it was, if a number in it is not finite, since the drafter has no part in that.
        """
        predictions, gradients = self._open_graph().judgements(passages, student.judge)
        after = student.after_judging(gradients.tensors, self.config.optimizer)
        return predictions, after or student

    def _judge(self, student: Student, passages: Sequence[Passage]) -> Student:
        return self._judged(student, passages)[1]

    def _interleaved_curriculum(self, fresh: Sequence[Lesson]) -> Iterator[list[Passage]]:
        if self.config.acceptance != "interleaved" or not self._open_graph().has_acceptance_head:
            return iter(())
        with self._lock:
            recent = list(self._buffer.recent)
        rng = np.random.default_rng((self.config.seed, fresh[0].number, _INTERLEAVED))
        return interleaved_curriculum(recent, self._teacher, self.config, rng)

    def _curriculum(self, fresh: Sequence[Lesson]) -> Iterator[list[Passage]]:
        old = self._kept_before(fresh[0].number)
        rng = np.random.default_rng((self.config.seed, fresh[0].number))
        return curriculum(fresh, old, self._teacher, self.config, rng)

    def _rehearsal(self) -> Iterator[list[Passage]]:
        with self._lock:
            following = self._following()
        config = replace(self.config, steps=self.config.rehearsal_steps)
        rng = np.random.default_rng((self.config.seed, following, self._owed, _REHEARSAL))
        return curriculum((), self._kept_before(following), self._teacher, config, rng)

    def _kept_before(self, number: int) -> list[Lesson]:
        with self._lock:
            kept = [*self._buffer.older, *self._buffer.recent]
        return [lesson for lesson in kept if lesson.number < number]

    def _open_graph(self) -> StepGraph:
        if self._graph is None:
            self._graph = StepGraph(self._files, self.config.threads)
        return self._graph

    def _untaught(self) -> Lora:
        shapes = self._files.shapes
        modules = {x: shapes[x] for x in self.config.modules or shapes}
        rng = np.random.default_rng(self.config.seed)
        return Lora.initial(modules, self.config.rank, self.config.alpha, rng)

    def _follow_store(self) -> None:
        """Go on from what is in use, which somebody else may have chosen."""
        adapter = self._store.active()
        generation = adapter.generation if adapter else None
        if generation != self._generation:
            self._generation = generation
            self._active = adapter.lora if adapter else None
            self._begin_from(self._active)

    def _begin_from(self, lora: Lora | None) -> None:
        self._student = Student(lora) if lora else None
        self._owed = 0
        self._evidence.clear()


def open_learner(
    files: TrainingFiles, vocab_map: VocabMap, store: AdapterStore, kept: Path, target: str
) -> OnlineLearner:
    """Return the learner of a drafter and a target: what the entry point `edgedraft.learner` names.

    `kept` is the target's folder of device state, `target` the fingerprint of its ids.
    """
    return OnlineLearner(files, vocab_map, store, kept / LESSONS, target)
