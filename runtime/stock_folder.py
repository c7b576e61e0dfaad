"""Folders written by other exporters, read as they are: optimum, onnx-community, onnxruntime-genai.

They have no manifest of ours, so the facts come from their configuration files, and the graph's
contract from the graph (`graph_contract.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import FolderError
from .folder import ModelFolder, file_sha256, read_json, read_text

_GRAPHS = (
    "model.onnx",
    "decoder_model_merged.onnx",
    "decoder_with_past_model.onnx",
    "onnx/model.onnx",
    "onnx/decoder_model_merged.onnx",
)
# What configurations call the most positions of a text.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def open_stock_folder(folder: Path, graph: Path | None = None) -> ModelFolder:
    """Open a stock folder, or one particular graph of it; raise `FolderError` when it is none."""
    root = folder
    if not (root / "tokenizer.json").is_file() and (root.parent / "tokenizer.json").is_file():
        root = folder.parent  # onnx-community keeps its graphs in onnx/
    genai = _optional_json(root / "genai_config.json")
    config = _optional_json(root / "config.json")
    generation = _optional_json(root / "generation_config.json")
    if not genai and not config:
        raise FolderError(
            f"{folder}: neither manifest.json nor config.json nor genai_config.json; "
            "make a target folder with edgedraft-export target"
        )
    model = genai.get("model", {}) if isinstance(genai.get("model", {}), dict) else {}
    decoder = model.get("decoder", {}) if isinstance(model.get("decoder", {}), dict) else {}
    graph = graph or _find_graph(root, decoder.get("filename"))
    tokenizer = root / "tokenizer.json"
    if not tokenizer.is_file():
        raise FolderError(
            f"{tokenizer}: missing; save the model's fast tokenizer there "
            "(transformers: tokenizer.save_pretrained)"
        )
    sources = (generation, model, config)
    given = [model.get("context_length"), *(config.get(key) for key in _CONTEXT_KEYS)]
    context = next((x for x in given if x is not None), None)
    if not isinstance(context, int) or context < 2:
        raise FolderError(
            f"{root}: the context length is {context!r}; config.json must give "
            "max_position_embeddings"
        )
    return ModelFolder(
        path=root,
        name=root.resolve().name,
        graph=graph,
        tokenizer=tokenizer,
        chat_template=_chat_template(root),
        vocab_size=None,
        context_length=context,
        bos_token_id=_first_id(s.get("bos_token_id") for s in sources),
        eos_token_ids=_all_ids(s.get("eos_token_id") for s in sources),
        exporter="onnxruntime-genai" if genai else "optimum",
        precision="as exported",
        head_dim=decoder.get("head_size"),
        fingerprint=_fingerprint(graph, tokenizer),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _find_graph(root: Path, named: object) -> Path:
    candidates = [named] if isinstance(named, str) else list(_GRAPHS)
    for name in candidates:
        if (root / name).is_file():
            return root / name
    others = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.onnx"))
    hint = (
        f"name one of its graphs instead: {', '.join(others[:5])}"
        if others
        else "it holds no .onnx file"
    )
    raise FolderError(f"{root}: no {' or '.join(candidates)}; {hint}")


def _chat_template(root: Path) -> str | None:
    path = root / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = _optional_json(root / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and 0 <= v < 2**31]


def _first_id(values: Iterable[object]) -> int | None:
    return next((ids[0] for v in values if (ids := _ids(v))), None)


def _all_ids(values: Iterable[object]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for v in values for i in _ids(v)))


def _fingerprint(graph: Path, tokenizer: Path) -> str:
    """Hash the graph and the tokenizer; external weights count by name and size, since they may be
    gigabytes.
    """
    digest = hashlib.sha256((file_sha256(graph) + file_sha256(tokenizer)).encode())
    for path in sorted(graph.parent.glob(f"{graph.name}*")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()
