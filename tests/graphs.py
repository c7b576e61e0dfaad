"""Tiny decoders for real onnxruntime sessions, and the folders they live in.

Every graph is a random-weight transformer of two layers whose greedy output wanders and then falls
into loops, so that copied drafts are sometimes right. The same seed gives the same weights. The
contracts are the ones that `graph_contract.py` reads:

    own      EdgeDraft's: in-place cache, seqlens_k, attention_bias, logit_rows
    genai    onnxruntime-genai's: in-place cache, attention_mask, symbolic head size
    concat   optimum's decoder-with-past: plain attention, past and present concatenated

    target = open_target_folder(tiny_target(tmp_path))       # EdgeDraft's own folder
    target = open_target_folder(tiny_target(tmp_path, contract="concat"))
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from edgedraft.runtime import ModelFolder, OnnxModel, SessionConfig

TINY_VOCAB_SIZE = 290  # of `byte_level_tokenizer`

Contract = Literal["own", "genai", "concat"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = (
    "n d|t h|th e|Ġ th|Ġth e|i n|a n|e r|o n|Ġ a|i s|r e|an d|Ġ s|Ġ w|e n|o r|Ġ t|Ġt o|in g|o u|"
    "Ġ i|Ġ in|l l|e s|Ġ c|Ġ b|Ġ f|o f|Ġ of|Ġa nd"
)
_PROBE_DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


@dataclass(frozen=True)
class DecoderSpec:
    """What a tiny decoder looks like; every field is cheap to vary in a test."""

    contract: Contract = "own"
    vocab_size: int = 40
    padded_columns: int = 0  # logit columns behind the vocabulary, made very likely on purpose
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    max_positions: int = 1024
    seed: int = 0
    attention_bias: bool = True  # own: whether trees can be verified
    logit_rows: bool = True  # own: whether the caller chooses the rows
    position_ids: bool = True
    lone_logits_differ: bool = False  # own: where a single row is chosen
    last_row_only: bool = False
    recurrent_state: bool = False  # adds a state input that no rollback can shorten
    symbolic_head_dim: bool | None = None  # None: as the contract's exporter does it
    cache_dtype: Literal["float32", "float16"] = "float32"
    temperature: float = 0.35  # divides the logits: lower is more decided
    near_ties: bool = False  # logits that differ in their last bits only
    acceptance: bool = False  # a tenth of the largest logit, through a sigmoid, for every row

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim


class _Graph:
    """Nodes, weights and interface of a graph in the making."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        return self._weight(np.asarray(value, dtype))

    def random(self, *shape: int, scale: float = 1.0) -> str:
        return self._weight((self._rng.standard_normal(shape) * scale).astype(np.float32))

    def op(
        self,
        kind: str,
        *inputs: str,
        output: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        return self.ops(
            kind, *inputs, outputs=[output or self._name()], domain=domain, **attributes
        )[0]

    def ops(
        self, kind: str, *inputs: str, outputs: list[str], domain: str = "", **attributes: Any
    ) -> list[str]:
        self.nodes.append(
            helper.make_node(kind, list(inputs), outputs, domain=domain, **attributes)
        )
        return outputs

    def names(self, count: int) -> list[str]:
        return [self._name() for _ in range(count)]

    def model_bytes(self) -> bytes:
        graph = helper.make_graph(
            self.nodes, "tiny-decoder", self.inputs, self.outputs, self.weights
        )
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=9)
        return bytes(model.SerializeToString(deterministic=True))

    def _weight(self, value: npt.NDArray[Any]) -> str:
        name = self._name()
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"t{self._count}"


def decoder_graph(spec: DecoderSpec | None = None, **changes: Any) -> bytes:
    """Return a serialised decoder; `changes` are fields of `DecoderSpec`."""
    spec = _changed(spec, changes)
    g = _Graph(spec.seed)
    g.input("input_ids", TensorProto.INT64, (1, "rows"))
    width = spec.width
    hidden = g.op("Gather", g.random(spec.vocab_size, width), "input_ids")
    if spec.contract == "concat":
        feeds = _concat_inputs(g, spec)
        table = g.random(spec.max_positions, width, scale=0.3)
        hidden = g.op("Add", hidden, g.op("Gather", table, feeds["positions"]))
    else:
        feeds = _in_place_inputs(g, spec)
    for layer in range(spec.layers):
        attend = _concat_attention if spec.contract == "concat" else _fused_attention
        hidden = g.op("Add", hidden, attend(g, spec, feeds, layer, _norm(g, width, hidden)))
        inner = g.op("MatMul", _norm(g, width, hidden), g.random(width, 2 * width, scale=0.13))
        hidden = g.op(
            "Add",
            hidden,
            g.op("MatMul", g.op("Relu", inner), g.random(2 * width, width, scale=0.15)),
        )
    if spec.recurrent_state:
        state = g.input("past_conv.0", TensorProto.FLOAT, (1, width))
        g.op(
            "Add",
            state,
            g.op("ReduceMean", hidden, g.const([1], np.int64), keepdims=0),
            output="present_conv.0",
        )
        g.output("present_conv.0", TensorProto.FLOAT, (1, width))
    if spec.contract == "own" and spec.logit_rows:
        rows = g.input("logit_rows", TensorProto.INT64, ("logit_rows",))
        hidden = g.op("Gather", hidden, rows, axis=1)
    if spec.last_row_only:
        hidden = g.op("Gather", hidden, g.const([-1], np.int64), axis=1)
    head = g.random(width, spec.vocab_size, scale=width**-0.5 / spec.temperature)
    if spec.near_ties:
        # All columns are one, up to a few last bits.
        tied = g.random(width, 1, scale=width**-0.5)
        head = g.op("Add", tied, g.op("Mul", head, g.const(2e-7)))
    logits = g.op("MatMul", _norm(g, width, hidden), head)
    if spec.padded_columns:
        # A reader that samples padding would choose these at once.
        pad = g.const([0] * 5 + [spec.padded_columns], np.int64)
        logits = g.op("Pad", logits, pad, g.const(1e4))
    if spec.lone_logits_differ:
        alone = g.op("Equal", g.op("Shape", "logit_rows"), g.const([1], np.int64))
        alone = g.op("Cast", alone, to=TensorProto.FLOAT)
        logits = g.op("Add", logits, g.op("Mul", alone, g.const(1e-3)))
    g.op("Identity", logits, output="logits")
    if spec.acceptance:
        # Axes of both kinds are reduced, since an acceptance is told for each row and nothing else.
        best = g.op("ReduceMax", logits, g.const([0, 2], np.int64), keepdims=0)
        g.op("Sigmoid", g.op("Mul", best, g.const(0.1)), output="acceptance")
        g.output("acceptance", TensorProto.FLOAT, ("logit_rows",))
    columns = spec.vocab_size + spec.padded_columns
    g.output("logits", TensorProto.FLOAT, (1, "logit_rows", columns))
    return g.model_bytes()


def _changed(spec: DecoderSpec | None, changes: dict[str, Any]) -> DecoderSpec:
    fields = {**(spec.__dict__ if spec else {}), **changes}
    return DecoderSpec(**fields)


def _norm(g: _Graph, width: int, x: str) -> str:
    return g.op("LayerNormalization", x, g.const(np.ones(width)), axis=-1, epsilon=1e-5)


def _cache_name(spec: DecoderSpec, layer: int, kind: str) -> tuple[str, str]:
    return f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"


def _cache(g: _Graph, spec: DecoderSpec, layer: int, kind: str) -> tuple[str, str]:
    symbolic = spec.symbolic_head_dim
    if symbolic is None:
        symbolic = spec.contract == "genai"
    heads = spec.heads if spec.contract == "concat" else spec.kv_heads
    dtype = _PROBE_DTYPES[spec.cache_dtype]
    past, present = _cache_name(spec, layer, kind)
    head_dim = "head_size" if symbolic else spec.head_dim
    g.input(past, dtype, (1, heads, "past_length", head_dim))
    g.output(present, dtype, (1, heads, "total_length", head_dim))
    return past, present


def _in_place_inputs(g: _Graph, spec: DecoderSpec) -> dict[str, str]:
    feeds = {"positions": "", "bias": ""}
    if spec.position_ids:
        feeds["positions"] = g.input("position_ids", TensorProto.INT64, (1, "rows"))
    if spec.contract == "own":
        feeds["last"] = g.input("seqlens_k", TensorProto.INT32, (1,))
        feeds["total"] = g.input("total_sequence_length", TensorProto.INT32, ())
        if spec.attention_bias:
            bias = g.input("attention_bias", TensorProto.FLOAT, (1, 1, "rows", "total"))
            feeds["bias"] = bias
    else:
        mask = g.input("attention_mask", TensorProto.INT64, (1, "total"))
        total = g.op("ReduceSum", mask, g.const([1], np.int64), keepdims=0)
        last = g.op("Sub", total, g.const([1], np.int64))
        feeds["last"] = g.op("Cast", last, to=TensorProto.INT32)
        length = g.op("Gather", g.op("Shape", mask), g.const(1, np.int64))
        feeds["total"] = g.op("Cast", length, to=TensorProto.INT32)
    angles = np.outer(
        np.arange(spec.max_positions), 100.0 ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
    )
    dtype = np.dtype(spec.cache_dtype)
    feeds["cos"], feeds["sin"] = g.const(np.cos(angles), dtype), g.const(np.sin(angles), dtype)
    return feeds


def _fused_attention(
    g: _Graph, spec: DecoderSpec, feeds: dict[str, str], layer: int, x: str
) -> str:
    width, kv_width = spec.width, spec.kv_heads * spec.head_dim
    bias = feeds["bias"]
    half = spec.cache_dtype == "float16"

    def project(columns: int) -> str:
        y = g.op("MatMul", x, g.random(width, columns, scale=1.6 * width**-0.5))
        return g.op("Cast", y, to=TensorProto.FLOAT16) if half else y

    query, key, value = project(width), project(kv_width), project(kv_width)
    if half and bias:
        bias = g.op("Cast", bias, to=TensorProto.FLOAT16)
    past_key, present_key = _cache(g, spec, layer, "key")
    past_value, present_value = _cache(g, spec, layer, "value")
    inputs = [query, key, value, past_key, past_value, feeds["last"], feeds["total"]]
    inputs += [feeds["cos"], feeds["sin"], feeds["positions"], bias]
    while not inputs[-1]:
        inputs.pop()
    attended, *_ = g.ops(
        "GroupQueryAttention",
        *inputs,
        outputs=[*g.names(1), present_key, present_value],
        domain="com.microsoft",
        num_heads=spec.heads,
        kv_num_heads=spec.kv_heads,
        do_rotary=1,
    )
    if half:
        attended = g.op("Cast", attended, to=TensorProto.FLOAT)
    return g.op("MatMul", attended, g.random(width, width, scale=1.2 * width**-0.5))


def _concat_inputs(g: _Graph, spec: DecoderSpec) -> dict[str, str]:
    mask = g.input("attention_mask", TensorProto.INT64, (1, "total"))
    one = g.const(1, np.int64)
    total = g.op("Gather", g.op("Shape", mask), one)
    rows = g.op("Gather", g.op("Shape", "input_ids"), one)
    zero = g.const(0, np.int64)
    row_positions = g.op("Range", g.op("Sub", total, rows), total, one)
    if spec.position_ids:
        positions = g.input("position_ids", TensorProto.INT64, (1, "rows"))
    else:
        positions = g.op("Unsqueeze", row_positions, g.const([0], np.int64))
    columns = g.op("Range", zero, total, one)
    seen = g.op("LessOrEqual", columns, g.op("Unsqueeze", row_positions, g.const([1], np.int64)))
    attended = g.op("And", seen, g.op("Cast", mask, to=TensorProto.BOOL))
    bias = g.op("Where", attended, g.const(0.0), g.const(-np.inf))
    return {"positions": positions, "bias": bias}


def _concat_attention(
    g: _Graph, spec: DecoderSpec, feeds: dict[str, str], layer: int, x: str
) -> str:
    width = spec.width
    shape = g.const([1, -1, spec.heads, spec.head_dim], np.int64)

    def project() -> str:
        y = g.op("MatMul", x, g.random(width, width, scale=1.6 * width**-0.5))
        return g.op("Transpose", g.op("Reshape", y, shape), perm=[0, 2, 1, 3])

    query, key, value = project(), project(), project()
    past_key, present_key = _cache(g, spec, layer, "key")
    past_value, present_value = _cache(g, spec, layer, "value")
    g.op("Concat", past_key, key, axis=2, output=present_key)
    g.op("Concat", past_value, value, axis=2, output=present_value)
    scores = g.op("MatMul", query, g.op("Transpose", present_key, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.const(spec.head_dim**-0.5))
    weights = g.op("Softmax", g.op("Add", scores, feeds["bias"]), axis=-1)
    attended = g.op("Transpose", g.op("MatMul", weights, present_value), perm=[0, 2, 1, 3])
    attended = g.op("Reshape", attended, g.const([1, -1, width], np.int64))
    return g.op("MatMul", attended, g.random(width, width, scale=1.2 * width**-0.5))


def byte_level_tokenizer(*, bos: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer of 256 bytes, some merges and three special tokens.

    With `bos` it puts `<|endoftext|>` before every text, as many tokenizers do.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a, b in (m.split(" ") for m in _MERGES.split("|"))]
    pieces = [*alphabet, *dict.fromkeys(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A",
            special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))],
        )
    return tokenizer


def sentencepiece_tokenizer(*, llama2_decoder: bool = False) -> Tokenizer:
    """Return a SentencePiece-like BPE tokenizer: Metaspace, `<0xNN>` byte fallback, `<s>` in front.

    `llama2_decoder` spells the decoder as Llama 2's files do.
    """
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?:;'\"-0123456789"
    merges = ["▁ t", "h e", "▁t he", "▁ a", "i n", "▁ s", "e r", "▁ ▁", "r e", "o n", "▁ i", "▁i t"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters]
    pairs = [(a, b) for a, b in (m.split(" ") for m in merges)]
    pieces += [a + b for a, b in pairs]
    tokenizer = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            pairs,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    if llama2_decoder:
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.ByteFallback(),
                decoders.Metaspace(replacement="▁", prepend_scheme="first", split=False),
            ]
        )
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def write_target_folder(
    path: Path,
    *,
    graph: bytes | None = None,
    tokenizer: Tokenizer | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    context_length: int = 512,
    **manifest: Any,
) -> Path:
    """Write EdgeDraft's own folder (docs/formats.md); `manifest` overrides keys, None drops one."""
    tokenizer = tokenizer or byte_level_tokenizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    path.mkdir(parents=True, exist_ok=True)
    (path / "decoder.onnx").write_bytes(graph or decoder_graph(vocab_size=size))
    tokenizer.save(str(path / "tokenizer.json"))
    names = ["decoder.onnx", "tokenizer.json"]
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        names.append("chat_template.jinja")
    values = {
        "format": "edgedraft-target",
        "format_version": 1,
        "name": "tiny",
        "architecture": "TinyForCausalLM",
        "precision": "fp32",
        "graph": "decoder.onnx",
        "files": {name: file_entry(path / name) for name in names},
        "vocab_size": size,
        "context_length": context_length,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_ids": [
            i for t in ("<|im_end|>", "</s>") if (i := tokenizer.token_to_id(t)) is not None
        ],
        "tokenizer": "tokenizer.json",
        "chat_template": "chat_template.jinja" if chat_template is not None else None,
        "quality": {},
        "provenance": {"command": "tests/graphs.py"},
    }
    values = {k: v for k, v in {**values, **manifest}.items() if v is not None}
    (path / "manifest.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return path


def file_entry(path: Path) -> dict[str, Any]:
    """Return what a manifest says about a file."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def tiny_target(path: Path, *, context_length: int = 512, **changes: Any) -> Path:
    """Write a complete folder of the kind that the contract's exporter writes, and return it.

    `changes` are fields of `DecoderSpec`; `contract` "genai" gives a genai_config.json, "concat"
    optimum's config.json.
    """
    tokenizer = byte_level_tokenizer()
    changes.setdefault("vocab_size", tokenizer.get_vocab_size(with_added_tokens=True))
    spec = _changed(None, changes)
    graph = decoder_graph(spec)
    if spec.contract == "own":
        return write_target_folder(
            path, graph=graph, tokenizer=tokenizer, context_length=context_length
        )
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.onnx").write_bytes(graph)
    tokenizer.save(str(path / "tokenizer.json"))
    eos, bos = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    template = {"chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(template), encoding="utf-8")
    if spec.contract == "genai":
        decoder = {"filename": "model.onnx", "head_size": spec.head_dim}
        model = {"bos_token_id": bos, "context_length": context_length, "eos_token_id": [eos]}
        config: dict[str, Any] = {"model": {**model, "decoder": decoder}}
        (path / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    else:
        config = {"max_position_embeddings": context_length, "eos_token_id": eos}
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def golden_model() -> OnnxModel:
    """Return the model of `golden/tiny_decoder.onnx`, which other implementations load too."""
    graph = Path(__file__).parent / "golden" / "tiny_decoder.onnx"
    folder = ModelFolder(
        path=graph.parent,
        name="golden",
        graph=graph,
        tokenizer=graph,
        chat_template=None,
        vocab_size=40,
        context_length=128,
        bos_token_id=None,
        eos_token_ids=(),
        exporter="edgedraft",
        precision="fp32",
        head_dim=None,
        fingerprint="golden",
    )
    return OnnxModel(folder, SessionConfig(threads=1))
