"""`edgedraft-train drafter` and `evaluate`: from files to a folder, and from a folder to numbers.

The result is a Hugging Face folder: `config.json`, `model.safetensors`, `tokenizer.json`, and
`training.json` with the curve, the final measurement and where everything came from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .answer_sources import (
    FEW,
    AnswerSource,
    MappedAnswers,
    as_json,
    learnable,
    measure,
    rates,
)
from .batches import BATCH_TOKENS, plan_batches
from .checkpoint import run_checkpoint
from .drafter import Training
from .errors import TrainError
from .examples import Example, text_examples
from .model import DrafterShape, load_drafter, make_drafter, save_drafter
from .optimizer import drafter_optimizers
from .options import require_positive
from .provenance import describe_training, write_record
from .rounds import Counts
from .simulate import table
from .texts import read_texts
from .tokenizer import load_tokenizer, save_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What to train a drafter on, and how."""

    tokenizer: Path
    texts: tuple[Path, ...]
    answers: tuple[AnswerSource, ...]
    out: Path
    shape: DrafterShape = DrafterShape()
    start: Path | None = None  # a drafter to go on from, in place of a new one of that shape
    loss: str = "ce"
    text_tokens: int | None = None
    epochs: int = 3
    max_minutes: float | None = None
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "epochs", "text_tokens", "max_minutes")


def train_drafter(options: DrafterOptions) -> None:
    """Train a drafter and write its folder."""
    checkpoint = run_checkpoint(options.out, options.resume)
    tokenizer = load_tokenizer(options.tokenizer)
    answers = [MappedAnswers.read(source, tokenizer) for source in options.answers]
    plan = _plan(options, tokenizer, answers)
    model = _first_model(options, tokenizer)
    few = [mapped.first_held_out(FEW) for mapped in answers]
    training = Training(
        model,
        drafter_optimizers(model),
        plan,
        checkpoint,
        loss=options.loss,
        max_minutes=options.max_minutes,
        measure=lambda: rates(measure(model, few)),
    )
    if options.resume:
        training.resume()
    training.run()
    if not training.is_main_process:
        return
    results = measure(model, [mapped.held_out() for mapped in answers])
    save_tokenizer(tokenizer, options.out)
    save_drafter(model, options.out)
    record = {
        "held_out": as_json(results),
        "progress": asdict(training.progress),
        "provenance": _provenance(options),
    }
    write_record(options.out, record)
    _log.info("held-out answers\n%s", table(results))


def evaluate_drafter(
    folder: Path, sources: Sequence[AnswerSource], *, every: bool = False
) -> dict[str, Counts]:
    """Measure a drafter on the held-out answers of every file, or on every answer."""
    model, tokenizer = load_drafter(folder), load_tokenizer(folder)
    answers = [MappedAnswers.read(source, tokenizer) for source in sources]
    return measure(model, answers if every else [mapped.held_out() for mapped in answers])


def _first_model(options: DrafterOptions, tokenizer: Tokenizer) -> Any:
    if options.start is None:
        return make_drafter(options.shape, tokenizer.get_vocab_size(), options.seed)
    if load_tokenizer(options.start).get_vocab() != tokenizer.get_vocab():
        raise TrainError(
            f"{options.start}: drafts in another vocabulary than {options.tokenizer}; "
            "name its own folder as --tokenizer"
        )
    return load_drafter(options.start)


def _plan(
    options: DrafterOptions, tokenizer: Tokenizer, answers: Sequence[MappedAnswers]
) -> list[list[Example]]:
    texts = text_examples(read_texts(options.texts), tokenizer)
    learned = learnable(answers, options.loss)
    most = None if options.text_tokens is None else max(1, options.text_tokens // BATCH_TOKENS)
    plan = plan_batches(texts, learned, options.epochs, options.seed, most)
    if not plan:
        raise TrainError("nothing to train on: give --text or --answers")
    return plan


def _provenance(options: DrafterOptions) -> Mapping[str, Any]:
    files = [options.tokenizer / "tokenizer.json", *options.texts]
    if options.start is not None:
        files.append(options.start / "model.safetensors")
    files += [file for source in options.answers for file in source.files]
    return describe_training(files, options.seed)
