"""What a drafter's folder holds beside its graph if it can learn (docs/formats.md).

The exporter writes it, the learner trains with it, and whoever runs a drafter that has learned puts
what was learned into the graph with it (`merged_drafter.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt

from .errors import FolderError
from .folder import MANIFEST, ModelFolder, read_json
from .lora import Shape
from .safetensors_file import read_safetensors

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TrainingFiles:
    """The files, and how the graph's weights follow from those in `weights`."""

    step_graph: Path
    evaluation_graph: Path
    weights: Path
    fingerprint: str  # of the weights: what an adapter is an adapter of
    modules: Mapping[str, str]  # module -> its weight's name in `weights`
    merge: Mapping[str, tuple[str, ...]]  # the graph's initializer -> its modules, side by side

    @cached_property
    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The drafter's own weights by name, mapped."""
        return read_safetensors(self.weights)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The modules that can learn, and the shapes (outputs, inputs) of their weights."""
        shapes: dict[str, Shape] = {}
        for module, name in self.modules.items():
            if name not in self.tensors or self.tensors[name].ndim != 2:
                raise FolderError(
                    f"{self.weights}: has no matrix {name!r:.80}, which {module!r:.80} multiplies "
                    "by; export the drafter again"
                )
            outputs, inputs = self.tensors[name].shape
            shapes[module] = outputs, inputs
        return shapes


def open_training_files(folder: ModelFolder) -> TrainingFiles:
    """Return what a drafter learns with; raise `FolderError` if it cannot."""
    files = find_training_files(folder)
    if files is None:
        raise FolderError(
            f"{folder.path}: this drafter cannot learn, since its own weights are not in the "
            "folder; export it again with: edgedraft-export drafter"
        )
    return files


def find_training_files(folder: ModelFolder) -> TrainingFiles | None:
    """Return what a drafter learns with, None if it is not made to; raise `FolderError` for a
    folder that says it is but is not.
    """
    path = folder.path / MANIFEST
    manifest = read_json(path) if path.is_file() else {}
    training = manifest.get("training")
    if training is None:
        return None
    try:
        files = manifest["files"]
        step, evaluation, weights = (
            str(training[key]) for key in ("step_graph", "evaluation_graph", "weights")
        )
        fingerprint = files[weights]["sha256"]
        modules = {str(k): str(v) for k, v in training["modules"].items()}
        merge = {str(k): tuple(map(str, v)) for k, v in training["merge"].items()}
        is_consistent = (
            {step, evaluation} <= files.keys()
            and _SHA256.fullmatch(fingerprint) is not None
            and sorted(x for made_of in merge.values() for x in made_of) == sorted(modules)
        )
    except (AttributeError, IndexError, KeyError, TypeError):
        is_consistent = False
    if not is_consistent:
        raise FolderError(
            f"{path}: 'training' does not say what the drafter learns with; export it again"
        )
    inside = folder.path
    return TrainingFiles(
        inside / step, inside / evaluation, inside / weights, fingerprint, modules, merge
    )
