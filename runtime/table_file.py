"""Arrays in one file that is mapped into memory, not read.

    magic, SHA-256 of the rest | length of the header | header (JSON) | tables, aligned to 8 bytes

The header says what the tables are called, hold and belong to. A file counts only as a whole: it is
written atomically, and the checksum is compared when it is opened.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import StateError
from .state import write_atomic

_MAGIC = b"EDTABLE\n"
_BODY = len(_MAGIC) + hashlib.sha256().digest_size
_ALIGNMENT = 8
_REMEDY = "delete it, and the next use makes it again"

Tables: TypeAlias = dict[str, npt.NDArray[Any]]


def flat(arrays: Iterable[npt.NDArray[Any]], kind: type) -> npt.NDArray[Any]:
    """Return arrays one behind the other, as a table holds them."""
    return np.concatenate([np.zeros(0, kind), *(array.ravel() for array in arrays)])


def write_tables(path: Path, facts: Mapping[str, Any], tables: Tables) -> None:
    """Write tables and the JSON value that tells what they are; raise `StateError` when refused."""
    shapes = {name: [table.dtype.str, table.size] for name, table in tables.items()}
    header = json.dumps({"facts": facts, "tables": shapes}).encode()
    parts = [len(header).to_bytes(_ALIGNMENT, "little"), header]
    parts += [table.tobytes() for table in tables.values()]
    body = b"".join(part + bytes(-len(part) % _ALIGNMENT) for part in parts)
    try:
        write_atomic(path, _MAGIC + hashlib.sha256(body).digest() + body, private=True)
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written ({error}); choose a folder that can"
        ) from error


def read_tables(path: Path, facts: Mapping[str, Any]) -> Tables:
    """Map the tables of a file; raise `StateError` unless it is whole and says exactly `facts`."""
    try:
        with path.open("rb") as stream:
            if stream.read(len(_MAGIC)) != _MAGIC:
                raise StateError(f"{path}: not a file of tables; {_REMEDY}")
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StateError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
    body = memoryview(content)[_BODY:]
    if hashlib.sha256(body).digest() != content[len(_MAGIC) : _BODY]:
        raise StateError(f"{path}: damaged, its checksum does not fit; {_REMEDY}")
    size = int.from_bytes(body[:_ALIGNMENT], "little")
    header = json.loads(bytes(body[_ALIGNMENT : _ALIGNMENT + size]))
    # Through JSON, so that a tuple equals the list it is stored as.
    if header["facts"] != json.loads(json.dumps(facts)):
        raise StateError(f"{path}: made by another version or for something else; {_REMEDY}")
    tables: Tables = {}
    offset = _ALIGNMENT + size
    for name, (dtype, count) in header["tables"].items():
        offset += -offset % _ALIGNMENT
        tables[name] = np.frombuffer(body, dtype, count, offset)
        offset += tables[name].nbytes
    return tables
