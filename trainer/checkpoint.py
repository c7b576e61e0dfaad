"""Checkpoints: one file, replaced as a whole, so that a kill at any moment leaves the last one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from edgedraft.runtime.state import write_atomic

from .errors import TrainError

_FILE = "checkpoint.pt"


def run_checkpoint(out: Path, resume: bool) -> Path:
    """Return where the checkpoint of a run lies; raise `TrainError` if there is none to resume, or
    one that would be lost.
    """
    path = out / _FILE
    if path.exists() != resume:
        raise TrainError(
            f"{out}: nothing to resume; leave --resume out"
            if resume
            else f"{out}: holds a run already; go on with --resume, or choose another --out"
        )
    return path


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values; a reader sees the old checkpoint or the new one."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomic(path, buffer.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; raise `TrainError` when it is not one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways
        raise TrainError(
            f"{path}: not a readable checkpoint ({error!s:.80}); delete it to start over"
        ) from error
    if not isinstance(state, dict):
        raise TrainError(f"{path}: not a checkpoint; delete it to start over")
    return state
