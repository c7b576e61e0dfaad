"""`edgedraft-train drafter` and `evaluate`: from files to a folder, and from a folder to numbers.

The result is a Hugging Face folder: `config.json`, `model.safetensors`, `tokenizer.json`, and
`training.json` with the curve, the final measurement and where everything came from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgedraft.runtime.state import write_atomic
from edgedraft.runtime.vocab_map import VocabMap

from .answers import Answer, read_answers
from .batches import BATCH_TOKENS, plan_batches
from .drafter import Training
from .errors import TrainError
from .examples import Example, answer_examples, text_examples
from .model import DrafterShape, load_drafter, make_drafter, save_drafter
from .provenance import describe_training
from .simulate import Counts, Simulator, table
from .target import Target
from .texts import read_texts
from .tokenizer import load_tokenizer, save_tokenizer

_log = logging.getLogger(__name__)
_CHECKPOINT = "checkpoint.pt"
_RECORD = "training.json"
_FEW = 12  # answers of a data set that are measured while training


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """A file of answers and the folder of the target that gave them."""

    file: Path
    target: Path

    @classmethod
    def parse(cls, argument: str) -> AnswerSource:
        """Read FILE:TARGET_FOLDER; raise `TrainError` for anything else."""
        file, _, target = argument.rpartition(":")
        if not file or not target:
            raise TrainError(f"--answers takes FILE:TARGET_FOLDER, got {argument!r}")
        return cls(Path(file), Path(target))


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What to train a drafter on, and how."""

    tokenizer: Path
    texts: tuple[Path, ...]
    answers: tuple[AnswerSource, ...]
    out: Path
    shape: DrafterShape = DrafterShape()
    loss: str = "ce"
    text_tokens: int | None = None
    epochs: int = 3
    max_minutes: float | None = None
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "text_tokens", "max_minutes"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")


def train_drafter(options: DrafterOptions) -> None:
    """Train a drafter and write its folder."""
    checkpoint = options.out / _CHECKPOINT
    if checkpoint.exists() != options.resume:
        raise TrainError(
            f"{options.out}: nothing to resume; leave --resume out"
            if options.resume
            else f"{options.out}: holds a run already; go on with --resume, or choose another --out"
        )
    tokenizer = load_tokenizer(options.tokenizer)
    answers = [_MappedAnswers.read(source, tokenizer) for source in options.answers]
    plan = _plan(options, tokenizer, answers)
    model = make_drafter(options.shape, tokenizer.get_vocab_size(), options.seed)
    few = [mapped.first_held_out(_FEW) for mapped in answers]
    training = Training(
        model,
        plan,
        checkpoint,
        loss=options.loss,
        max_minutes=options.max_minutes,
        measure=lambda: {name: round(c.tau, 3) for name, c in _measure(model, few).items()},
    )
    if options.resume:
        training.resume()
    training.run()
    if not training.is_main_process:
        return
    results = _measure(model, [mapped.held_out() for mapped in answers])
    save_tokenizer(tokenizer, options.out)
    save_drafter(model, options.out)
    record = {
        "held_out": {name: asdict(c) | {"tau": c.tau} for name, c in results.items()},
        "progress": asdict(training.progress),
        "provenance": _provenance(options),
    }
    write_atomic(options.out / _RECORD, json.dumps(record, indent=2).encode() + b"\n")
    _log.info("held-out answers\n%s", table(results))


def evaluate_drafter(folder: Path, sources: Sequence[AnswerSource]) -> dict[str, Counts]:
    """Measure a drafter on the held-out answers of every file."""
    model, tokenizer = load_drafter(folder), load_tokenizer(folder)
    return _measure(model, [_MappedAnswers.read(s, tokenizer).held_out() for s in sources])


@dataclass(frozen=True, slots=True)
class _MappedAnswers:
    """Answers of one target, and its tokens in the drafter's."""

    answers: list[Answer]
    vocab_map: VocabMap

    @classmethod
    def read(cls, source: AnswerSource, tokenizer: Tokenizer) -> _MappedAnswers:
        target = Target(source.target)
        answers = read_answers(source.file, target)
        _log.info("%s: %d answers", source.file, len(answers))
        return cls(answers, target.vocab_map(tokenizer))

    def held_out(self) -> _MappedAnswers:
        return _MappedAnswers([a for a in self.answers if a.is_held_out], self.vocab_map)

    def first_held_out(self, count: int) -> _MappedAnswers:
        """Return the first held-out answers of every data set."""
        held_out = self.held_out().answers
        names = {answer.data_set for answer in held_out}
        few = [[a for a in held_out if a.data_set == name][:count] for name in sorted(names)]
        return _MappedAnswers([answer for part in few for answer in part], self.vocab_map)


def _plan(
    options: DrafterOptions, tokenizer: Tokenizer, answers: Sequence[_MappedAnswers]
) -> list[list[Example]]:
    teach = options.loss != "ce"
    texts = text_examples(read_texts(options.texts), tokenizer)
    learned = [
        example
        for mapped in answers
        for example in answer_examples(mapped.answers, mapped.vocab_map, teach=teach)
    ]
    if teach and not any(example.teacher for example in learned):
        raise TrainError(f"--loss {options.loss} needs answers with top_k_ids and top_k_logits")
    most = None if options.text_tokens is None else max(1, options.text_tokens // BATCH_TOKENS)
    plan = plan_batches(texts, learned, options.epochs, options.seed, most)
    if not plan:
        raise TrainError("nothing to train on: give --text or --answers")
    return plan


def _measure(model: Any, parts: Sequence[_MappedAnswers]) -> dict[str, Counts]:
    results: dict[str, Counts] = {}
    for part in parts:
        for name, counts in Simulator(model, part.vocab_map).measure(part.answers).items():
            results.setdefault(name, Counts()).add(counts)
    return results


def _provenance(options: DrafterOptions) -> Mapping[str, Any]:
    files = [options.tokenizer / "tokenizer.json", *options.texts]
    for source in options.answers:
        files += [source.file, source.target / "tokenizer.json"]
    return describe_training(files, options.seed)
