"""Rewrites an exported decoder into as few nodes as the device needs.

A decode step of a small model is dominated by what each node costs, so every pass removes nodes,
and none changes the result beyond rounding. The passes look at operators and shapes, never at
names, and leave alone what they do not recognise. A layer of a Llama ends as ten nodes:

    MatMul (q, k, v)  GroupQueryAttention  MatMul  SkipSimplifiedLayerNormalization
    MatMul  MatMul  QuickGelu  Mul  MatMul  SkipSimplifiedLayerNormalization

Weights are views and lazy concatenations of the model's own parameters; nothing is copied before
the graph is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript.optimizer import optimize
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization

_MICROSOFT = "com.microsoft"
_RMS_NORM = "SimplifiedLayerNormalization"
_TRANSPOSED = ".transposed"  # ends the name of a weight made by `transpose_weights`
_BESIDE = "+"  # stands between the names of weights that were put side by side


def fuse(model: ir.Model) -> None:
    """Run every pass over a decoder as torch's exporter leaves it, in place."""
    graph = model.graph
    transpose_weights(graph)
    optimize(model)
    fuse_rms_normalization(model)
    move_transposes_behind_norms(graph)
    drop_reshapes(graph)
    pack_query_key_value(graph)
    fuse_silu(graph)
    fuse_skip_norms(graph)
    model.opset_imports[_MICROSOFT] = 1
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.ClearMetadataAndDocStringPass()(model)


def transpose_weights(graph: ir.Graph) -> None:
    """Store transposed weights in place of Transpose nodes."""
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Transpose" else None
        if not _is_weight(source):
            continue
        weight = _transposed(graph, source, node.attributes["perm"].as_ints())
        _replace(graph, node.outputs[0], weight, [node])


def parameters_behind(weight: str) -> tuple[str, ...]:
    """Return the names of the parameters whose transposes, side by side, are a fused weight."""
    return tuple(x.removesuffix(_TRANSPOSED) for x in weight.split(_BESIDE))


def share_tied_head(graph: ir.Graph) -> None:
    """Let a head whose weight is the transposed embedding read the embedding itself.

    onnxruntime packs the weight of FusedMatMul as it does a MatMul's, so speed stays the same and
    the file holds the embedding once.
    """
    for node in list(graph):
        if node.op_type != "MatMul" or not _is_weight(node.inputs[1]):
            continue
        name = str(node.inputs[1].name)
        source = graph.initializers.get(name.removesuffix(_TRANSPOSED))
        if source is None or not any(user.op_type == "Gather" for user in source.consumers()):
            continue
        head = _insert(
            graph, node, "FusedMatMul", [node.inputs[0], source], {"transB": 1}, _MICROSOFT
        )
        _replace(graph, node.outputs[0], head, [node])
        del graph.initializers[name]


def move_transposes_behind_norms(graph: ir.Graph) -> None:
    """Turn norm(transpose(x)) into transpose(norm(x)), where a later transpose can undo it."""
    for node in list(graph):
        before = _producer(node, 0)
        if node.op_type != _RMS_NORM or not _is(before, "Transpose"):
            continue
        order = before.attributes["perm"].as_ints()
        if order[-1] != len(order) - 1 or len(before.outputs[0].uses()) > 1:
            continue
        inputs = [before.inputs[0], node.inputs[1]]
        norm = _insert(graph, node, _RMS_NORM, inputs, node.attributes, node.domain)
        after = _insert(graph, node, "Transpose", [norm], {"perm": order})
        _replace(graph, node.outputs[0], after, [node, before])


def drop_reshapes(graph: ir.Graph) -> None:
    """Remove chains of Reshape and Transpose that lead back to where they started."""
    changed = True
    while changed:
        changed = False
        for node in list(graph):
            before = _producer(node, 0)
            source: ir.Value | None = None
            if _is(node, "Transpose") and _is(before, "Transpose"):
                second, first = (x.attributes["perm"].as_ints() for x in (node, before))
                if [first[axis] for axis in second] == sorted(first):
                    source = before.inputs[0]
            elif _is(node, "Reshape"):
                if _is_idle_reshape(node):
                    source = node.inputs[0]
                elif _is(before, "Reshape") and _keeps_no_dimension(node):
                    node.replace_input_with(0, before.inputs[0])
                    changed = True
            if source is not None:
                _replace(graph, node.outputs[0], source, [node])
                changed = True


def pack_query_key_value(graph: ir.Graph) -> None:
    """Merge the three projections of an attention layer into the operator's packed input."""
    for node in list(graph):
        if node.op_type != "GroupQueryAttention":
            continue
        found = [_projection(value) for value in node.inputs[:3]]
        parts = [x for x in found if x is not None]
        if len(parts) < 3 or len({(id(x), bias is None) for x, _, bias in parts}) > 1:
            continue
        x, weight = parts[0][0], _concatenate(graph, [w for _, w, _ in parts])
        packed = _insert(graph, node, "MatMul", [x, weight])
        biases = [bias for _, _, bias in parts if bias is not None]
        if biases:
            packed = _insert(graph, node, "Add", [packed, _concatenate(graph, biases)])
        for index, value in enumerate((packed, None, None)):
            node.replace_input_with(index, value)


def fuse_silu(graph: ir.Graph) -> None:
    """Turn x * sigmoid(x) into QuickGelu."""
    for node in list(graph):
        if node.op_type != "Mul":
            continue
        for x, gate in (node.inputs, node.inputs[::-1]):
            sigmoid = gate.producer() if gate is not None else None
            if _is(sigmoid, "Sigmoid") and sigmoid.inputs[0] is x:
                silu = _insert(graph, node, "QuickGelu", [x], {"alpha": 1.0}, _MICROSOFT)
                _replace(graph, node.outputs[0], silu, [node, sigmoid])
                break


def fuse_skip_norms(graph: ir.Graph) -> None:
    """Merge a residual addition into the norm that follows it."""
    for node in list(graph):
        add = _producer(node, 0)
        if node.op_type != _RMS_NORM or not _is(add, "Add") or not _is_weight(node.inputs[1]):
            continue
        total = add.outputs[0]
        if total.shape is None or total.shape.rank() != 3:  # all that the operator accepts
            continue
        if not all(_same_shape(x, total) for x in add.inputs):
            continue
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, node.inputs[1]],
            {"epsilon": node.attributes["epsilon"].as_float()},
            domain=_MICROSOFT,
            num_outputs=4,
        )
        fused.outputs[1].name = fused.outputs[2].name = ""  # mean and deviation: not wanted
        graph.insert_before(add, fused)
        _replace(graph, node.outputs[0], fused.outputs[0], [node])
        _replace(graph, total, fused.outputs[3], [add])


def _projection(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Take x @ weight [+ bias] apart into (x, weight, bias); None for anything else."""
    node, bias = value.producer() if value is not None else None, None
    if _is(node, "Add"):
        product, bias = node.inputs if _is_weight(node.inputs[1]) else node.inputs[::-1]
        node = product.producer() if _is_weight(bias) and product is not None else None
    if not _is(node, "MatMul") or not _is_weight(node.inputs[1]) or node.inputs[0] is None:
        return None
    return node.inputs[0], node.inputs[1], bias


def _is_idle_reshape(node: ir.Node) -> bool:
    source, target, shape = node.inputs[0], node.outputs[0], node.inputs[1]
    assert source is not None
    if _same_shape(source, target):
        return True
    is_vector = source.shape is not None and source.shape.rank() == 1
    return is_vector and _is_weight(shape) and _tensor(shape).numpy().tolist() == [-1]


def _keeps_no_dimension(reshape: ir.Node) -> bool:
    """Whether the new shape is written out, so that it means the same after any other shape."""
    shape = reshape.inputs[1]
    return _is_weight(shape) and 0 not in _tensor(shape).numpy()


def _is(node: ir.Node | None, op_type: str) -> TypeGuard[ir.Node]:
    return node is not None and node.op_type == op_type


def _is_weight(value: ir.Value | None) -> TypeGuard[ir.Value]:
    return value is not None and value.is_initializer() and value.const_value is not None


def _producer(node: ir.Node, index: int) -> ir.Node | None:
    value = node.inputs[index] if len(node.inputs) > index else None
    return value.producer() if value is not None else None


def _same_shape(one: ir.Value | None, other: ir.Value) -> bool:
    """Whether two shapes are known and equal, symbols included."""
    if one is None or one.shape is None or other.shape is None:
        return False
    known = all(isinstance(x, int) or x.value is not None for x in one.shape)
    return known and one.shape == other.shape


def _tensor(weight: ir.Value) -> ir.TensorProtocol:
    assert weight.const_value is not None
    return weight.const_value


def _length(tensor: ir.TensorProtocol, axis: int) -> int:
    length = tensor.shape[axis]
    assert isinstance(length, int)
    return length


def _transposed(graph: ir.Graph, weight: ir.Value, order: Sequence[int]) -> ir.Value:
    tensor = _tensor(weight)
    return _initializer(
        graph,
        f"{weight.name}{_TRANSPOSED}",
        tensor.dtype,
        [_length(tensor, axis) for axis in order],
        lambda: tensor.numpy().transpose(order),
    )


def _concatenate(graph: ir.Graph, weights: Sequence[ir.Value]) -> ir.Value:
    """Return the weights side by side, as an initializer."""
    tensors = [_tensor(x) for x in weights]
    rank = len(tensors[0].shape)
    return _initializer(
        graph,
        _BESIDE.join(str(x.name) for x in weights),
        tensors[0].dtype,
        [*(_length(tensors[0], i) for i in range(rank - 1)), sum(_length(x, -1) for x in tensors)],
        lambda: np.concatenate([x.numpy() for x in tensors], axis=-1),
    )


def _initializer(
    graph: ir.Graph,
    name: str,
    dtype: ir.DataType,
    dims: Sequence[int],
    compute: Callable[[], npt.NDArray[Any]],
) -> ir.Value:
    """Return the initializer of that name, made on first use, computed when it is read."""
    if name not in graph.initializers:
        shape = ir.Shape(dims)
        tensor = ir.LazyTensor(lambda: ir.Tensor(compute()), dtype=dtype, shape=shape, name=name)
        graph.register_initializer(
            ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
        )
    return graph.initializers[name]


def _insert(
    graph: ir.Graph,
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
) -> ir.Value:
    """Insert a node with one output and return that output."""
    node = ir.node(op_type, inputs, dict(attributes or {}), domain=domain)
    graph.insert_before(before, node)
    return node.outputs[0]


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value, nodes: Sequence[ir.Node]) -> None:
    """Put `new` in the place of `old`, name and type included; remove nodes that became unused."""
    if new.producer() is not None and new.type is None:
        new.type, new.shape = old.type, old.shape
    if old.is_graph_output():
        new.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    for node in nodes:
        if not any(x.uses() or x.is_graph_output() for x in node.outputs):
            graph.remove(node, safe=True)
