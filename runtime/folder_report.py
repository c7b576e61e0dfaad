"""The facts of a target folder, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .folder import MANIFEST, TargetFolder, check_files
from .graph_contract import discover, probe
from .ort_session import SessionConfig, open_session


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What the graph itself says."""

    layers: int
    kv_heads: int
    head_dim: int
    logits_width: int
    in_place: bool  # cache rows are written in place
    every_row: bool  # several proposed tokens can be verified in one pass
    trees: bool  # siblings too
    cache_bytes_per_token: int


def graph_facts(folder: TargetFolder, config: SessionConfig | None = None) -> GraphFacts:
    """Open the graph and read its contract; raise `FolderError` when it is no decoder."""
    session = open_session(folder.graph, config or SessionConfig())
    where = str(folder.graph)
    contract = probe(session, discover(session, where, folder.head_dim), where)
    caches = contract.cache
    return GraphFacts(
        layers=len(caches) // 2,
        kv_heads=caches[0].num_heads,
        head_dim=caches[0].head_dim,
        logits_width=contract.logits_width,
        in_place=contract.in_place,
        every_row=contract.every_row,
        trees=contract.in_place and contract.has("attention_bias"),
        cache_bytes_per_token=sum(t.num_heads * t.head_dim * t.dtype.itemsize for t in caches),
    )


def describe_folder(folder: TargetFolder) -> dict[str, Any]:
    """Return everything known about a folder as a JSON object.

    Raises `FolderError` when a file differs from the manifest's checksum.
    """
    check_files(folder)
    facts = graph_facts(folder)
    has_manifest = (folder.path / MANIFEST).is_file()
    return {
        "name": folder.name,
        "path": str(folder.path),
        "exporter": folder.exporter,
        "precision": folder.precision,
        "fingerprint": folder.fingerprint,
        "checksums": "verified" if has_manifest else "none: another exporter's folder",
        "vocab_size": folder.vocab_size or facts.logits_width,
        "context_length": folder.context_length,
        "layers": facts.layers,
        "kv_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "cache_bytes_per_token": facts.cache_bytes_per_token,
        "in_place_cache": facts.in_place,
        "verifies_several_tokens": facts.every_row,
        "verifies_trees": facts.trees,
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
