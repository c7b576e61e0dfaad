"""Where a trained artefact comes from, stored beside it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgedraft.runtime.folder import file_sha256
from edgedraft.runtime.provenance import describe_code
from edgedraft.runtime.state import write_atomic

_PACKAGES = ("edgedraft", "torch", "transformers", "accelerate", "peft", "tokenizers", "numpy")


def describe_training(data: Iterable[Path], seed: int) -> dict[str, Any]:
    """Return command line, code, versions, seed and the checksum of every data file as JSON."""
    return {
        **describe_code(_PACKAGES),
        "python": platform.python_version(),
        "system": platform.platform(),
        "seed": seed,
        "data_sha256": {
            f"{file.parent.name}/{file.name}": file_sha256(file)
            for path in data
            for file in _files(path)
        },
    }


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write `training.json`: how an artefact became what it is."""
    write_atomic(folder / "training.json", json.dumps(record, indent=2).encode() + b"\n")


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
