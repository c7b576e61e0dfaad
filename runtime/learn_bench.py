"""Does a drafter get better by learning on the device? The protocol of OmniDraft (arXiv 2507.02659,
section 4), with what users run beside it.

    answers   every request of the streams once: what the target says depends on no drafter
    learning  the same requests in several orders, each time from the drafter as it was shipped:
              what the drafter is worth for a request is asked before it may learn from it
    frozen    what was learned in each order, on prompts that were held out: the drafter alone, with
              drafts of a fixed length, and beside the n-grams, as users run it

A drafter that has learned is opened before the folder with its state is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np

from .bench import PromptResult, Skipped, run_bench
from .composite import CompositeProposer
from .config import DecodeConfig
from .draft_model import DraftModel
from .engine import Engine
from .errors import DrafterError, PromptError
from .interfaces import Learner
from .learning import open_learner
from .learning_translator import LearningTranslator
from .merged_drafter import open_current_drafter
from .onnx_model import OnnxModel
from .policy import DraftPolicy
from .prompt_files import BenchPrompt
from .tokenizer_file import TokenIds

DRAFT_TOKENS = 4  # k of the drafter alone, and what a learner counts with
SHIPPED = "shipped"  # the other engine beside the n-grams, where the learned one leads


@dataclass(frozen=True, slots=True)
class Point:
    """A request, before the drafter learned from it, and what learning from it took."""

    tokens: int
    shipped: int  # target passes with the drafter as it was shipped
    learned: int  # and as it was when the request came
    cpu_s: float
    changed: bool  # whether the drafter was another one behind it


@dataclass(slots=True)
class Order:
    """The requests in one order."""

    seed: int
    lengths: list[int]  # requests of every stream
    points: list[Point] = field(default_factory=list)
    model: OnnxModel | None = None  # the drafter in the end; None while it still learns

    @property
    def streams(self) -> list[list[Point]]:
        """The points of every stream."""
        ends = np.cumsum(self.lengths)
        return [self.points[end - n : end] for n, end in zip(self.lengths, ends, strict=True)]


class Subject:
    """A drafter that can learn, and the target it learns for."""

    def __init__(self, engine: Engine) -> None:
        """`engine` drafts with it, as shipped, and with the n-grams; it keeps nothing."""
        drafter, model = _drafter_of(engine)
        self.engine = engine
        self.folder = model.folder
        self._vocab_map = drafter.vocab_map
        self._ids = TokenIds(engine.tokenizer)

    def learner(self, kept: Path) -> Learner:
        """Open a learner with its state in a folder."""
        return open_learner(self.folder, self._vocab_map, self._ids, kept)

    def model(self, kept: Path | None = None) -> OnnxModel:
        """Open the drafter with what is in that folder, or as it was shipped."""
        target = self.engine.target
        return open_current_drafter(self.folder, target.config, self._vocab_map, self._ids, kept)

    def alone(self, model: OnnxModel, policy: DraftPolicy | None = None) -> Engine:
        """Return an engine that drafts with nothing else; without a policy it weighs no cost."""
        target, policy = self.engine.target, policy or DraftPolicy()
        translator = LearningTranslator(self._vocab_map)
        drafter = DraftModel(
            model, self._vocab_map, translator, policy, target_vocab_size=target.vocab_size
        )
        return Engine(target, self.engine.tokenizer, drafter, policy=policy)

    def beside_ngrams(self, model: OnnxModel) -> Engine:
        """Return an engine that drafts as users do, but with that model."""
        engine = self.engine.with_drafters(["ngram", self.folder.path])
        drafter, _ = _drafter_of(engine)
        drafter.use(model)
        return engine


def answer(
    subject: Subject, prompts: Sequence[BenchPrompt], config: DecodeConfig
) -> Iterator[Any | Skipped]:
    """Yield what a learner keeps of the answer to every prompt."""
    engine = subject.engine.with_drafters(["ngram"])
    with TemporaryDirectory() as kept:
        learner = subject.learner(Path(kept))
        for prompt in prompts:
            try:
                ids = engine.encode(prompt.content)
                learner.begin(ids)
                for piece in engine.stream(ids, config):
                    if piece.trace:
                        learner.observe(piece.trace)
            except PromptError as error:
                learner.end()
                yield Skipped(prompt, str(error))
            else:
                yield learner.end()


def learn(subject: Subject, streams: Sequence[Sequence[Any]], order: Order) -> Iterator[Point]:
    """Let the drafter learn from the streams, one after the other, each in an order of its own;
    every point is added to `order` before it is yielded, the drafter at the end.
    """
    rng = np.random.default_rng(order.seed)
    with TemporaryDirectory() as kept:
        learner = subject.learner(Path(kept))
        for stream in streams:
            for i in rng.permutation(len(stream)):
                tokens, shipped, learned = learner.passes(stream[i])
                learner.add(stream[i])
                started = process_time()
                changed = learner.work(float("inf"), lambda: False)
                cpu_s = process_time() - started
                order.points.append(Point(tokens, shipped, learned, cpu_s, changed))
                yield order.points[-1]
        order.model = subject.model(Path(kept))


def run_alone(
    subject: Subject,
    prompts: Sequence[BenchPrompt],
    config: DecodeConfig,
    learned: Sequence[OnnxModel],
    warm_up: int,
) -> Iterator[PromptResult | Skipped]:
    """Answer held-out prompts with the drafter alone: as shipped, and against it the learned ones,
    by their number.
    """
    return run_bench(
        subject.alone(subject.model()),
        prompts,
        replace(config, max_draft_tokens=DRAFT_TOKENS),
        warm_up=warm_up,
        others={str(i): subject.alone(model) for i, model in enumerate(learned)},
    )


def run_beside_ngrams(
    subject: Subject,
    prompts: Sequence[BenchPrompt],
    config: DecodeConfig,
    learned: OnnxModel,
    warm_up: int,
) -> Iterator[PromptResult | Skipped]:
    """Answer them with the n-grams and the learned drafter, and against it the shipped one."""
    learning = subject.beside_ngrams(learned)
    return run_bench(learning, prompts, config, warm_up=warm_up, others={SHIPPED: subject.engine})


def _drafter_of(engine: Engine) -> tuple[DraftModel, OnnxModel]:
    proposer = engine.proposer
    drafter = proposer.drafter if isinstance(proposer, CompositeProposer) else None
    if not isinstance(drafter, DraftModel) or not isinstance(drafter.model, OnnxModel):
        raise DrafterError(
            f"{engine.target.folder.graph}: no drafter can be used with it, since it verifies "
            "nothing; export the target again"
        )
    return drafter, drafter.model
