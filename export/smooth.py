"""Rewrites a model's weights so that int8 with one activation scale per row loses less.

Nothing changes in fp32. Two exact steps: rotations (`rotate.py`) where the model allows them, and
smoothing where a channel can be scaled between what produces it and what reads it. Channel j is
divided by s_j in the producer and multiplied by s_j in the reader, with

    s_j = max|x_j| ** a / max|W_j| ** b

and (a, b) searched per reader: the pair whose int8 product is closest to the fp32 one on rows of
the calibration text. SmolLM2-135M-Instruct: KL to fp32 0.044 without both steps, 0.016 with the
rotations, 0.010 with smoothing on top; a fixed a = 0.6 makes it worse than none (0.021).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from .rotate import decoder_layers, norm_offset, rotate_residual_stream, rotate_values

_ACTIVATION_POWERS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
_WEIGHT_POWERS = (0.0, 0.3, 0.6)
_ROWS = 256  # calibration rows a search compares; four times as many give the same KL
_LEVELS = 127
_LEAST = 1e-9  # stands in for 0 where something is divided by it
# The norm in front of the MLP, by all norms a layer has.
_MLP_NORMS = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): "post_attention_layernorm",
    frozenset(
        {
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        }
    ): "pre_feedforward_layernorm",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """Channels that can be scaled between their producer and the linears that read them."""

    divide: Callable[[torch.Tensor], None]  # divides what the producer puts out
    readers: tuple[Any, ...]  # linears that read the same input


class _Inputs:
    """What a linear got during calibration: every so many rows, and the reach of all of them."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.rows: list[torch.Tensor] = []
        self.reach = torch.zeros(1)  # (width,) after the first rows: max |x_j|

    def add(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Take note of one call; a forward pre-hook."""
        rows = inputs[0].flatten(0, -2)
        self.rows.append(rows[:: self._every].clone())
        self.reach = torch.maximum(self.reach, rows.abs().amax(0))


@torch.no_grad()
def smooth(
    model: torch.nn.Module, calibration: Sequence[Sequence[int]], *, rotate_stream: bool = True
) -> None:
    """Rotate and smooth a transformers model in place; its fp32 output stays the same.

    `calibration` are token sequences like those the model will see. Without `rotate_stream` the
    hidden states stay in the model's own basis, which costs accuracy. A model whose layers are not
    attention plus a gated MLP is left as it is.
    """
    layers = decoder_layers(model)
    if not layers:
        _log.info("%s is not smoothed: its layers are not known", type(model).__name__)
        return
    if not any(calibration):
        raise ValueError("calibration must hold at least one token")
    stream_rotated = rotate_stream and rotate_residual_stream(model)
    links = []
    for layer in layers:
        rotate_values(layer.self_attn)
        links.append(_Link(_rows_divider(layer.mlp.up_proj), (layer.mlp.down_proj,)))
        if not stream_rotated:  # rotation leaves the readers of the stream nothing to smooth
            links += _norm_links(layer)
    inputs = _observe(model, calibration, [link.readers[0] for link in links])
    for number, (link, observed) in enumerate(zip(links, inputs, strict=True), 1):
        _log.info("smoothing %d of %d", number, len(links))
        scale = _best_scale(observed, torch.cat([x.weight for x in link.readers]))
        link.divide(scale)
        for reader in link.readers:
            reader.weight.mul_(scale)


def _norm_links(layer: Any) -> list[_Link]:
    norms = {name for name, _ in layer.named_children()} - {"self_attn", "mlp"}
    mlp_norm = _MLP_NORMS.get(frozenset(norms))
    if mlp_norm is None:
        return []
    attention, mlp = layer.self_attn, layer.mlp
    pairs = (
        (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (getattr(layer, mlp_norm), (mlp.gate_proj, mlp.up_proj)),
    )
    found = ((norm, norm_offset(norm), readers) for norm, readers in pairs)
    return [_Link(_gain_divider(norm, o), readers) for norm, o, readers in found if o is not None]


def _rows_divider(linear: Any) -> Callable[[torch.Tensor], None]:
    def divide(scale: torch.Tensor) -> None:
        linear.weight.div_(scale[:, None])
        if linear.bias is not None:
            linear.bias.div_(scale)

    return divide


def _gain_divider(norm: Any, offset: float) -> Callable[[torch.Tensor], None]:
    def divide(scale: torch.Tensor) -> None:
        norm.weight.copy_((norm.weight + offset) / scale - offset)

    return divide


def _observe(
    model: torch.nn.Module, calibration: Sequence[Sequence[int]], linears: Sequence[Any]
) -> list[_Inputs]:
    """Run the calibration through the model and return what every linear got."""
    every = max(1, sum(map(len, calibration)) // _ROWS)
    observed = [_Inputs(every) for _ in linears]
    hooks = [
        linear.register_forward_pre_hook(inputs.add)
        for linear, inputs in zip(linears, observed, strict=True)
    ]
    call: Any = model
    try:
        for tokens in calibration:
            if tokens:
                call(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return observed


def _best_scale(inputs: _Inputs, weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of every channel, shape (width,), that loses least in int8."""
    rows = torch.cat(inputs.rows)
    reach = inputs.reach.clamp_min(_LEAST)
    weight_reach = weight.abs().amax(0).clamp_min(_LEAST)
    exact = rows @ weight.T
    size = exact.square().sum(-1).clamp_min(_LEAST)

    def loss(scale: torch.Tensor) -> float:
        error = _int8(rows / scale) @ _int8(weight * scale).T - exact
        return float((error.square().sum(-1) / size).mean())

    scales = []
    for a, b in product(_ACTIVATION_POWERS, _WEIGHT_POWERS):
        logs = a * reach.log() - b * weight_reach.log()
        scales.append((logs - logs.mean()).exp())
    return min(scales, key=loss)


def _int8(rows: torch.Tensor) -> torch.Tensor:
    """Round every row to multiples of its largest value / 127, as the int8 graph does."""
    step = rows.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / _LEVELS
    return (rows / step).round() * step
