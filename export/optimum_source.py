"""A decoder graph by way of optimum-onnx, for architectures that the direct way refuses.

Attention stays as optimum writes it: unfused, causal in row order, over caches that each pass
returns lengthened. What is done to the graph changes no bit of its results: repeated shape
arithmetic goes, and the head computes only the rows that are asked for. Nothing else in EdgeDraft
imports optimum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnx_ir.external_data import load_to_model

from edgedraft.runtime.extras import MissingExtraError
from edgedraft.runtime.ort_session import onnxruntime

from .attention import check_static_rope
from .decoder import IR_VERSION, OPSET, quiet
from .errors import ExportError
from .sources import Source

_log = logging.getLogger(__name__)

_NOISY = ("optimum", "transformers", "torch.onnx")
# Operators that treat each row alone, so that rows may be chosen before them.
_ROW_WISE = {"Add", "Cast", "Div", "Identity", "Mul", "Tanh"}


def export_with_optimum(source: Source, context_length: int | None = None) -> ir.Model:
    """Return the fp32 graph that optimum makes of a source's model.

    `context_length` is how long a text may get, by default the model's own limit. Raises
    MissingExtraError without optimum, and ExportError for a model that it cannot export.
    """
    export, name = need_optimum(), type(source.model).__name__
    for module in source.model.modules():
        if hasattr(module, "rope_type"):
            check_static_rope(module, context_length or source.context_length)
    # The weights are read before the folder goes; optimum writes nothing without one.
    with TemporaryDirectory(prefix="edgedraft-") as folder:
        try:
            with quiet(*_NOISY):
                export(
                    source.model,
                    folder,
                    task="text-generation-with-past",
                    opset=OPSET,
                    no_post_process=True,
                    do_validation=False,
                )
        except Exception as error:  # optimum and torch raise dozens of kinds, none of them ours
            _log.debug("optimum's exporter failed", exc_info=True)
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise ExportError(
                f"{name} cannot be exported by optimum: {type(error).__name__}: {first_line}"
            ) from error
        model = load_to_model(ir.load(Path(folder) / "model.onnx"))
    model.ir_version = IR_VERSION
    remove_repetitions(model)
    name_tied_head(model.graph)
    if not select_logit_rows(model.graph):
        _log.warning("%s: its head was not found, so a prefill computes all logits", name)
    return model


def need_optimum() -> Callable[..., Any]:
    """Return optimum's export function; raise MissingExtraError where it is not installed."""
    onnxruntime()  # which optimum imports, too, but without switching telemetry off
    try:
        from optimum.exporters.onnx import onnx_export_from_model
    except ImportError as error:
        raise MissingExtraError(
            '--via optimum needs optimum-onnx: pip install "edgedraft[optimum]"'
        ) from error
    export: Callable[..., Any] = onnx_export_from_model
    return export


def remove_repetitions(model: ir.Model) -> None:
    """Compute once what every layer computes again; each value stays the same to the last bit.

    Folding constants as well would take a minute in place of a second for SmolLM2 and make no pass
    faster, since onnxruntime folds while it loads.
    """
    for change in (
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common_passes.IdentityEliminationPass(),
        common_passes.DeduplicateInitializersPass(),
        common_passes.CommonSubexpressionEliminationPass(),
        common_passes.RemoveUnusedNodesPass(),
        common_passes.ClearMetadataAndDocStringPass(),
    ):
        change(model)


def name_tied_head(graph: ir.Graph) -> None:
    """Name a head that is the transposed embedding as the direct way does, so that the later passes
    (`fusion.py`) know the two as one.
    """
    if (head := _head(_logits(graph))) is None or not _is_weight(weight := head.inputs[1]):
        return
    tables = [x.inputs[0] for x in graph if x.op_type == "Gather"]
    for table in tables:
        if _is_weight(table) and np.array_equal(_array(table), _array(weight).T):
            weight.name = f"{table.name}.transposed"
            return


def select_logit_rows(graph: ir.Graph) -> bool:
    """Add the input `logit_rows`, the rows that the head computes.

    Changes nothing and returns False where the head cannot be told from the rest.
    """
    logits = _logits(graph)
    if (head := _head(logits)) is None or logits.shape is None or logits.shape.rank() != 3:
        return False
    wanted = ir.Value(
        name="logit_rows", shape=ir.Shape(["logit_rows"]), type=ir.TensorType(ir.DataType.INT64)
    )
    gather = ir.node("Gather", [head.inputs[0], wanted], {"axis": 1})
    graph.insert_before(head, gather)
    head.replace_input_with(0, gather.outputs[0])
    graph.inputs.append(wanted)
    # What lies between the two would still be as long as the pass by its recorded shape.
    value = logits
    while (node := value.producer()) is not head and node is not None:
        value = _computed_inputs(node)[0]
        value.shape = None
    logits.shape = ir.Shape([logits.shape[0], "logit_rows", logits.shape[2]])
    return True


def _logits(graph: ir.Graph) -> ir.Value:
    return next(x for x in graph.outputs if x.name == "logits")


def _head(logits: ir.Value) -> ir.Node | None:
    """Walk from the logits back over row-wise operators to the MatMul of the head."""
    node = logits.producer()
    while node is not None and node.op_type in _ROW_WISE:
        computed = _computed_inputs(node)
        others = [x for x in node.inputs if _is_weight(x)]
        if len(computed) != 1 or any(x.shape is None or x.shape.rank() > 1 for x in others):
            return None
        node = computed[0].producer()
    if node is None or node.op_type != "MatMul":
        return None
    weight = node.inputs[1]
    transpose = weight.producer() if weight is not None else None
    if transpose is not None and transpose.op_type == "Transpose":  # of a table stored once
        weight = transpose.inputs[0]
    if not _is_weight(weight):
        return None
    return node if weight.shape is not None and weight.shape.rank() == 2 else None


def _computed_inputs(node: ir.Node) -> list[ir.Value]:
    return [x for x in node.inputs if x is not None and not _is_weight(x)]


def _is_weight(value: ir.Value | None) -> TypeGuard[ir.Value]:
    return value is not None and value.is_initializer() and value.const_value is not None


def _array(weight: ir.Value) -> npt.NDArray[Any]:
    assert weight.const_value is not None
    return weight.const_value.numpy()
