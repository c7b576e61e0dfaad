"""Traces a transformers model's own code with device attention in place of its attention.

Inside `TracedAttention` three things of the model are replaced, and put back afterwards:

* the attention function (transformers' attention interface) emits
  `com.microsoft::GroupQueryAttention` over the graph's KV inputs;
* rotary modules return their whole cos/sin tables, computed once by their own code for every
  position, so that any scaling (linear, llama3, yarn) comes out exactly as the model has it;
* `apply_rotary_pos_emb` hands query and key on unrotated and remembers which tables were meant:
  the operator rotates. Layers that do not call it are exported without rotation.

Nothing here knows an architecture by name. What does not fit is refused by `survey`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .errors import ExportError

_NAME = "edgedraft_gqa"
_ROTATION = "apply_rotary_pos_emb"  # what every rotary model file of transformers calls it


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps in the KV cache."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)  # holds tensors
class CacheInputs:
    """The graph inputs every attention layer reads; shapes as in docs/formats.md."""

    past: list[tuple[torch.Tensor, torch.Tensor]]
    position_ids: torch.Tensor
    seqlens_k: torch.Tensor
    total_sequence_length: torch.Tensor
    attention_bias: torch.Tensor | None


class RotaryTables(torch.nn.Module):
    """Distinct cos/sin tables as buffers `cos_N`, `sin_N`, each (positions, rotary_dim / 2)."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def add(self, cos: torch.Tensor, sin: torch.Tensor) -> int:
        """Keep a pair of tables and return its number; equal pairs share one."""
        for number in range(self._count):
            known_cos, known_sin = self.pair(number)
            if torch.equal(known_cos, cos) and torch.equal(known_sin, sin):
                return number
        self.register_buffer(f"cos_{self._count}", cos, persistent=False)
        self.register_buffer(f"sin_{self._count}", sin, persistent=False)
        self._count += 1
        return self._count - 1

    def pair(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of a number from `add`."""
        return self.get_buffer(f"cos_{number}"), self.get_buffer(f"sin_{number}")


class TracedAttention:
    """Context in which a model's attention layers read and write the graph's KV cache.

    `survey` runs the model once and finds its layers and rotary tables. After that `begin` names
    the inputs of the pass to come, and `end` returns what its layers wrote.
    """

    def __init__(self, model: torch.nn.Module, context_length: int) -> None:
        self.layers: list[LayerShape] = []
        self.tables = RotaryTables()
        self._model: Any = model
        self._context_length = context_length
        self._table_numbers: dict[tuple[str, str | None], int] = {}
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None
        self._inputs: CacheInputs | None = None
        self._present: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            ALL_ATTENTION_FUNCTIONS[_NAME] = self._attention
            stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, _NAME)
            ALL_MASK_ATTENTION_FUNCTIONS[_NAME] = lambda *args, **kwargs: None
            stack.callback(ALL_MASK_ATTENTION_FUNCTIONS.__delitem__, _NAME)
            stack.callback(
                self._model.set_attn_implementation, self._model.config._attn_implementation
            )
            self._model.set_attn_implementation(_NAME)
            for source in {sys.modules[type(m).__module__] for m in self._model.modules()}:
                if hasattr(source, _ROTATION):
                    stack.callback(setattr, source, _ROTATION, _rotate_half_of(source))
                    setattr(source, _ROTATION, self._remember_rotation)
            for name, module in self._model.named_modules():
                if type(module).__name__.endswith("RotaryEmbedding"):
                    stack.callback(delattr, module, "forward")
                    module.forward = self._table_forward(name, module)
            self._undo = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def survey(self) -> None:
        """Run two tokens through the model to find its layers; raise ExportError if none."""
        with torch.no_grad():
            self._model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        if not self.layers:
            raise ExportError(
                f"{type(self._model).__name__} cannot be exported: "
                "its layers do not use transformers' attention interface"
            )

    def begin(self, inputs: CacheInputs) -> None:
        """Name the inputs of the pass to come."""
        self._inputs, self._present = inputs, []

    def end(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (key, value) of every layer after the pass, in layer order."""
        present, self._inputs, self._present = self._present, None, []
        return present

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,  # (1, heads, rows, head_dim), not rotated
        key: torch.Tensor,  # (1, kv_heads, rows, head_dim), not rotated
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        rotation, self._rotation = self._rotation, None
        _, heads, rows, head_dim = query.shape
        kv_heads = key.shape[1]
        if self._inputs is None:
            self._check_layer(module, key, value, kwargs)
            self.layers.append(LayerShape(kv_heads, head_dim))
            return torch.zeros_like(query).transpose(1, 2), None

        inputs = self._inputs
        past_key, past_value = inputs.past[len(self._present)]
        cos, sin = rotation or (None, None)
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
        out, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (
                *(q, k, v, past_key, past_value),
                *(inputs.seqlens_k, inputs.total_sequence_length),
                *(cos, sin, inputs.position_ids if rotation else None, inputs.attention_bias),
            ),
            attrs={
                "num_heads": heads,
                "kv_num_heads": kv_heads,
                "scale": head_dim**-0.5 if scaling is None else float(scaling),
                "do_rotary": int(rotation is not None),
                "local_window_size": sliding_window or -1,
                "softcap": softcap or 0.0,
            },
            dtypes=(q.dtype, q.dtype, q.dtype),
            shapes=(q.shape, past_key.shape, past_value.shape),
            version=1,
        )
        self._present.append((present_key, present_value))
        return out.reshape(1, rows, heads, head_dim), None

    def _check_layer(
        self, module: Any, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        reason = None
        if getattr(module, "is_causal", True) is False:
            reason = "attention that looks ahead"
        elif key.shape != value.shape:
            reason = "keys and values of different widths"
        elif kwargs.get("s_aux") is not None:
            reason = "attention sinks"
        if reason:
            raise ExportError(f"{type(self._model).__name__} cannot be exported: it has {reason}")

    def _remember_rotation(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._rotation = (cos, sin)
        return q, k

    def _table_forward(
        self, name: str, module: torch.nn.Module
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        compute = module.forward

        def forward(
            x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            which = (name, layer_type)
            if which not in self._table_numbers:
                check_static_rope(module, self._context_length)
                positions = torch.arange(self._context_length)[None]
                by_type = {} if layer_type is None else {"layer_type": layer_type}
                cos, sin = compute(torch.zeros(1), positions, **by_type)
                self._table_numbers[which] = self.tables.add(_half(cos[0]), _half(sin[0]))
            return self.tables.pair(self._table_numbers[which])

        return forward


def check_static_rope(module: Any, context_length: int) -> None:
    """Refuse a RoPE whose table would change within `context_length` positions."""
    config, kinds = module.config, module.rope_type
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    limit = context_length
    if any("dynamic" in kind for kind in kinds):
        limit = config.max_position_embeddings
    if "longrope" in kinds:
        # transformers 5 keeps the length among the rope parameters, 4.57 beside them.
        rope = getattr(config, "rope_parameters", None) or config.rope_scaling
        limit = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", config.max_position_embeddings
        )
    if context_length > limit:
        raise ExportError(
            f"the model's {'/'.join(sorted(kinds))} RoPE changes its table for texts over {limit} "
            f"tokens, which a graph cannot follow; export with --max-context {limit}"
        )


def _half(table: torch.Tensor) -> torch.Tensor:
    """Return the left half of a (positions, rotary_dim) table whose halves are equal."""
    left, right = table.float().chunk(2, dim=-1)
    if not torch.equal(left, right):
        raise ExportError("the model's rotary tables are interleaved, which is not supported")
    return left.contiguous()


def _rotate_half_of(source: ModuleType) -> Callable[..., Any]:
    """Return a modeling module's rotation after checking that it is the rotate-half kind."""
    rotate: Callable[..., Any] = getattr(source, _ROTATION)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, 8, generator=generator)
    angles = torch.randn(1, 3, 4, generator=generator).repeat(1, 1, 2)
    left, right = q.chunk(2, dim=-1)
    expected = q * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()
    try:
        rotated, _ = rotate(q, k, angles.cos(), angles.sin())
        matches = torch.allclose(rotated, expected, atol=1e-5)
    except (RuntimeError, TypeError, ValueError):
        matches = False
    if not matches:
        raise ExportError(f"{source.__name__} rotates its queries in a way that is not supported")
    return rotate
