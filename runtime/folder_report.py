"""The facts of a target folder, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .folder import MANIFEST, ModelFolder, check_files
from .graph_contract import GraphContract, discover, probe
from .ort_session import SessionConfig, open_session


def cache_bytes_per_token(folder: ModelFolder, config: SessionConfig | None = None) -> int:
    """Return what one token takes in the cache; raise `FolderError` when there is no decoder."""
    return _bytes_per_token(_contract(folder, config)[1])


def describe_folder(folder: ModelFolder) -> dict[str, Any]:
    """Return everything known about a folder as a JSON object.

    Raises `FolderError` when a file differs from the manifest's checksum.
    """
    check_files(folder)
    session, contract = _contract(folder)
    contract = probe(session, contract, str(folder.graph))
    has_manifest = (folder.path / MANIFEST).is_file()
    return {
        "name": folder.name,
        "path": str(folder.path),
        "exporter": folder.exporter,
        "precision": folder.precision,
        "fingerprint": folder.fingerprint,
        "checksums": "verified" if has_manifest else "none: another exporter's folder",
        "vocab_size": folder.vocab_size or contract.logits_width,
        "context_length": folder.context_length,
        "layers": len(contract.cache) // 2,
        "kv_heads": contract.cache[0].num_heads,
        "head_dim": contract.cache[0].head_dim,
        "cache_bytes_per_token": _bytes_per_token(contract),
        "cache_in_place": contract.in_place,
        "can_verify_drafts": contract.every_row,
        "obstacle": contract.obstacle,
        "can_verify_trees": contract.in_place and contract.has("attention_bias"),
        "bos_token_id": folder.bos_token_id,
        "eos_token_ids": list(folder.eos_token_ids),
        "chat_template": folder.chat_template is not None,
        "files": {
            path.relative_to(folder.path).as_posix(): path.stat().st_size
            for path in sorted(folder.path.rglob("*"))
            if path.is_file()
        },
        "quality": dict(folder.quality),
        "provenance": dict(folder.provenance),
    }


def folder_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield `describe_folder`'s facts line by line."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            continue
        shown = {True: "yes", False: "no", None: "none"}.get(value) if _is_flag(value) else value
        yield f"{name.replace('_', ' '):24} {_inline(shown)}"
    for name in ("files", "quality", "provenance"):
        table = list(_flatten(facts[name]))
        if table:
            yield f"\n{name}"
        for key, value in table:
            yield f"  {key:34} {_size(value) if name == 'files' else _inline(value)}"


def _contract(
    folder: ModelFolder, config: SessionConfig | None = None
) -> tuple[Any, GraphContract]:
    session = open_session(folder.graph, config or SessionConfig())
    return session, discover(session, str(folder.graph), folder.head_dim)


def _bytes_per_token(contract: GraphContract) -> int:
    return sum(t.num_heads * t.head_dim * t.dtype.itemsize for t in contract.cache)


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value


def _inline(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_inline(v) for v in value) or "none"
    return str(value)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:10.2f} MB"
