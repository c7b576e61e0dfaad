"""A drafter with what it learned inside its weights, so that decoding pays nothing for it.

    weights of the folder + (alpha / rank) * B @ A  ->  int8, as the exporter does it  ->  session

Only what the adapter changes is made anew; everything else stays the folder's, mapped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .adapter_store import active_lora
from .folder import ModelFolder
from .lora import Lora
from .onnx_model import OnnxModel
from .ort_session import SessionConfig
from .requantize import quantize_columns
from .tokenizer_file import TokenIds
from .training_files import TrainingFiles, open_training_files
from .vocab_map import VocabMap

_SCALES = ".scales"  # ends the name of the initializer that holds the scales of another


def open_drafter(
    folder: ModelFolder,
    config: SessionConfig,
    *,
    tokenizer_size: int | None = None,
    lora: Lora | None = None,
) -> OnnxModel:
    """Open a drafter, as shipped or with what it learned; raise `FolderError` if it cannot be."""
    initializers = merged_initializers(open_training_files(folder), lora) if lora else None
    model = OnnxModel(folder, config, tokenizer_size=tokenizer_size, initializers=initializers)
    model.single_rows = True  # its bits decide nothing
    return model


def open_current_drafter(
    folder: ModelFolder,
    config: SessionConfig,
    vocab_map: VocabMap,
    ids: TokenIds,
    kept: Path | None,
) -> OnnxModel:
    """Open a drafter with what it has learned for the target with these ids, whose state is kept in
    the folder `kept`; as shipped where that is None.
    """
    return open_drafter(
        folder,
        config,
        tokenizer_size=vocab_map.direct_token.size,
        lora=active_lora(kept, folder, ids) if kept else None,
    )


def merged_initializers(files: TrainingFiles, lora: Lora) -> dict[str, npt.NDArray[Any]]:
    """Return those initializers of the drafter's graph that an adapter changes."""
    learned = set(lora.modules)
    initializers: dict[str, npt.NDArray[Any]] = {}
    for name, modules in files.merge.items():
        if learned.isdisjoint(modules):
            continue
        parts = [quantize_columns(_merged(files, lora, module).T) for module in modules]
        initializers[name] = np.concatenate([integers for integers, _ in parts], axis=1)
        initializers[name + _SCALES] = np.concatenate([scales for _, scales in parts])
    return initializers


def _merged(files: TrainingFiles, lora: Lora, module: str) -> npt.NDArray[np.float32]:
    weight = files.tensors[files.modules[module]]
    if module not in lora.modules:
        return weight.astype(np.float32)
    return lora.merged(weight, module)
