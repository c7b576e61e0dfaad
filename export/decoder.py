"""A transformers decoder as one ONNX graph with the KV cache as inputs and outputs.

The graph's inputs and outputs are those of docs/formats.md. The model's own `forward` is traced,
so scaled embeddings, logit soft-capping and the like need no mention here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch

from .acceptance_head import AcceptanceHead
from .attention import CacheInputs, LayerShape, TracedAttention
from .errors import ExportError
from .fusion import fuse

_log = logging.getLogger(__name__)

OPSET = 21  # every onnxruntime from 1.20 on runs it
IR_VERSION = 10  # the same releases read it

# Sizes of the traced example. None may be 0 or 1, which torch.export would bake in, and they
# differ so that no two dynamic dimensions are taken for one.
_ROWS, _TOTAL, _CAPACITY, _LOGIT_ROWS = 5, 7, 11, 3


class _Decoder(torch.nn.Module):
    """The model with the graph's signature."""

    def __init__(
        self,
        model: torch.nn.Module,
        traced: TracedAttention,
        hidden_state: bool,
        acceptance_head: AcceptanceHead | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.acceptance_head = acceptance_head
        self.rotary = traced.tables
        self._traced = traced
        self.hidden_state = hidden_state

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        seqlens_k: torch.Tensor,
        total_sequence_length: torch.Tensor,
        logit_rows: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
        attention_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        hidden: list[torch.Tensor] = []

        def keep_logit_rows(_: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            hidden.append(args[0].index_select(1, logit_rows))
            return (hidden[0],)

        model: Any = self.model
        handle = model.get_output_embeddings().register_forward_pre_hook(keep_logit_rows)
        self._traced.begin(
            CacheInputs(past, position_ids, seqlens_k, total_sequence_length, attention_bias)
        )
        try:
            logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        finally:
            handle.remove()
            present = self._traced.end()
        outputs = [logits]
        if self.hidden_state:
            outputs.append(hidden[0])
        if self.acceptance_head is not None:
            outputs.append(self.acceptance_head(hidden[0], logits))
        return (*outputs, *(x for pair in present for x in pair))

    @property
    def output_names(self) -> list[str]:
        """What `forward` returns before the cache."""
        names = {"logits": True, "hidden_state": self.hidden_state}
        names["acceptance"] = self.acceptance_head is not None
        return [name for name, is_there in names.items() if is_there]


def export_decoder(
    model: torch.nn.Module,
    context_length: int,
    *,
    hidden_state: bool = False,
    tree: bool = False,
    acceptance_head: AcceptanceHead | None = None,
) -> ir.Model:
    """Return the fused fp32 graph of a causal language model in evaluation mode.

    `context_length` is the most positions the rotary tables cover; `hidden_state` adds the output
    of that name, `acceptance_head` the output `acceptance` and `tree` the input `attention_bias`.
    Weights stay views of the model's own parameters until the graph is saved. Raises ExportError
    where the model cannot be exported.
    """
    with TracedAttention(model, context_length) as traced, torch.no_grad():
        try:
            traced.survey()
            decoder = _Decoder(model, traced, hidden_state, acceptance_head).eval()
            graph = _trace(decoder, traced.layers, tree)
        except ExportError:
            raise
        except Exception as error:  # torch raises dozens of kinds, none of them ours
            _log.debug("tracing failed", exc_info=True)
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise ExportError(
                f"{type(model).__name__} cannot be exported: {type(error).__name__}: {first_line}"
            ) from error
    graph.ir_version = IR_VERSION
    _name_dimensions(graph)
    fuse(graph)
    return graph


def _trace(decoder: _Decoder, layers: Sequence[LayerShape], tree: bool) -> ir.Model:
    """Return the graph as torch's exporter leaves it, with inputs and outputs named."""
    caches = [(1, layer.kv_heads, _CAPACITY, layer.head_dim) for layer in layers]
    example = (
        torch.zeros(1, _ROWS, dtype=torch.int64),
        torch.arange(_ROWS)[None],
        torch.tensor([_TOTAL - 1], dtype=torch.int32),
        torch.tensor(_TOTAL, dtype=torch.int32),
        torch.arange(_LOGIT_ROWS),
        [(torch.zeros(shape), torch.zeros(shape)) for shape in caches],
        torch.zeros(1, 1, _ROWS, _TOTAL) if tree else None,
    )
    any_length = torch.export.Dim.DYNAMIC
    dynamic_shapes = (
        {1: any_length},
        {1: any_length},
        None,
        None,
        {0: any_length},
        [({2: any_length}, {2: any_length}) for _ in layers],
        {2: any_length, 3: any_length} if tree else None,
    )
    cache_names = [f"{n}.{half}" for n in range(len(layers)) for half in ("key", "value")]
    with quiet("torch.onnx"):  # its remarks are on its own internals
        program = torch.export.export(decoder, example, dynamic_shapes=dynamic_shapes, strict=False)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            input_names=[
                *("input_ids", "position_ids", "seqlens_k", "total_sequence_length", "logit_rows"),
                *(f"past_key_values.{x}" for x in cache_names),
                *(["attention_bias"] if tree else []),
            ],
            output_names=[
                *decoder.output_names,
                *(f"present.{x}" for x in cache_names),
            ],
        )
    assert exported is not None
    graph: ir.Model = exported.model
    return graph


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keep the remarks of these loggers, and every warning, from the user."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _name_dimensions(model: ir.Model) -> None:
    """Give the dynamic dimensions the names of docs/formats.md in place of torch's symbols."""
    graph = model.graph
    by_name = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    names = {
        str(_shape(by_name[value])[axis]): name
        for value, axis, name in (
            ("input_ids", 1, "rows"),
            ("position_ids", 1, "rows"),  # the tracer need not notice that they are equal
            ("attention_bias", 2, "rows"),
            ("attention_bias", 3, "total"),
            ("logit_rows", 0, "logit_rows"),
        )
        if value in by_name
    }
    for name, value in by_name.items():
        if name and name.startswith(("past_key_values.", "present.")):
            names[str(_shape(value)[2])] = "capacity"
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(
                [x if isinstance(x, int) else names.get(str(x), str(x)) for x in value.shape]
            )


def _shape(value: ir.Value) -> ir.Shape:
    assert value.shape is not None, f"{value.name} has no shape"
    return value.shape
