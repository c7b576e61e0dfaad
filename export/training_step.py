"""One training step of a drafter as a plain inference graph: loss and gradients of its LoRA.

The graph holds no weights. They are inputs, under their Hugging Face names and in half precision,
as `weights.safetensors` has them, so that a device keeps one copy, mapped. Every linear, the head
included, multiplies by

    W + scale * B @ A          W (outputs, inputs), A (rank, inputs), B (outputs, rank)

With dW = dY^T X that gives dB = scale dW A^T and dA = scale B^T dW, computed from the thin side.
The head has far more outputs than a pass has positions, so there the products are added and not the
matrices. A module of rank 0 is not trained and costs nothing. Sequences are padded on the right
with any token: attention is causal, so padding reaches nothing before it.

A drafter's acceptance head learns beside it: in the graph of what was predicted, since that is what
it is about, and from it no gradient reaches the drafter.

Forward and backward are written down by hand, each operation beside its derivative, for decoders
built like Llama. Nothing of transformers is traced: the graph is the same whatever torch makes it.
docs/formats.md lists inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch

from .acceptance_head import LEAST_ODDS, PREFIX, AcceptanceHead
from .decoder import IR_VERSION, OPSET
from .errors import ExportError
from .onnx_arithmetic import Expression, Recorder
from .training_loss import LossInputs, Prediction, distillation_loss, predict

Backward: TypeAlias = Callable[[Expression], Expression]  # d(output) -> d(input)

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_HEAD = "lm_head"
_LINEARS = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
)
_EMBEDDING = "model.embed_tokens.weight"
_WIDEN = f"{PREFIX}widen"
# Less attention than this is none. It changes no sum; but where it, or its product with a gradient,
# is a denormal number, a processor takes many times as long.
_LEAST_ATTENTION = 1e-20
_GROUP = 2  # the axis of the query heads that share a key, of five


@dataclass(frozen=True, slots=True, eq=False)
class TrainableModel:
    """What the step graph of a drafter is made from."""

    weights: Mapping[str, tuple[int, ...]]  # name -> shape
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    frequencies: tuple[float, ...]  # of the rotary embedding, head_dim / 2
    rotary_scale: float

    @property
    def modules(self) -> dict[str, str]:
        """The linears that can have a LoRA, and the name of the weight of each."""
        head, widen = f"{_HEAD}.weight", f"{_WIDEN}.weight"
        return {
            **{
                f"model.layers.{n}.{linear}": f"model.layers.{n}.{linear}.weight"
                for n in range(self.layers)
                for linear in _LINEARS
            },
            _HEAD: head if head in self.weights else _EMBEDDING,
            **({_WIDEN: widen} if self.has_acceptance_head else {}),
        }

    @property
    def has_acceptance_head(self) -> bool:
        """Whether it says how likely its next piece is to be accepted."""
        return f"{_WIDEN}.weight" in self.weights


def named_weights(
    model: torch.nn.Module, head: AcceptanceHead | None
) -> dict[str, torch.nn.Parameter]:
    """Return the weights that a drafter learns with, by the names they have everywhere."""
    heads = head.named_parameters() if head is not None else ()
    return dict(model.named_parameters()) | {f"{PREFIX}{name}": x for name, x in heads}


def trainable_model(model: torch.nn.Module, head: AcceptanceHead | None = None) -> TrainableModel:
    """Describe a transformers model, and its acceptance head; raise ExportError where the step
    graph would not be its.
    """
    source: Any = model
    config = source.config
    if config.model_type != "llama" or config.hidden_act not in ("silu", "swish"):
        raise ExportError(
            f"{type(model).__name__} cannot learn on the device; only a Llama with silu can"
        )
    rotary = source.model.rotary_emb
    if any(kind in rotary.rope_type for kind in ("dynamic", "longrope")):
        raise ExportError(
            f"a model with {rotary.rope_type} RoPE cannot learn on the device: its angles change "
            "with the length of the text"
        )
    return TrainableModel(
        weights={name: tuple(x.shape) for name, x in named_weights(model, head).items()},
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=source.model.layers[0].self_attn.head_dim,
        epsilon=config.rms_norm_eps,
        frequencies=tuple(rotary.inv_freq.tolist()),
        rotary_scale=float(rotary.attention_scaling),
    )


def export_training_step(model: TrainableModel) -> ir.Model:
    """Return the graph of the loss, of what was predicted, and of the gradients."""
    step = _Step(model, with_acceptance=False)
    recorder = step.recorder
    logits, backward = step.logits()
    prediction = predict(logits, step.next)
    inputs = LossInputs(
        next=step.next,
        nll_weight=recorder.input("nll_weight", _FLOAT, ["n"]).op("Unsqueeze", [-1]),
        teacher_ids=recorder.input("teacher_ids", _INT64, ["n", "K"]),
        teacher_probs=recorder.input("teacher_probs", _FLOAT, ["n", "K"]),
        teacher_weight=recorder.input("teacher_weight", _FLOAT, ["n"]).op("Unsqueeze", [-1]),
        divergence=recorder.input("divergence", _FLOAT, [3]),
    )
    loss, d_logits = distillation_loss(logits, prediction, inputs)
    recorder.output("loss", loss, [])
    _report(recorder, prediction)
    backward(d_logits)
    step.report_gradients()
    return recorder.model("training_step", opset=OPSET, ir_version=IR_VERSION)


def export_evaluation(model: TrainableModel) -> ir.Model:
    """Return the graph of what was predicted alone, and of how an acceptance head should move that
    had to say so: the gradients of its mean cross-entropy.

    onnxruntime computes every output of a graph, wanted or not, and this takes 0.4 of the time.
    """
    step = _Step(model, with_acceptance=model.has_acceptance_head)
    logits, _ = step.logits()
    prediction = predict(logits, step.next)
    _report(step.recorder, prediction)
    if model.has_acceptance_head:
        acceptance, backward = step.acceptance(prediction)
        step.recorder.output("acceptance", acceptance.op("Squeeze", [-1]), ["n"])
        backward((acceptance - prediction.hit) / step.count())
        step.report_gradients()
    return step.recorder.model("evaluation", opset=OPSET, ir_version=IR_VERSION)


class _Step:
    """The graph in the making: a forward pass whose every part knows its derivative."""

    def __init__(self, model: TrainableModel, *, with_acceptance: bool) -> None:
        self._model = model
        self.recorder = recorder = Recorder()
        self._tokens = recorder.input("tokens", _INT64, ["batch", "length"])
        self._at = recorder.input("at", _INT64, ["n"])
        self.next = recorder.input("next", _INT64, ["n"]).op("Unsqueeze", [-1])
        self._scale = recorder.input("scale", _FLOAT, [])
        self._weights = {
            name: recorder.input(name, ir.DataType.FLOAT16, shape)
            for name, shape in model.weights.items()
            if with_acceptance or not name.startswith(PREFIX)
        }
        self.lora_shapes: dict[str, tuple[int | str, int | str]] = {}
        for module, weight in model.modules.items():
            if weight not in self._weights:
                continue
            outputs, inputs = model.weights[weight]
            self.lora_shapes[f"{module}.lora_A"] = (f"{module}.rank", inputs)
            self.lora_shapes[f"{module}.lora_B"] = (outputs, f"{module}.rank")
        self._lora = {
            name: recorder.input(name, _FLOAT, shape) for name, shape in self.lora_shapes.items()
        }
        self.gradients: dict[str, Expression] = {}  # filled by the backward pass
        self._shape = self._tokens.op("Shape")
        length = self._shape.op("Gather", 1)
        places = recorder.constant(0).op("Range", length, 1).cast(_FLOAT)
        column = places.op("Unsqueeze", [-1])
        angles = column * np.array(model.frequencies, np.float32)
        self._cos = angles.op("Cos") * model.rotary_scale  # (length, head_dim / 2)
        self._sin = angles.op("Sin") * model.rotary_scale
        self._mask = places.op("Greater", column).op("Where", -np.inf, 0.0)  # (length, length)

    def logits(self) -> tuple[Expression, Backward]:
        """Return the logits at the predicted positions, (n, vocab)."""
        flat = self._tokens.op("Reshape", [-1])
        x = self._weights[_EMBEDDING].op("Gather", flat).cast(_FLOAT)
        backwards: list[Backward] = []

        def through(part: tuple[Expression, Backward]) -> Expression:
            backwards.append(part[1])
            return part[0]

        for n in range(self._model.layers):
            layer = f"model.layers.{n}"
            x = through(self._residual(x, f"{layer}.input_layernorm", layer, self._attention))
            if n == self._model.layers - 1:  # nothing behind it looks at other positions
                x = through(_rows(x, self._at))
            norm = f"{layer}.post_attention_layernorm"
            x = through(self._residual(x, norm, layer, self._mlp))
        self._hidden = x = through(self._norm(x, "model.norm"))
        logits = through(self._linear(x, _HEAD, merged=False))

        def backward(d: Expression) -> Expression:
            for part in reversed(backwards):
                d = part(d)
            return d

        return logits, backward

    def acceptance(self, prediction: Prediction) -> tuple[Expression, Backward]:
        """Return what the head says of each position, (n, 1); the derivative is that with respect
        to the log-odds, and goes no further than the head.
        """
        out, scale = (self._weights[f"{PREFIX}{x}"].cast(_FLOAT) for x in ("out", "scale"))
        wide, backward = self._linear(self._hidden, _WIDEN)
        sigmoid = wide.op("Sigmoid")
        silu = wide * sigmoid
        odds_against = prediction.probs.op("ReduceMax", [-1]).op("Reciprocal") - 1.0
        uncertainty = odds_against.op("Max", LEAST_ODDS).op("Log")
        log_odds = ((self._hidden + silu) * out).sum() - uncertainty * (scale + 1.0)
        return log_odds.op("Sigmoid"), lambda d: backward(
            d * out * (sigmoid + silu * (1.0 - sigmoid))
        )

    def count(self) -> Expression:
        """Return n, (1,)."""
        return self._at.op("Shape").cast(_FLOAT)

    def report_gradients(self) -> None:
        """Make outputs of the gradients that the backward pass found."""
        for name, shape in self.lora_shapes.items():
            if name in self.gradients:
                self.recorder.output(f"{name}.grad", self.gradients[name], shape)

    def _residual(
        self,
        x: Expression,
        norm: str,
        layer: str,
        part: Callable[[Expression, str], tuple[Expression, Backward]],
    ) -> tuple[Expression, Backward]:
        """x + part(norm(x))"""
        normed, norm_backward = self._norm(x, norm)
        y, part_backward = part(normed, layer)
        return x + y, lambda d: d + norm_backward(part_backward(d))

    def _norm(self, x: Expression, name: str) -> tuple[Expression, Backward]:
        gain = self._weights[f"{name}.weight"].cast(_FLOAT)
        inverse = ((x * x).mean() + self._model.epsilon).op("Sqrt").op("Reciprocal")
        unit = x * inverse

        def backward(d: Expression) -> Expression:
            d_unit = d * gain
            return (d_unit - unit * (d_unit * unit).mean()) * inverse

        return unit * gain, backward

    def _linear(
        self, x: Expression, module: str, *, merged: bool = True
    ) -> tuple[Expression, Backward]:
        a = self._lora[f"{module}.lora_A"] * self._scale
        b = self._lora[f"{module}.lora_B"]
        weight = self._weights[self._model.modules[module]].cast(_FLOAT)
        thin_x = x.product(a, flip_right=True)
        if merged:
            weight = b.product(a, weight)
            y = x.product(weight, flip_right=True)
        else:
            y = thin_x.product(b, x.product(weight, flip_right=True), flip_right=True)
        if (bias := self._weights.get(f"{module}.bias")) is not None:
            y = y + bias.cast(_FLOAT)

        def backward(d: Expression) -> Expression:
            thin_d = d.product(b)
            self.gradients[f"{module}.lora_A"] = thin_d.product(x, flip_left=True) * self._scale
            self.gradients[f"{module}.lora_B"] = d.product(thin_x, flip_left=True)
            d_x = d.product(weight)
            return d_x if merged else thin_d.product(a, d_x)

        return y, backward

    def _mlp(self, x: Expression, layer: str) -> tuple[Expression, Backward]:
        """down(silu(gate(x)) * up(x))"""
        gate, gate_backward = self._linear(x, f"{layer}.mlp.gate_proj")
        up, up_backward = self._linear(x, f"{layer}.mlp.up_proj")
        sigmoid = gate.op("Sigmoid")
        silu = gate * sigmoid
        y, down_backward = self._linear(silu * up, f"{layer}.mlp.down_proj")

        def backward(d: Expression) -> Expression:
            d_product = down_backward(d)
            d_gate = d_product * up * (sigmoid + silu * (1.0 - sigmoid))
            return gate_backward(d_gate) + up_backward(d_product * silu)

        return y, backward

    def _attention(self, x: Expression, layer: str) -> tuple[Expression, Backward]:
        model, name = self._model, f"{layer}.self_attn."
        (q, q_backward), (k, k_backward), (v, v_backward) = (
            self._linear(x, f"{name}{part}_proj") for part in "qkv"
        )
        scale = model.head_dim**-0.5
        group = model.heads // model.kv_heads
        q = self._rotated(self._split(q, group)) * scale
        k = self._rotated(self._split(k, 1))
        v = self._split(v, 1)
        probs = (q @ k.flipped() + self._mask).op("Softmax", axis=-1)
        probs = probs.op("ThresholdedRelu", alpha=_LEAST_ATTENTION)
        mixed = probs @ v
        y, o_backward = self._linear(self._joined(mixed), f"{name}o_proj")

        def backward(d: Expression) -> Expression:
            d_mixed = self._split(o_backward(d), group)
            # sum(d_probs * probs) of a row is the smaller sum(d_mixed * mixed)
            d_scores = (d_mixed @ v.flipped() - (d_mixed * mixed).sum()) * probs
            d_q = self._rotated(d_scores @ k, back=True) * scale
            d_k = self._rotated((d_scores.flipped() @ q).sum(_GROUP), back=True)
            d_v = (probs.flipped() @ d_mixed).sum(_GROUP)
            return (
                q_backward(self._joined(d_q))
                + k_backward(self._joined(d_k))
                + v_backward(self._joined(d_v))
            )

        return y, backward

    def _split(self, x: Expression, group: int) -> Expression:
        """(batch * length, heads * head_dim) -> (batch, kv_heads, group, length, head_dim)"""
        sizes = [self._model.kv_heads, group, self._model.head_dim]
        return x.op("Reshape", self._shape.op("Concat", sizes, axis=0)).transpose(0, 2, 3, 1, 4)

    def _joined(self, x: Expression) -> Expression:
        """Undo `_split`."""
        return x.transpose(0, 3, 1, 2, 4).op("Flatten", axis=2)

    def _rotated(self, x: Expression, back: bool = False) -> Expression:
        """Turn each pair (j, j + head_dim / 2) by its position's angle; `back` is the transpose."""
        half = self._model.head_dim // 2
        cos, sin = self._cos, -self._sin if back else self._sin
        first, second = x.columns(0, half), x.columns(half, 2 * half)
        return (first * cos - second * sin).beside(second * cos + first * sin)


def _rows(x: Expression, at: Expression) -> tuple[Expression, Backward]:
    """Return some rows of x, repeated ones included."""

    def backward(d: Expression) -> Expression:
        zeros = x.op("Shape").op("ConstantOfShape")
        return zeros.op("ScatterND", at.op("Unsqueeze", [-1]), d, reduction="add")

    return x.op("Gather", at), backward


def _report(recorder: Recorder, prediction: Prediction) -> None:
    """Make outputs of how the positions were predicted."""
    recorder.output("hit", prediction.hit.op("Squeeze", [-1]), ["n"])
    recorder.output("prob", prediction.log_prob.op("Exp").op("Squeeze", [-1]), ["n"])
