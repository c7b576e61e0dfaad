"""The drafter: a small Llama with tied embeddings, in Hugging Face's folder format."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from edgedraft.runtime.state import write_atomic

from .errors import TrainError
from .tokenizer import END_ID

_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Sizes of a drafter."""

    layers: int = 3
    hidden: int = 384
    heads: int = 6
    mlp: int = 1024

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "mlp"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden must be a multiple of twice the heads, got {self.hidden} and {self.heads}"
            )


def make_drafter(shape: DrafterShape, vocab_size: int, seed: int) -> Any:
    """Return a drafter with random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden,
            intermediate_size=shape.mlp,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=_CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=None,
        )
    )


def save_drafter(model: Any, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, in half precision: a drafter is to be small, and
    its int8 graph loses more.
    """
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    config.pop("_name_or_path", None)  # where it was read from is nobody's business
    write_atomic(folder / "model.safetensors", _half_precision(model))
    write_atomic(folder / "config.json", json.dumps(config, indent=2).encode() + b"\n")


def checksum(model: Any) -> str:
    """Return the SHA-256 of a drafter's weights as `save_drafter` writes them. A device holds the
    same file, so it says of which drafter something was learned.
    """
    return hashlib.sha256(_half_precision(model)).hexdigest()


def load_drafter(folder: Path) -> Any:
    """Read a drafter; raise `TrainError` when the folder holds none."""
    try:
        return LlamaForCausalLM.from_pretrained(
            str(folder), local_files_only=True, dtype=torch.float32
        ).eval()
    except Exception as error:  # transformers raises whatever it met
        raise TrainError(
            f"{folder}: no readable drafter ({error!s:.80}); make one with: edgedraft-train drafter"
        ) from error


def _half_precision(model: Any) -> bytes:
    weights = {
        name: parameter.detach().to("cpu", torch.float16).contiguous()
        for name, parameter in model.named_parameters()  # a tied head is not named again
    }
    return save(weights, metadata={"format": "pt"})
