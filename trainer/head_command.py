"""`edgedraft-train head`: an acceptance head for a drafter, beside its weights.

The drafter is frozen, so its rows are computed once and the head learns from them in minutes. The
result is the drafter's folder, its files as they were, with `acceptance_head.safetensors` and
`acceptance_head.json`: what was measured on held-out answers, and where everything came from.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgedraft.runtime.state import write_atomic

from .acceptance_head import FILE, AcceptanceHead, acceptance_loss, load_head, save_head
from .answer_sources import AnswerSource, MappedAnswers
from .errors import TrainError
from .head_report import head_table, measure_head
from .head_rows import LABELS, Rows, rows_of
from .model import load_drafter
from .optimizer import head_optimizers, rate_scale
from .options import require_positive
from .provenance import describe_training
from .tokenizer import load_tokenizer

RECORD = "acceptance_head.json"
_BATCH_ROWS = 1024
_REPORTS = 10
_REPORT_ANSWERS = 500  # answers between two remarks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What to train an acceptance head on, and how."""

    drafter: Path
    answers: tuple[AnswerSource, ...]
    out: Path
    labels: str = "right"
    rejection_weight: float = 1.0
    learning_rate: float = 3e-3
    epochs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "rejection_weight", "learning_rate", "epochs")
        if self.labels not in LABELS:
            raise ValueError(f"labels must be one of {', '.join(LABELS)}, got {self.labels!r}")
        if self.out.exists() and any(self.out.iterdir()):
            raise TrainError(f"{self.out}: has files in it; name an empty or new folder")


def train_head(options: HeadOptions) -> None:
    """Train a head and write the drafter's folder with it."""
    model, tokenizer = load_drafter(options.drafter), load_tokenizer(options.drafter)
    answers = [MappedAnswers.read(source, tokenizer) for source in options.answers]
    learned = collect(model, answers, held_out=False)
    held_out = collect(model, answers, held_out=True).in_rounds()
    learned.labels(options.labels)  # an answer without logits is found before the work
    head = fit(learned, options)
    _copy_drafter(options.drafter, options.out)
    save_head(head, options.out)
    head = load_head(options.out, held_out.hidden.shape[1])  # rounded, as it will be used
    measured = measure_head(head, held_out)
    record = {
        "labels": options.labels,
        "rejection_weight": options.rejection_weight,
        "rows": len(learned.right),
        "held_out": measured,
        "provenance": describe_training(_data(options), options.seed),
    }
    write_atomic(options.out / RECORD, json.dumps(record, indent=2).encode() + b"\n")
    _log.info("held-out rounds\n%s", head_table(measured))


def collect(model: Any, sources: Sequence[MappedAnswers], *, held_out: bool) -> Rows:
    """Return the rows of all answers that are learned from, or of those held out."""
    wanted = [
        (answer, source.vocab_map)
        for source in sources
        for answer in source.answers
        if answer.is_held_out == held_out and answer.prompt_ids  # no row is before the first piece
    ]
    parts = []
    for count, (answer, vocab_map) in enumerate(wanted, 1):
        parts.append(rows_of(model, answer, vocab_map))
        if count % _REPORT_ANSWERS == 0:
            _log.info("read %d of %d answers", count, len(wanted))
    return Rows.join(parts)


def fit(rows: Rows, options: HeadOptions) -> AcceptanceHead:
    """Train a head on rows."""
    torch.manual_seed(options.seed)
    labels = torch.from_numpy(rows.labels(options.labels))
    hidden, certainty = torch.from_numpy(rows.hidden), torch.from_numpy(rows.certainty)
    head = AcceptanceHead(hidden.shape[1])
    optimizers = head_optimizers(head, options.learning_rate)
    per_epoch = -(-len(labels) // _BATCH_ROWS)
    total, losses = options.epochs * per_epoch, []
    for epoch in range(options.epochs):
        order = torch.randperm(len(labels))
        for number in range(per_epoch):
            step = epoch * per_epoch + number
            batch = order[number * _BATCH_ROWS :][:_BATCH_ROWS]
            logits = head(hidden[batch].float(), certainty[batch])
            loss = acceptance_loss(logits, labels[batch], options.rejection_weight)
            torch.autograd.backward(loss)
            optimizers.step(rate_scale(step, total))
            losses.append(float(loss.detach()))
            if not np.isfinite(losses[-1]):
                raise TrainError(f"the loss is {losses[-1]}: choose a lower --lr")
            if (step + 1) % max(1, total // _REPORTS) == 0:
                _log.info("step %d of %d: loss %.4f", step + 1, total, np.mean(losses))
                losses = []
    return head.eval()


def _copy_drafter(drafter: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(drafter.iterdir()):
        if file.is_file():
            shutil.copyfile(file, out / file.name)


def _data(options: HeadOptions) -> list[Path]:
    weights = sorted(options.drafter.glob("*.safetensors"))
    files = [options.drafter / "config.json", *(x for x in weights if x.name != FILE)]
    return files + [file for source in options.answers for file in source.files]
