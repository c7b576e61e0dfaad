"""Tiny models with random weights: one for every family and odd part the exporter promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgedraft.runtime import ModelFolder, OnnxModel

VOCAB = 304
CONTEXT = 64
WINDOW = 6
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **values}}


def _llama(**values: Any) -> Any:
    return hf.LlamaConfig(**{**_SIZES, **values})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama, tied head, dynamic rope": lambda: _llama(tie_word_embeddings=True, **_rope("dynamic")),
    "llama, one kv head, linear rope": lambda: _llama(num_key_value_heads=1, **_rope("linear")),
    "llama, no grouping, llama3 rope": lambda: _llama(
        num_key_value_heads=4,
        **_rope(
            "llama3",
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama, biases, yarn rope": lambda: _llama(
        attention_bias=True, mlp_bias=True, **_rope("yarn", original_max_position_embeddings=16)
    ),
    "mistral, sliding window": lambda: hf.MistralConfig(**_SIZES, sliding_window=WINDOW),
    "qwen2, sliding window in one layer": lambda: hf.Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**{**_SIZES, "tie_word_embeddings": True}, head_dim=32),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **{**_SIZES, "tie_word_embeddings": True, "num_key_value_heads": 1},
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=5.0,
    ),
}


def make_model(config: Any) -> Any:
    """Return a model in evaluation mode whose norms and biases are random, too."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def save_folder(model: Any, folder: Path) -> Path:
    """Save a model as a Hugging Face folder with a byte tokenizer of 259 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def reference(model: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Return transformers' logits, shape (tokens, vocab)."""
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    return logits


def open_graph(graph: ir.Model, folder: Path, vocab_size: int = VOCAB) -> OnnxModel:
    """Save a graph and open it with the runtime."""
    ir.save(graph, folder / "decoder.onnx", external_data="decoder.onnx.data")
    return OnnxModel(
        ModelFolder(
            path=folder,
            name="tiny",
            graph=folder / "decoder.onnx",
            tokenizer=folder / "tokenizer.json",
            chat_template=None,
            vocab_size=vocab_size,
            context_length=CONTEXT,
            bos_token_id=1,
            eos_token_ids=(2,),
            exporter="edgedraft",
            precision="fp32",
            head_dim=None,
            fingerprint="",
        )
    )
