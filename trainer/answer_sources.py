"""Files of answers as a drafter reads them: each with the target that gave them, and that target's
tokens in the drafter's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgedraft.runtime.vocab_map import VocabMap

from .answers import Answer, read_answers
from .errors import TrainError
from .examples import Example, answer_examples
from .rounds import Counts
from .simulate import Simulator
from .target import Target

FEW = 12  # answers of a data set that are measured while training

_log = logging.getLogger(__name__)


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

    @property
    def files(self) -> list[Path]:
        """What a result depends on."""
        return [self.file, self.target / "tokenizer.json"]


@dataclass(frozen=True, slots=True)
class MappedAnswers:
    """Answers of one target, and its tokens in the drafter's."""

    answers: list[Answer]
    vocab_map: VocabMap

    @classmethod
    def read(cls, source: AnswerSource, tokenizer: Tokenizer) -> MappedAnswers:
        """Read a file; raise `TrainError` unless it holds answers."""
        target = Target(source.target)
        answers = read_answers(source.file, target)
        _log.info("%s: %d answers", source.file, len(answers))
        return cls(answers, target.vocab_map(tokenizer))

    def held_out(self) -> MappedAnswers:
        """Return what is never trained on."""
        return MappedAnswers([a for a in self.answers if a.is_held_out], self.vocab_map)

    def first_held_out(self, count: int) -> MappedAnswers:
        """Return the first held-out answers of every data set."""
        held_out = self.held_out().answers
        names = {answer.data_set for answer in held_out}
        few = [[a for a in held_out if a.data_set == name][:count] for name in sorted(names)]
        return MappedAnswers([answer for part in few for answer in part], self.vocab_map)


def learnable(sources: Iterable[MappedAnswers], loss: str) -> list[Example]:
    """Return one epoch of all answers; raise `TrainError` where the loss misses its teacher."""
    teach = loss != "ce"
    examples = [
        example
        for mapped in sources
        for example in answer_examples(mapped.answers, mapped.vocab_map, teach=teach)
    ]
    if teach and not any(example.teacher for example in examples):
        raise TrainError(f"--loss {loss} needs answers with top_k_ids and top_k_logits")
    return examples


def measure(model: Any, sources: Sequence[MappedAnswers]) -> dict[str, Counts]:
    """Simulate rounds over all answers; see `Simulator.measure` for the names."""
    results: dict[str, Counts] = {}
    for mapped in sources:
        for name, counts in Simulator(model, mapped.vocab_map).measure(mapped.answers).items():
            results.setdefault(name, Counts()).add(counts)
    return results


def as_json(results: dict[str, Counts]) -> dict[str, Any]:
    """Return what was measured as a record holds it."""
    return {name: asdict(counts) | {"tau": counts.tau} for name, counts in results.items()}


def rates(results: dict[str, Counts]) -> dict[str, float]:
    """Return tokens per target pass as a curve holds them."""
    return {name: round(counts.tau, 3) for name, counts in results.items()}
