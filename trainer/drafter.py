"""The training of a drafter, or of what is added to one, over planned batches of examples.

A run follows from its plan, one group of examples per process and step. The checkpoint holds
everything that changes on the way, so a run that was stopped and resumed ends in the same weights,
bit for bit, as one that was not. Only a time limit makes a run depend on the machine; what it
decided is in the checkpoint, too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from .batches import collate
from .checkpoint import load_checkpoint, save_checkpoint
from .errors import TrainError
from .examples import Example
from .losses import DISTRIBUTION_LOSSES, cross_entropy
from .optimizer import Optimizers, decay_has_begun, rate_scale

_log = logging.getLogger(__name__)
_CHECKPOINT_S = 180.0
_MEASURE_S = 60.0  # at least, between two
_MEASURING_SHARE = 0.05  # of the time, at most
_LOG_STEPS = 20
_RECENT_STEPS = 40
_LARGEST_GRADIENT = 1.0

Measure = Callable[[], Mapping[str, float]]


@dataclass(slots=True)
class Progress:
    """Where a run is."""

    total_steps: int
    step: int = 0
    elapsed_s: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


class Training:
    """One run over a plan, kept in a checkpoint file."""

    def __init__(
        self,
        model: Any,
        optimizers: Optimizers,
        plan: Sequence[Sequence[Example]],
        checkpoint: Path,
        *,
        loss: str = "ce",
        max_minutes: float | None = None,
        measure: Measure | None = None,
    ) -> None:
        """Prepare to train those parameters of `model` that are not frozen, which `optimizers` has;
        `measure` is called now and then for the curve.
        """
        self._accelerator = Accelerator()
        self._model = model
        self._plan = plan
        self._checkpoint = checkpoint
        self._max_minutes = max_minutes
        self._measure = measure
        self._loss = self._accelerator.prepare(_MeanLoss(model, loss))
        self._optimizers = optimizers
        self._losses: list[float] = []
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._planned_steps = len(plan) // self._accelerator.num_processes
        self.progress = Progress(self._planned_steps)

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that writes files."""
        return bool(self._accelerator.is_main_process)

    def resume(self) -> None:
        """Go on from the checkpoint; raise `TrainError` when it is another run's."""
        state = load_checkpoint(self._checkpoint)
        try:
            outcome = self._model.load_state_dict(state["model"], strict=False)
            if outcome.unexpected_keys or not self._trained().keys() <= state["model"].keys():
                raise ValueError("it has other weights")
            self._optimizers.load_state_dict(state["optimizer"])
            progress = Progress(**state["progress"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise TrainError(
                f"{self._checkpoint}: belongs to another kind of drafter ({error!s:.60}); resume "
                "with the options it was begun with"
            ) from error
        if state["planned_steps"] != self._planned_steps:
            raise TrainError(
                f"{self._checkpoint}: belongs to a run of {state['planned_steps']} steps, this one "
                f"has {self._planned_steps}; resume with the files and options it was begun "
                "with"
            )
        self.progress = progress
        _log.info("resumed at step %d of %d", progress.step, progress.total_steps)

    def run(self, until: int | None = None) -> None:
        """Train to the end, or until a step, and save the checkpoint."""
        progress = self.progress
        saved = measure_at = time.monotonic()
        # The total may become smaller on the way.
        while progress.step < progress.total_steps and progress.step != until:
            self._step()
            self._keep_to_the_limit()
            if progress.step % _LOG_STEPS == 0:
                self._report()
            now = time.monotonic()
            if now - saved > _CHECKPOINT_S:
                self.save()
                saved = now
            if self._measure is not None and self.is_main_process and now >= measure_at:
                measured = self._measure()
                progress.curve.append({"step": progress.step, **measured})
                _log.info("tokens per pass on held-out answers: %s", _listed(measured))
                ended = time.monotonic()
                measure_at = ended + max(_MEASURE_S, (ended - now) / _MEASURING_SHARE)
        self.save()

    def save(self) -> None:
        """Write the checkpoint."""
        if self.is_main_process:
            state = {
                "model": self._trained(),
                "optimizer": self._optimizers.state_dict(),
                "progress": asdict(self.progress),
                "planned_steps": self._planned_steps,
            }
            save_checkpoint(self._checkpoint, state)

    def _trained(self) -> dict[str, Tensor]:
        return {n: x.detach() for n, x in self._model.named_parameters() if x.requires_grad}

    def _step(self) -> None:
        started = time.monotonic()
        progress, accelerator = self.progress, self._accelerator
        mine = progress.step * accelerator.num_processes + accelerator.process_index
        batch = collate(self._plan[mine])
        arrays = [batch.tokens, batch.weights]
        if batch.teacher is not None:
            arrays += [batch.teacher.ids, batch.teacher.probs]
        loss = self._loss(*(torch.from_numpy(array).to(accelerator.device) for array in arrays))
        accelerator.backward(loss)
        nn.utils.clip_grad_norm_(self._model.parameters(), _LARGEST_GRADIENT)
        self._optimizers.step(rate_scale(progress.step, progress.total_steps))
        self._losses.append(float(loss.detach()))
        progress.step += 1
        self._durations.append(time.monotonic() - started)
        progress.elapsed_s += self._durations[-1]

    def _keep_to_the_limit(self) -> None:
        """Shorten the run to what the time allows, at the last step that still can."""
        progress = self.progress
        if self._max_minutes is None or decay_has_begun(progress.step, progress.total_steps):
            return
        left_s = max(0.0, 60 * self._max_minutes - progress.elapsed_s)
        reachable = progress.step + int(left_s / self._pace)
        # Clocks differ between processes, and they must stop together.
        (reachable,) = broadcast_object_list([reachable])
        if reachable < progress.total_steps and decay_has_begun(progress.step, reachable):
            progress.total_steps = reachable
            _log.info("the time is enough for %d steps", progress.total_steps)

    @property
    def _pace(self) -> float:
        """Seconds of a usual step; a machine that slept for a while makes one long one."""
        return median(self._durations)

    def _report(self) -> None:
        progress = self.progress
        loss = sum(self._losses) / len(self._losses)
        self._losses = []
        progress.curve.append({"step": progress.step, "loss": round(loss, 4)})
        _log.info(
            "step %d of %d: loss %.3f, %.2f s a step, %.0f minutes to go",
            progress.step,
            progress.total_steps,
            loss,
            self._pace,
            self._pace * (progress.total_steps - progress.step) / 60,
        )


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


class _MeanLoss(nn.Module):
    """Model and loss as one module, which is what several processes share."""

    def __init__(self, model: Any, loss: str) -> None:
        super().__init__()
        self.model = model
        self._distribution_loss = DISTRIBUTION_LOSSES.get(loss)

    def forward(
        self,
        tokens: Tensor,  # (examples, width)
        weights: Tensor,  # (examples, width)
        ids: Tensor | None = None,  # (examples, width, K)
        probs: Tensor | None = None,  # (examples, width, K)
    ) -> Tensor:
        counted = weights[:, 1:] > 0
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1][counted])
        # Cross-entropy in the logits' own bfloat16: a step is a fifth shorter than in float32.
        if ids is None or probs is None or self._distribution_loss is None:
            losses = cross_entropy(logits, tokens[:, 1:][counted])
        else:
            losses = self._distribution_loss(logits, ids[:, 1:][counted], probs[:, 1:][counted])
        weight = weights[:, 1:][counted]
        return (losses * weight).sum() / weight.sum()
