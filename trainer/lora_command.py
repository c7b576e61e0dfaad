"""`edgedraft-train lora`: what a drafter should learn for one target, as a PEFT checkpoint.

The folder holds `adapter_config.json` and `adapter_model.safetensors`, which PEFT opens and
`edgedraft-export adapter` turns into an adapter file, and `training.json`: the curve, what was
measured without and with the LoRA, the checksum of the drafter's weights, and where everything came
from. The drafter stays as it is.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from .answer_sources import (
    FEW,
    AnswerSource,
    MappedAnswers,
    as_json,
    learnable,
    measure,
    rates,
)
from .batches import plan_batches
from .checkpoint import run_checkpoint
from .drafter import Training
from .errors import TrainError
from .model import checksum, load_drafter
from .optimizer import lora_optimizers
from .options import require_positive
from .provenance import describe_training, write_record
from .simulate import table
from .tokenizer import FILE, load_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """What to train a LoRA on, and how; `modules` are PEFT's short names, the same in every
    layer.
    """

    drafter: Path
    answers: tuple[AnswerSource, ...]
    out: Path
    modules: tuple[str, ...]
    rank: int = 32
    alpha: float = 32.0
    loss: str = "ce"
    learning_rate: float = 1e-3
    epochs: int = 3
    max_minutes: float | None = None
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "rank", "alpha", "learning_rate", "epochs", "max_minutes")
        if len({source.target.resolve() for source in self.answers}) > 1:
            raise TrainError("a LoRA is learned for one target: give its answers only")


def train_lora(options: LoraOptions) -> None:
    """Train a LoRA and write its folder."""
    checkpoint = run_checkpoint(options.out, options.resume)
    tokenizer = load_tokenizer(options.drafter)
    answers = [MappedAnswers.read(source, tokenizer) for source in options.answers]
    plan = plan_batches([], learnable(answers, options.loss), options.epochs, options.seed)
    if not plan:
        raise TrainError("nothing to train on: all answers are held out")
    drafter = load_drafter(options.drafter)
    base = checksum(drafter)
    learner = _add_lora(drafter, options)
    few = [mapped.first_held_out(FEW) for mapped in answers]
    training = Training(
        drafter,
        lora_optimizers(drafter, options.learning_rate),
        plan,
        checkpoint,
        loss=options.loss,
        max_minutes=options.max_minutes,
        measure=lambda: rates(measure(drafter, few)),
    )
    if options.resume:
        training.resume()
    training.run()
    if not training.is_main_process:
        return
    held_out = [mapped.held_out() for mapped in answers]
    with learner.disable_adapter():
        before = measure(drafter, held_out)
    after = measure(drafter, held_out)
    # By itself it would put a copy of the head's own weight beside what was added to it.
    learner.save_pretrained(str(options.out), save_embedding_layers=False)
    record = {
        "base": base,
        "held_out_before": as_json(before),
        "held_out": as_json(after),
        "progress": asdict(training.progress),
        "provenance": _provenance(options),
    }
    write_record(options.out, record)
    _log.info("held-out answers without\n%s\nand with it\n%s", table(before), table(after))


def _add_lora(drafter: Any, options: LoraOptions) -> PeftModel:
    """Put a LoRA into a drafter, in place, and freeze the rest."""
    torch.manual_seed(options.seed)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # any number will do
        target_modules=list(options.modules),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # What is added to a tied head changes no embedding, as on the device.
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`")
        learner: PeftModel = get_peft_model(drafter, config)
    return learner


def _provenance(options: LoraOptions) -> Mapping[str, Any]:
    files = [options.drafter / name for name in ("config.json", FILE)]
    files += sorted(options.drafter.glob("*.safetensors"))
    files += [file for source in options.answers for file in source.files]
    return describe_training(files, options.seed)
