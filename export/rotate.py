"""Spreads outliers by orthogonal rotations that cancel out, so that eight bits lose less.

A row of the residual stream holds a few values many times the size of the rest, and one
quantisation scale has to serve them all. Rotating the stream by a fixed orthogonal matrix spreads
them evenly. Every weight that writes into the stream absorbs the rotation, every weight that reads
it absorbs the inverse, and an RMS norm commutes with it once its gain has moved into the weights
behind it: the model computes what it did. The values of each attention head are rotated the same
way between `v_proj` and `o_proj`.

The rotation is a flip of random signs, a Hadamard transform over the largest power of two that
divides the width, and a Hartley transform over what is left: all its entries are of one size, and
nothing of width x width is ever built. It depends on the width alone, so an export can be repeated
bit for bit.

A model is rotated where its modules are exactly those named here. One that reads or writes its
stream in another way (norms behind attention as in Gemma 3, layer norms, experts) keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

_INSIDE_ATTENTION = {"q_norm", "k_norm", "rotary_emb"}  # these see neither stream nor values
_CHUNK_ROWS = 8192  # of a weight that are rotated at once, in double precision

_log = logging.getLogger(__name__)


def decoder_layers(model: torch.nn.Module) -> list[Any]:
    """Return the decoder's layers, or nothing where they are not attention plus a gated MLP."""
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    known = all(
        _names(layer.self_attn) - _INSIDE_ATTENTION == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and _names(layer.mlp) - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}
        for layer in layers
        if {"self_attn", "mlp"} <= _names(layer)
    )
    complete = all({"self_attn", "mlp"} <= _names(layer) for layer in layers)
    return layers if known and complete else []


@torch.no_grad()
def norm_offset(norm: torch.nn.Module) -> float | None:
    """Return o where `norm` multiplies x / rms(x) by (weight + o); None for any other norm."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    # The mean of 2 tells an RMS norm from a layer norm; the size makes its epsilon vanish.
    probe = 1000 * (2 + torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    gain = norm(probe) / probe * probe.square().mean().sqrt()
    found = (o for o in (0.0, 1.0) if torch.allclose(gain, weight + o, rtol=1e-3, atol=1e-4))
    return next(found, None)


@torch.no_grad()
def rotate_residual_stream(model: torch.nn.Module) -> bool:
    """Rotate the residual stream in place; return False where the model does not allow it.

    A tied head is untied: the gain of the last norm moves into it, but not into the embedding.
    """
    layers = decoder_layers(model)
    if not layers or not _stream_is_plain(model, layers):
        _log.info("%s keeps its residual stream unrotated", type(model).__name__)
        return False
    whole: Any = model
    embedding, head = whole.model.embed_tokens, whole.lm_head
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
        whole.config.tie_word_embeddings = False
    _absorb_gain(whole.model.norm, [head])
    _rotate_rows(embedding.weight)
    _rotate_rows(head.weight)
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            _absorb_gain(norm, readers)
            for reader in readers:
                _rotate_rows(reader.weight)
        for writer in (attention.o_proj, mlp.down_proj):
            _rotate_rows(writer.weight.T)
            if writer.bias is not None:
                _rotate_rows(writer.bias[None])
    return True


@torch.no_grad()
def rotate_values(attention: Any) -> None:
    """Rotate the values of every head in place, between `v_proj` and `o_proj`."""
    values, output = attention.v_proj, attention.o_proj
    width = attention.head_dim
    _rotate_rows(values.weight.T.view(values.in_features, -1, width))
    if values.bias is not None:
        _rotate_rows(values.bias.view(-1, width))
    _rotate_rows(output.weight.view(output.out_features, -1, width))


def rotated(rows: torch.Tensor) -> torch.Tensor:
    """Return rows (..., width) times the rotation of that width, in double precision."""
    width = rows.shape[-1]
    power = width & -width  # the largest power of two that divides it
    generator = torch.Generator().manual_seed(width)
    signs = 2.0 * torch.randint(2, (width,), generator=generator, dtype=torch.float64) - 1
    odd = width // power
    angles = torch.arange(odd, dtype=torch.float64)
    angles = 2 * torch.pi / odd * angles * angles[:, None]
    hartley = (angles.cos() + angles.sin()) / odd**0.5  # orthogonal
    mixed = hartley @ (rows.double() * signs).reshape(-1, odd, power)
    half = 1
    while half < power:  # the butterflies of a fast Hadamard transform
        low, high = mixed.view(-1, 2, half).unbind(1)
        mixed = torch.stack((low + high, low - high), dim=1)
        half *= 2
    result: torch.Tensor = mixed.reshape(rows.shape) / power**0.5
    return result


def _rotate_rows(rows: torch.Tensor) -> None:
    for part in torch.split(rows, _CHUNK_ROWS):
        part.copy_(rotated(part))


def _absorb_gain(norm: Any, readers: Iterable[Any]) -> None:
    offset = norm_offset(norm)
    assert offset is not None
    for reader in readers:
        reader.weight.mul_(norm.weight + offset)
    norm.weight.fill_(1 - offset)


def _stream_is_plain(model: torch.nn.Module, layers: list[Any]) -> bool:
    decoder: Any = model.model
    if (
        _names(model) != {"model", "lm_head"}
        or _names(decoder) - {"rotary_emb"} != {"embed_tokens", "layers", "norm"}
        or any(
            _names(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
            for layer in layers
        )
    ):
        return False
    norms = [x for layer in layers for x in (layer.input_layernorm, layer.post_attention_layernorm)]
    return all(norm_offset(norm) is not None for norm in (decoder.norm, *norms))


def _names(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}
