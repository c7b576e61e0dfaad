"""Reads `.safetensors` files, mapped into memory.

    length of the header, 8 bytes | header, JSON | tensors

Half and single precision are views of the file; bfloat16, which numpy lacks, is widened to float32.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import FolderError

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


def read_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a file by name; raise `FolderError` unless it is whole."""
    try:
        with path.open("rb") as stream:
            content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise FolderError(f"{path}: cannot be read ({error}); copy or export it again") from error
    body = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        header: Any = (
            json.loads(bytes(content[_LENGTH_BYTES:body])) if body <= len(content) else None
        )
        entries = {name: entry for name, entry in header.items() if name != _METADATA}
    except (ValueError, RecursionError, AttributeError) as error:
        raise FolderError(
            f"{path}: not a whole safetensors file; copy or export it again"
        ) from error
    return {name: _tensor(path, name, entry, content[body:]) for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: Any, body: memoryview) -> npt.NDArray[Any]:
    try:
        kind, shape = entry["dtype"], entry["shape"]
        start, stop = entry["data_offsets"]
        if kind not in _DTYPES:
            raise FolderError(
                f"{path}: {name!r:.80} is of type {kind!r:.20}, expected {', '.join(_DTYPES)}"
            )
        part = body[start:stop]
        array: npt.NDArray[Any] = np.frombuffer(part, _DTYPES[kind]).reshape(shape)
        is_whole = min([start, *shape]) >= 0 and len(part) == stop - start
    except (KeyError, OverflowError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise FolderError(f"{path}: {name!r:.80} is not all there; copy or export the file again")
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
