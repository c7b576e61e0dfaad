"""A model folder, target or drafter: what is in it, checked when it is opened.

A folder with `manifest.json` is EdgeDraft's own (docs/formats.md); anything else is tried as
another exporter's (`stock_folder.py`). Small files are compared with their checksums at every
opening, the weights by size; `check_files` compares everything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import FolderError

MANIFEST = "manifest.json"
TARGET_FORMAT = "edgedraft-target"
DRAFTER_FORMAT = "edgedraft-drafter"
FORMAT_VERSION = 1
SEED_SUFFIX = ".ngrams"  # n-gram tables in a drafter's folder, each for targets with certain ids
MARK = "<|mark|>"  # the drafter's token for a target's special one, in its tokenizer
_ALWAYS_HASHED_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Everything needed to run a model, whoever exported it."""

    path: Path
    name: str
    graph: Path
    tokenizer: Path
    chat_template: str | None
    vocab_size: int | None  # None: the tokenizer decides
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    exporter: str
    precision: str
    head_dim: int | None  # None: the graph's cache inputs say it
    fingerprint: str  # changes with the weights, the graph or the tokenizer
    is_drafter: bool = False  # made to draft: answers of its own are not worth reading
    mark_token_id: int | None = None  # what a drafter reads in place of a target's special token
    quality: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


def open_target_folder(path: str | Path) -> ModelFolder:
    """Open a target folder; raise `FolderError` in one line when it cannot be used."""
    folder = open_model_folder(path)
    if folder.is_drafter:
        raise FolderError(f"{path}: holds a drafter, which answers nothing; give it as --drafter")
    return folder


def open_model_folder(path: str | Path) -> ModelFolder:
    """Open a folder for drafting: any target's will do, if it is small beside the one it drafts
    for. Raises `FolderError` in one line when it cannot be used.
    """
    folder = Path(path)
    try:
        return _open(folder)
    except OSError as error:
        raise FolderError(
            f"{folder}: cannot be read ({error.strerror}); check the names and permissions in it"
        ) from error


def _open(folder: Path) -> ModelFolder:
    if folder.is_file() and folder.suffix == ".onnx":
        from .stock_folder import open_stock_folder

        return open_stock_folder(folder.parent, graph=folder)
    if not folder.is_dir():
        raise FolderError(
            f"{folder}: no such folder; make one with: edgedraft-export target smollm2 --out "
            f"{folder}"
        )
    if (folder / MANIFEST).is_file():
        return _open_own(folder)
    from .stock_folder import open_stock_folder

    return open_stock_folder(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `FolderError` for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FolderError(
            f"{path}: cannot be read as JSON ({error}); export the folder again"
        ) from error
    if not isinstance(value, dict):
        raise FolderError(
            f"{path}: holds a {type(value).__name__}, expected an object; export again"
        )
    return value


def read_text(path: Path) -> str:
    """Read a text file; raise `FolderError` for anything else."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FolderError(f"{path}: is not UTF-8 text; export the folder again") from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_files(folder: ModelFolder) -> None:
    """Compare every file with the manifest's checksum; raise `FolderError` at the first that
    differs.
    """
    if (folder.path / MANIFEST).is_file():
        files = _Manifest(folder.path).files()
        for name in files:
            _check_file(folder.path, name, files[name], always_hash=True)


class _Manifest:
    """Typed access to a manifest; every complaint names the key."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MANIFEST
        self._values = read_json(self._path)

    def get(self, key: str, kind: type | tuple[type, ...], optional: bool = False) -> Any:
        value = self._values.get(key)
        if value is None and optional:
            return None
        # bool is an int to isinstance, and never what a manifest means by a number
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FolderError(f"{self._path}: {key!r} is {value!r:.80}; export the folder again")
        return value

    def file(self, key: str, optional: bool = False) -> str | None:
        name = self.get(key, str, optional)
        if name is not None and name not in self.files():
            raise FolderError(f"{self._path}: {key!r} names {name!r}, which 'files' does not list")
        return name  # type: ignore[no-any-return]

    def files(self) -> dict[str, dict[str, Any]]:
        files = self.get("files", dict)
        for name, entry in files.items():
            inside = Path(name).name == name and name not in ("", ".", "..")
            if not inside or not isinstance(entry, dict):
                raise FolderError(
                    f"{self._path}: 'files' has a bad entry {name!r:.80}; export again"
                )
        return files  # type: ignore[no-any-return]

    def token_ids(self, key: str, size: int) -> tuple[int, ...]:
        ids = self.get(key, list)
        if not all(type(i) is int and 0 <= i < size for i in ids):
            raise FolderError(
                f"{self._path}: {key!r} must list ids in [0, {size}), got {ids!r:.80}; export again"
            )
        return tuple(ids)

    def token_id(self, key: str, size: int) -> int | None:
        token = self.get(key, int, optional=True)
        if token is not None and not 0 <= token < size:
            raise FolderError(
                f"{self._path}: {key!r} must be in [0, {size}), got {token!r:.80}; export again"
            )
        return token  # type: ignore[no-any-return]

    def positive(self, key: str) -> int:
        value: int = self.get(key, int)
        if value < 1:
            raise FolderError(f"{self._path}: {key!r} must be >= 1, got {value}")
        return value


def _open_own(folder: Path) -> ModelFolder:
    manifest = _Manifest(folder)
    if (kind := manifest.get("format", str)) not in (TARGET_FORMAT, DRAFTER_FORMAT):
        raise FolderError(
            f"{folder}: a folder of format {kind!r:.40}, expected {TARGET_FORMAT!r} or "
            f"{DRAFTER_FORMAT!r}"
        )
    if (version := manifest.positive("format_version")) > FORMAT_VERSION:
        raise FolderError(
            f"{folder}: format version {version}, this EdgeDraft reads up to {FORMAT_VERSION}; "
            "update EdgeDraft"
        )
    graph, tokenizer = manifest.file("graph"), manifest.file("tokenizer")
    assert graph is not None and tokenizer is not None
    template = manifest.file("chat_template", optional=True)
    files = manifest.files()
    for name, entry in files.items():
        _check_file(folder, name, entry)
    vocab_size = manifest.positive("vocab_size")
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {files[name]['sha256']}\n".encode())
    return ModelFolder(
        path=folder,
        name=manifest.get("name", str),
        graph=folder / graph,
        tokenizer=folder / tokenizer,
        chat_template=read_text(folder / template) if template else None,
        vocab_size=vocab_size,
        context_length=manifest.positive("context_length"),
        bos_token_id=manifest.token_id("bos_token_id", vocab_size),
        eos_token_ids=manifest.token_ids("eos_token_ids", vocab_size),
        exporter="edgedraft",
        precision=manifest.get("precision", str),
        head_dim=None,
        fingerprint=digest.hexdigest(),
        is_drafter=kind == DRAFTER_FORMAT,
        mark_token_id=manifest.token_id("mark_token_id", vocab_size),
        quality=manifest.get("quality", dict, optional=True) or {},
        provenance=manifest.get("provenance", dict, optional=True) or {},
    )


def _check_file(folder: Path, name: str, entry: dict[str, Any], always_hash: bool = False) -> None:
    path = folder / name
    if not path.is_file():
        raise FolderError(f"{path}: missing, but the manifest lists it; export the folder again")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise FolderError(
            f"{path}: {size} bytes, the manifest says {entry.get('bytes')}; copy or export the "
            "folder again"
        )
    if not isinstance(entry.get("sha256"), str):
        raise FolderError(f"{folder / MANIFEST}: no checksum for {name!r}; export the folder again")
    if (always_hash or size <= _ALWAYS_HASHED_BYTES) and file_sha256(path) != entry["sha256"]:
        raise FolderError(
            f"{path}: its checksum differs from the manifest's; copy or export it again"
        )
