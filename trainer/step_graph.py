"""Runs a drafter's training step (docs/formats.md): what it predicts, and how its LoRA should move.

Passes are small, since a device has little memory to spare, and can be ended from another thread
within some tens of milliseconds. A pass divides its gradient by its own sum of weights; several are
put together as if they had been one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.lora import Lora, lora_shapes
from edgedraft.runtime.ort_session import SessionConfig, onnxruntime, open_session
from edgedraft.runtime.training_files import TrainingFiles

from .errors import TrainError
from .reliability import brier

# Bounds of one pass; a longer passage gets one of its own.
_PIECES = 512
_POSITIONS = 256

_T = TypeVar("_T")


class Interrupted(Exception):
    """A pass was ended; nothing came of it."""


def in_full(work: Callable[[], _T]) -> Generator[None, None, _T]:
    """Return what comes of some passes; yield whenever one was ended, and begin again."""
    while True:
        with suppress(Interrupted):
            return work()
        yield


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class Passage:
    """Draft tokens of which the last n are predicted, each from those before it."""

    pieces: npt.NDArray[np.int64]  # (length,), length > n
    nll_weight: FloatArray  # (n,)
    teacher_ids: npt.NDArray[np.int64]  # (n, K), K the same in every passage
    teacher_probs: FloatArray  # (n, K)
    teacher_weight: FloatArray  # (n,)

    @property
    def num_predicted(self) -> int:
        """n"""
        return len(self.nll_weight)


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The mean loss of some passages and where it falls."""

    loss: float
    weight: float
    tensors: dict[str, FloatArray]  # as in the LoRA


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """How the predicted pieces of one passage were predicted."""

    hit: npt.NDArray[np.bool_]  # (n,) whether the piece was the likeliest
    prob: FloatArray  # (n,) its probability
    # (n,) how likely the acceptance head thought that the likeliest piece is the one that came
    acceptance: FloatArray | None = None

    @property
    def brier(self) -> float | None:
        """The Brier score of the acceptance head; None where there is none."""
        if self.acceptance is None:
            return None
        return brier(self.acceptance, self.hit)


class StepGraph:
    """The graphs of one drafter."""

    def __init__(self, files: TrainingFiles, threads: int = 1) -> None:
        """Open the graphs; raise `FolderError` for some that cannot be."""
        config = SessionConfig(threads=threads)
        self._step = _Session(files.step_graph, config)
        self._evaluation = _Session(files.evaluation_graph, config)
        self._weights = dict(files.tensors)
        self._frozen = {
            name: np.zeros(shape, np.float32)
            for name, shape in lora_shapes(files.shapes, 0).items()
        }
        self._options = onnxruntime().RunOptions()

    @property
    def has_acceptance_head(self) -> bool:
        """Whether the drafter has one."""
        return self._evaluation.has_acceptance

    def interrupt(self) -> None:
        """End the running pass, and every further one until `resume`."""
        self._options.terminate = True

    def resume(self) -> None:
        """Let passes run again."""
        self._options.terminate = False

    def gradients(
        self, passages: Sequence[Passage], lora: Lora, divergence: Sequence[float]
    ) -> Gradients:
        """Return loss and gradients of the LoRA; `divergence` are the factors of KL(p||q), KL(q||p)
        and total variation. Raises `Interrupted`.
        """
        mean = _Mean(self._step.learns(lora))
        for group in passes(passages):
            feeds = self._feeds(group, lora) | _teaching(group)
            feeds["divergence"] = np.array(divergence, np.float32)
            share = float(feeds["nll_weight"].sum() + feeds["teacher_weight"].sum())
            loss, *gradients = self._run(self._step, ["loss", *mean.outputs], feeds)
            mean.add(float(loss), share, gradients)
        return mean.gradients()

    def predictions(self, passages: Sequence[Passage], lora: Lora | None) -> list[Prediction]:
        """Return how each passage is predicted, by the drafter as shipped where there is no LoRA.
        Raises `Interrupted`.
        """
        names = self._evaluation.predicts
        return [
            prediction
            for group in passes(passages)
            for prediction in _by_passage(
                group, self._run(self._evaluation, names, self._feeds(group, lora))
            )
        ]

    def judgements(
        self, passages: Sequence[Passage], lora: Lora
    ) -> tuple[list[Prediction], Gradients]:
        """Return how each passage is predicted, and how the acceptance head should move that said
        of each piece how likely that was; the loss is its Brier score. Raises `Interrupted`.
        """
        names, found = self._evaluation.predicts, list[Prediction]()
        mean = _Mean(self._evaluation.learns(lora))
        for group in passes(passages):
            outputs = self._run(self._evaluation, [*names, *mean.outputs], self._feeds(group, lora))
            predicted, gradients = outputs[: len(names)], outputs[len(names) :]
            found += _by_passage(group, predicted)
            hit, _, said = predicted
            mean.add(brier(said, hit), len(hit), gradients)
        return found, mean.gradients()

    def _feeds(self, passages: Sequence[Passage], lora: Lora | None) -> dict[str, Any]:
        length = max(len(passage.pieces) for passage in passages)
        tokens = np.zeros((len(passages), length), np.int64)
        at: list[npt.NDArray[np.int64]] = []
        for i, passage in enumerate(passages):
            end = len(passage.pieces)
            tokens[i, :end] = passage.pieces
            at.append(i * length + np.arange(end - passage.num_predicted - 1, end - 1))
        following = [x.pieces[len(x.pieces) - x.num_predicted :] for x in passages]
        feeds = {
            "tokens": tokens,
            "at": np.concatenate(at),
            "next": np.concatenate(following),
            "scale": np.array(lora.scale if lora else 0.0, np.float32),
        }
        return feeds | self._weights | self._frozen | dict(lora.tensors if lora else {})

    def _run(self, graph: _Session, names: list[str], feeds: Mapping[str, Any]) -> list[Any]:
        wanted = {name: x for name, x in feeds.items() if name in graph.inputs}
        try:
            outputs: list[Any] = graph.session.run(names, wanted, self._options)
        except Exception as error:  # onnxruntime raises a family of unrelated classes
            if self._options.terminate:
                raise Interrupted from error
            reason = " ".join(str(error).split())[:300]
            raise TrainError(f"a training step failed in onnxruntime ({reason})") from error
        return outputs


class _Session:
    """An open graph, and what goes in and out."""

    def __init__(self, path: Path, config: SessionConfig) -> None:
        self.session = open_session(path, config, frugal=True)
        self.inputs = {x.name for x in self.session.get_inputs()}
        self._outputs = {x.name for x in self.session.get_outputs()}
        self.has_acceptance = "acceptance" in self._outputs
        # What a `Prediction` is made of.
        self.predicts = ["hit", "prob", *(["acceptance"] if self.has_acceptance else [])]

    def learns(self, lora: Lora) -> dict[str, FloatArray]:
        """Return the tensors that it has gradients of."""
        return {name: x for name, x in lora.tensors.items() if f"{name}.grad" in self._outputs}


class _Mean:
    """The mean of what several passes say."""

    def __init__(self, tensors: Mapping[str, FloatArray]) -> None:
        self.outputs = [f"{name}.grad" for name in tensors]
        self._sums = {name: np.zeros_like(x) for name, x in tensors.items()}
        self._loss = self._weight = 0.0

    def add(self, loss: float, weight: float, gradients: Sequence[FloatArray]) -> None:
        """Count a pass with this weight; its gradients are changed."""
        self._loss += weight * loss
        self._weight += weight
        for sums, gradient in zip(self._sums.values(), gradients, strict=True):
            gradient *= np.float32(weight)
            sums += gradient

    def gradients(self) -> Gradients:
        """Return it; nothing is added afterwards."""
        weight = self._weight or 1.0
        for sums in self._sums.values():
            sums /= np.float32(weight)
        return Gradients(self._loss / weight, self._weight, self._sums)


def passes(passages: Sequence[Passage]) -> list[list[Passage]]:
    """Divide passages, in their order, into what one pass takes."""
    groups: list[list[Passage]] = []
    longest = positions = 0
    for passage in passages:
        longest = max(longest, len(passage.pieces))
        positions += passage.num_predicted
        fits = groups and (len(groups[-1]) + 1) * longest <= _PIECES and positions <= _POSITIONS
        if fits:
            groups[-1].append(passage)
        else:
            groups.append([passage])
            longest, positions = len(passage.pieces), passage.num_predicted
    return groups


def _by_passage(
    passages: Sequence[Passage], predicted: Sequence[npt.NDArray[Any]]
) -> list[Prediction]:
    cuts = np.cumsum([passage.num_predicted for passage in passages])[:-1]
    hit, *others = predicted
    rows = (np.split(x, cuts) for x in (hit > 0, *others))
    return [Prediction(*parts) for parts in zip(*rows, strict=True)]


def _teaching(passages: Sequence[Passage]) -> dict[str, Any]:
    names = ("nll_weight", "teacher_ids", "teacher_probs", "teacher_weight")
    return {name: np.concatenate([getattr(x, name) for x in passages]) for name in names}
