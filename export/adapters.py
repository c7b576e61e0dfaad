"""Adapters to and from PEFT's checkpoint folders, `adapter_config.json` and
`adapter_model.safetensors`.

Both say W + (alpha / rank) * B @ A, so tensors pass as they are, under other names:

    base_model.model.MODULE.lora_A.weight  <->  MODULE.lora_A

What an acceptance head learned is not about a module that PEFT knows: it lies beside the checkpoint
in `acceptance_adapter.safetensors`, under our names, and comes back from there.

What PEFT can express and an adapter file cannot is refused. A tied head is like any other module:
PEFT adds to the head and leaves the embedding alone, and so does the device. Only PEFT's
`merge_and_unload` would change both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from edgedraft.runtime.adapter_file import (
    SUFFIX,
    Adapter,
    AdapterBase,
    manifest_path,
    read_adapter,
    write_adapter,
)
from edgedraft.runtime.folder import open_model_folder, open_target_folder, read_json
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.provenance import describe_code
from edgedraft.runtime.safetensors_file import read_safetensors
from edgedraft.runtime.state import write_atomic
from edgedraft.runtime.tokenizer_file import TokenIds, load_tokenizer
from edgedraft.runtime.training_files import TrainingFiles, open_training_files

from .acceptance_head import PREFIX
from .errors import ExportError

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_ACCEPTANCE = "acceptance_adapter.safetensors"
_RECORD = "training.json"  # as edgedraft-train writes it; another trainer's folder has none
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+\.lora_[AB])\.weight")
_COPY = re.compile(r"(.+)\.base_layer\.weight")
_PACKAGES = ("edgedraft", "onnxruntime", "numpy", "safetensors")
# Settings under which a checkpoint says something else than W + scale * B @ A for all of its
# modules alike. "none" and whatever is false say the usual.
_REFUSED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "bias",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# The other ways to begin change the drafter's own weights, or which of the two tensors is learned.
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A drafter that can learn and the target that it learns for."""

    files: TrainingFiles
    base: AdapterBase

    @classmethod
    def open(cls, drafter: Path, target: Path) -> Pair:
        """Open both folders; raise `FolderError` for a drafter that cannot learn."""
        folder = open_model_folder(drafter)
        files = open_training_files(folder)
        ids = TokenIds(load_tokenizer(open_target_folder(target).tokenizer))
        return cls(files, AdapterBase.of(folder, files, ids))


def adapter_from_peft(checkpoint: Path, pair: Pair, out: Path) -> Path:
    """Write the adapter file of a PEFT checkpoint; return its path, with its suffix.

    Raises `ExportError` for what is not a LoRA of this drafter, `AdapterError` for tensors that do
    not fit.
    """
    out = out if out.suffix == SUFFIX else out.with_name(out.name + SUFFIX)
    _refuse_taken(out, manifest_path(out))
    rank, alpha = _read_config(checkpoint / _CONFIG)
    record = read_json(checkpoint / _RECORD) if (checkpoint / _RECORD).exists() else {}
    if record.get("base", pair.base.weights) != pair.base.weights:
        raise ExportError(
            f"{checkpoint}: was trained on another drafter ({record['base']!s:.12}, this one is "
            f"{pair.base.weights:.12}); export it with the drafter that it was trained on"
        )
    tensors = _read_tensors(checkpoint / _WEIGHTS, pair.files)
    if (beside := checkpoint / _ACCEPTANCE).is_file():
        tensors |= {name: x.astype(np.float32) for name, x in read_safetensors(beside).items()}
    lora = Lora(rank, alpha, tensors)
    provenance = {"training": record.get("provenance"), "export": describe_code(_PACKAGES)}
    with _writing(out):
        write_adapter(out, Adapter(lora, provenance=provenance), pair.base)
    return out


def peft_from_adapter(adapter: Path, pair: Pair, out: Path) -> Path:
    """Write an adapter file as a folder that PEFT opens, and return the folder."""
    _refuse_taken(out / _CONFIG, out / _WEIGHTS, out / _ACCEPTANCE)
    learned = read_adapter(adapter, pair.base)
    lora = learned.lora
    beside = {name: x for name, x in lora.tensors.items() if name.startswith(PREFIX)}
    weights = {f"{_PREFIX}{k}.weight": x for k, x in lora.tensors.items() if k not in beside}
    record = {"base": pair.base.weights, "provenance": dict(learned.provenance)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(x for x in lora.modules if not x.startswith(PREFIX)),
        "bias": "none",
    }
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / _WEIGHTS, save(weights, metadata={"format": "pt"}))
        if beside:
            write_atomic(out / _ACCEPTANCE, save(beside))
        write_atomic(out / _RECORD, _json(record))
        write_atomic(out / _CONFIG, _json(config))  # last: without it, nothing opens the folder
    return out


def _read_config(path: Path) -> tuple[int, float]:
    """Return rank and alpha; raise `ExportError` for any other kind of PEFT."""
    if not path.is_file():
        raise ExportError(
            f"{path.parent}: has no {path.name}; expected a folder that PEFT's save_pretrained "
            "wrote"
        )
    config = read_json(path)
    if (kind := config.get("peft_type")) != "LORA":
        raise ExportError(f"{path}: peft_type is {kind!r:.40}, expected 'LORA'")
    for key in _REFUSED:
        if (value := config.get(key)) and value != "none":
            raise ExportError(
                f"{path}: {key} is {value!r:.60}, which an adapter file cannot express; train "
                "without it"
            )
    if (beginning := config.get("init_lora_weights")) not in _BEGINNINGS:
        raise ExportError(
            f"{path}: init_lora_weights is {beginning!r:.40}, which changes the drafter itself; "
            "train with the default"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise ExportError(f"{path}: r and lora_alpha must be > 0, got {rank!r} and {alpha!r}")
    # Rank-stabilised LoRA multiplies by alpha / sqrt(rank) (arXiv 2312.03732).
    return rank, alpha * math.sqrt(rank) if config.get("use_rslora") else float(alpha)


def _read_tensors(path: Path, files: TrainingFiles) -> dict[str, npt.NDArray[np.float32]]:
    """Return a checkpoint's tensors under our names."""
    if not path.is_file():
        raise ExportError(
            f"{path.parent}: has no {path.name}; save the checkpoint again as safetensors"
        )
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, array in read_safetensors(path).items():
        ours = name.removeprefix(_PREFIX)
        if copy := _COPY.fullmatch(ours):
            _check_copy(path, copy[1], array, files)
        elif match := _LORA.fullmatch(ours):
            module = match[1].rpartition(".")[0]
            if module not in files.modules:
                raise ExportError(
                    f"{path}: changes {module!r:.80}, which this drafter cannot learn; "
                    f"target_modules can be {', '.join(_kinds(files))}"
                )
            tensors[match[1]] = array.astype(np.float32)
        else:
            raise ExportError(
                f"{path}: holds {name!r:.80}, which is not a LoRA of a linear layer; train with "
                f"target_modules among {', '.join(_kinds(files))}"
            )
    return tensors


def _check_copy(path: Path, module: str, array: npt.NDArray[Any], files: TrainingFiles) -> None:
    """PEFT puts the weight of a head that learns beside its LoRA, though it is as it was."""
    own = files.tensors.get(files.modules.get(module, ""))
    if own is None or not np.array_equal(array.astype(np.float16), own):
        raise ExportError(
            f"{path}: its copy of {module!r:.80} is not this drafter's; export it with the drafter "
            "that it was trained on"
        )


def _kinds(files: TrainingFiles) -> list[str]:
    """Return what PEFT would call the modules that can learn, in any layer."""
    known = (module for module in files.modules if not module.startswith(PREFIX))
    return list(dict.fromkeys(module.rpartition(".")[2] for module in known))


def _refuse_taken(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise ExportError(f"{path}: is there already; remove it or choose another --out")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"{out}: cannot be written ({error}); choose another --out") from error


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
