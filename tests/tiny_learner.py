"""A drafter of sixty tokens that really learns, without torch: the recorded training step, with
weights that say nothing yet. It has an acceptance head, unless that is not wanted.

    files = tiny_training_files(tmp_path)
    learner = tiny_learner(tmp_path)

Its target has the drafter's tokens and, behind them, tokens that are two of those each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.utils import Extractor

from edgedraft.runtime.adapter_file import AdapterBase
from edgedraft.runtime.adapter_store import AdapterStore
from edgedraft.runtime.training_files import TrainingFiles
from edgedraft.runtime.vocab_map import PairKey, VocabMap
from edgedraft.trainer.adamw import AdamW
from edgedraft.trainer.learner_config import LearnerConfig
from edgedraft.trainer.lesson import Lesson
from edgedraft.trainer.online import OnlineLearner
from tiny_drafter import safetensors

GOLDEN = Path(__file__).parent / "golden"
PIECES, TOKENS = 60, 80
HEAD = "acceptance_head."  # begins the names of its weights and modules
TARGET = "target"  # fingerprint of its ids
QUICK = LearnerConfig(
    optimizer=AdamW(learning_rate=0.02),
    rank=4,
    alpha=8.0,
    update_every=4,
    steps=6,
    positions=60,
    rehearsal_steps=0,
)
REHEARSING = replace(QUICK, rehearsal_steps=5)


def tiny_training_files(folder: Path, *, head: bool = True) -> TrainingFiles:
    """Write the files and return them; weights are small, so that little is likelier than else."""
    folder.mkdir(parents=True, exist_ok=True)
    step, evaluation = folder / "training_step.onnx", folder / "evaluation.onnx"
    for path in (step, evaluation):
        path.write_bytes((GOLDEN / path.name).read_bytes())
    graph = onnx.load(evaluation)
    inputs = [x.name for x in graph.graph.input if head or not x.name.startswith(HEAD)]
    if not head:
        onnx.save(Extractor(graph).extract_model(inputs, ["hit", "prob"]), evaluation)
    weights = folder / "weights.safetensors"
    weights.write_bytes(safetensors({k: x for k, x in _weights().items() if k in inputs}))
    names = [x.removesuffix(".lora_A") for x in inputs if x.endswith(".lora_A")]
    of_head = {"lm_head": "model.embed_tokens.weight"}
    modules = {name: of_head.get(name, f"{name}.weight") for name in names}
    return TrainingFiles(step, evaluation, weights, "f" * 64, modules, {})


def tiny_pair() -> VocabMap:
    """Return a map in which token 60 + i is spelled 3 i, 3 i + 1."""
    spellings = [[i] for i in range(PIECES)] + [[3 * i, 3 * i + 1] for i in range(TOKENS - PIECES)]
    start = np.cumsum([0, *map(len, spellings)])
    nothing: Any = np.zeros(1, np.int64)
    pieces = np.array([piece for spelling in spellings for piece in spelling])
    key = PairKey("draft", TARGET, None, None, ())
    return VocabMap(key, nothing, nothing > 0, start, pieces, *[nothing] * 7)


def tiny_store(folder: Path, files: TrainingFiles) -> AdapterStore:
    """Return the adapters of the pair in a folder."""
    base = AdapterBase(files.fingerprint, "draft", TARGET, files.shapes)
    return AdapterStore(folder / "adapters", base)


def tiny_learner(
    folder: Path, config: LearnerConfig = QUICK, *, head: bool = True
) -> OnlineLearner:
    """Return what learns with all its state in a folder."""
    files = tiny_training_files(folder / "drafter", head=head)
    store = tiny_store(folder, files)
    return OnlineLearner(files, tiny_pair(), store, folder / "lessons.bin", TARGET, config)


def song(number: int, step: int = 7, length: int = 40) -> list[Lesson]:
    """Return a request: a walk through the target's tokens that is easy to learn."""
    tokens = [(number + step * i) % TOKENS for i in range(length + 8)]
    return [Lesson.certain(tokens[:8], tokens[8:])]


def requests(count: int, step: int = 7) -> list[Sequence[Lesson]]:
    """Return so many requests of one kind."""
    return [song(number, step) for number in range(count)]


def _weights() -> dict[str, npt.NDArray[Any]]:
    with np.load(GOLDEN / "evaluation.npz") as file:
        inputs = {x.removeprefix("input/"): file[x] for x in file.files if x.startswith("input/")}
    return {
        name: x.astype(np.float16)
        for name, x in inputs.items()
        if name.endswith(".weight") or (name.startswith(HEAD) and ".lora_" not in name)
    }
