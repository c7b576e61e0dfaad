"""Writes a model folder, all of it or nothing.

Everything is built in a hidden folder beside the destination, synced, and renamed into place, so
that a folder that exists is complete and an interrupted export leaves an older one as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgedraft.runtime.errors import FolderError
from edgedraft.runtime.folder import (
    DRAFTER_FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    MARK,
    TARGET_FORMAT,
    file_sha256,
    read_json,
)

from .errors import ExportError
from .sources import Source

GRAPH = "decoder.onnx"
WEIGHTS = "decoder.onnx.data"
_TOKENIZER = "tokenizer.json"
_PAGE_BYTES = 4096  # a weight that begins on a page can be mapped wherever pages are mapped
# What a device may replace has to lie outside the graph, shapes within.
_SMALLEST_OUTSIDE = 64  # bytes
_TEMPLATE = "chat_template.jinja"


@contextmanager
def staged_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Give a folder to write into; it becomes `out` when the block ends without an error.

    Raises ExportError where `out` has files already, unless it is a former export and `force`.
    """
    _check_destination(out, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ExportError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        stage.chmod(0o755)
        yield stage
        _sync(stage)
        _put_in_place(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_graph(graph: ir.Model, folder: Path) -> None:
    """Write the graph, and its weights into a file of their own that onnxruntime can map."""
    for name in (GRAPH, WEIGHTS):
        (folder / name).unlink(missing_ok=True)
    ir.save(
        graph,
        folder / GRAPH,
        external_data=WEIGHTS,
        size_threshold_bytes=_SMALLEST_OUTSIDE,
        alignment=_PAGE_BYTES,
        align_threshold=_PAGE_BYTES // 4,
    )


def write_manifest(
    folder: Path,
    source: Source,
    *,
    is_drafter: bool,
    precision: str,
    context_length: int,
    quality: dict[str, Any],
    provenance: dict[str, Any],
    training: dict[str, Any] | None = None,
) -> None:
    """Write tokenizer, chat template and manifest beside a graph written before."""
    source.tokenizer.save(str(folder / _TOKENIZER))
    for seed in source.seeds if is_drafter else ():
        shutil.copy(seed, folder / seed.name)
    if source.chat_template is not None:
        (folder / _TEMPLATE).write_text(source.chat_template, encoding="utf-8")
    manifest = {
        "format": DRAFTER_FORMAT if is_drafter else TARGET_FORMAT,
        "format_version": FORMAT_VERSION,
        "name": source.name,
        "architecture": type(source.model).__name__,
        "precision": precision,
        "graph": GRAPH,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(folder.iterdir())
            if path.name != MANIFEST
        },
        "vocab_size": source.vocab_size,
        "context_length": context_length,
        "bos_token_id": source.bos_token_id,
        "eos_token_ids": list(source.eos_token_ids),
        "mark_token_id": source.tokenizer.token_to_id(MARK) if is_drafter else None,
        "tokenizer": _TOKENIZER,
        "chat_template": _TEMPLATE if source.chat_template is not None else None,
        **({"training": training} if training else {}),
        "quality": quality,
        "provenance": provenance,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _check_destination(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ExportError(f"{out}: is a file; name a folder")
    if not any(out.iterdir()):
        return
    try:
        is_export = read_json(out / MANIFEST).get("format") in (TARGET_FORMAT, DRAFTER_FORMAT)
    except FolderError:
        is_export = False
    if not is_export:
        raise ExportError(f"{out}: has files that are no export; name an empty or new folder")
    if not force:
        raise ExportError(f"{out}: holds an export already; --force replaces it")


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(stage: Path, out: Path) -> None:
    if not out.exists():
        os.rename(stage, out)
        return
    # A folder with files cannot be renamed over: the former one steps aside first.
    former = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    os.rename(out, former)
    try:
        os.rename(stage, out)
    except BaseException:
        if not out.exists():
            os.rename(former, out)
        raise
    shutil.rmtree(former, ignore_errors=True)
