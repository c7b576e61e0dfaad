"""Stores a graph's weights in eight or four bits and lets its products run on them.

`int8`: a product of activations x and a weight becomes

    s = max|x| / 127, one per row          Abs, ReduceMax, Mul
    q = uint8(round(x / s) + 128)          QuantizeLinear
    (q @ int8 weight) * s * column scale   com.microsoft MatMulIntegerToFloat, Mul, Mul

What feeds several products is quantised once. A row's result depends on that row alone and is
summed in integers, so it is the same to the bit in a pass of one row or of sixteen, whatever the
others hold. A row of zeros has scale 0: whatever integer 0 / 0 becomes is multiplied by 0 again.

`int8-block` and `int4-block`: com.microsoft MatMulNBits with one scale per 32 weights of a column.

The embedding is kept in eight bits with one scale per row, whatever the precision. Weights are
converted one by one, so no more than one of them is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.requantize import Int8Array, nonzero, quantize_columns

from .fusion import parameters_behind

Precision: TypeAlias = Literal["int8", "int8-block", "int4-block"]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]

_MICROSOFT = "com.microsoft"
_OPSET = 21  # the first whose QuantizeLinear takes one scale per row of a tensor of any rank
_BLOCK = 32
_LEVELS = 127
_ZERO_POINT = 128
_CHUNK = 4096  # columns of a weight that are put into blocks at once
_COLUMNS = ".int8"  # ends the name of a weight made by `quantize_columns`; its scales add .scales


def quantize(model: ir.Model, precision: Precision) -> None:
    """Quantise the embedding and every product with a constant weight, in place.

    Products are MatMul and plain Gemm nodes whose weight is a two-dimensional float32 initializer
    or the transpose of one; the embedding is what `input_ids` gathers from.
    """
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise ValueError(f"precision must be one of {known}, got {precision!r}")
    opset = model.opset_imports.get("", 0)
    if opset < _OPSET:
        raise ValueError(f"the graph must have opset >= {_OPSET} to be quantised, got {opset}")
    rewriter = _Rewriter(model.graph)
    for node in list(model.graph):
        if (weight := _weight(node)) is not None:
            rewriter.replace_product(node, weight, precision)
        elif _is_embedding(node):
            rewriter.replace_embedding(node)
    model.opset_imports[_MICROSOFT] = 1


def column_recipes(graph: ir.Graph) -> dict[str, tuple[str, ...]]:
    """Say of which parameters each weight of an `int8` product was made.

    Such an initializer is `quantize_columns` of the parameters, each (outputs, inputs) and taken
    transposed, side by side; the one of the same name and `.scales` holds the scales.
    """
    return {
        name: parameters_behind(name.removesuffix(_COLUMNS))
        for name in graph.initializers
        if name.endswith(_COLUMNS)
    }


def quantize_blocks(weight: FloatArray, bits: int) -> tuple[UInt8Array, FloatArray]:
    """Return a weight (inputs, outputs) as MatMulNBits reads it, in 4 or 8 bits.

    Levels have the shape (outputs, blocks, bytes of a block) and mean 0 in the middle of their
    range; of two that share a byte the first is in the low half. Scales are (outputs, blocks).
    """
    inputs, outputs = weight.shape
    blocks = -(-inputs // _BLOCK)
    middle = 1 << (bits - 1)
    levels = np.empty((outputs, blocks, _BLOCK * bits // 8), np.uint8)
    scales = np.empty((outputs, blocks), np.float32)
    for start in range(0, outputs, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, outputs))
        part = np.zeros((chunk.stop - start, blocks * _BLOCK), np.float32)
        part[:, :inputs] = weight[:, chunk].T
        part = part.reshape(-1, blocks, _BLOCK)
        largest = np.take_along_axis(part, np.abs(part).argmax(axis=-1)[..., None], axis=-1)
        # The range reaches one step further below zero than above: the largest value goes there.
        scale = (largest / -middle).astype(np.float32)
        whole = np.rint(part / nonzero(scale)) + middle
        whole = whole.clip(0, 2 * middle - 1).astype(np.uint8)
        levels[chunk] = whole if bits == 8 else whole[..., ::2] | whole[..., 1::2] << 4
        scales[chunk] = scale[..., 0]
    return levels, scales


class _Rewriter:
    """Replaces nodes of one graph; what several of them need is made once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def replace_product(self, node: ir.Node, weight: ir.Value, precision: Precision) -> None:
        """Put a quantised product in the place of a MatMul or Gemm."""
        tape = ir.tape.Tape()
        if precision == "int8":
            new = self._int8_product(tape, node, weight)
        else:
            new = self._block_product(tape, node, weight, bits=8 if precision[3] == "8" else 4)
        if len(node.inputs) > 2 and node.inputs[2] is not None:  # the bias of a Gemm
            new = tape.op("Add", [new, node.inputs[2]])
        self._replace(node, tape, new)

    def replace_embedding(self, node: ir.Node) -> None:
        """Put a Gather of int8 rows, and one of their scales, in the place of a Gather."""
        table, ids = node.inputs
        assert table is not None
        integers, scales = self._stored(node, table, ".rows", _quantize_rows)
        tape = ir.tape.Tape()
        rows = tape.op("Cast", [tape.op("Gather", [integers, ids])], {"to": ir.DataType.FLOAT})
        self._replace(node, tape, tape.op("Mul", [rows, tape.op("Gather", [scales, ids])]))

    def _int8_product(self, tape: ir.tape.Tape, node: ir.Node, weight: ir.Value) -> ir.Value:
        activations = node.inputs[0]
        assert activations is not None
        integers, scales = self._stored(node, weight, _COLUMNS, quantize_columns)
        if activations not in self._rows:
            width = _static_shape(integers)[0]
            self._rows[activations] = self._quantized_rows(tape, activations, width)
        rows, row_scale = self._rows[activations]
        one = self._constant("quantize.one", np.float32(1))
        # The node could apply the column scales, but it copies them one by one in every pass:
        # 12 us for 3,072 columns, where this Mul takes 1.3 us.
        product = tape.op(
            "MatMulIntegerToFloat",
            [rows, integers, one, one, self._zero_point()],
            domain=_MICROSOFT,
        )
        return tape.op("Mul", [tape.op("Mul", [product, row_scale]), scales])

    def _quantized_rows(
        self, tape: ir.tape.Tape, activations: ir.Value, width: int
    ) -> tuple[ir.Value, ir.Value]:
        """Return uint8 activations and the scale of each row, (..., 1)."""
        last_axis = self._constant("quantize.last_axis", np.array([-1], np.int64))
        reach = tape.op("ReduceMax", [tape.op("Abs", [activations]), last_axis])
        scale = tape.op("Mul", [reach, self._constant("quantize.step", np.float32(1 / _LEVELS))])
        # Zero points must have the shape of the scales. In steps of 1e30 every scale rounds to 0,
        # so this makes them in one small node.
        huge = self._constant("quantize.huge", np.float32(1e30))
        zero_points = tape.op("QuantizeLinear", [scale, huge, self._zero_point()])
        attributes = {"axis": -1, "block_size": width}
        rows = tape.op("QuantizeLinear", [activations, scale, zero_points], attributes)
        return rows, scale

    def _block_product(
        self, tape: ir.tape.Tape, node: ir.Node, weight: ir.Value, bits: int
    ) -> ir.Value:
        levels, scales = self._stored(node, weight, ".blocks", lambda x: quantize_blocks(x, bits))
        outputs = _static_shape(levels)[0]
        inputs = int(np.prod(_static_shape(weight))) // outputs
        return tape.op(
            "MatMulNBits",
            [node.inputs[0], levels, scales],
            {"K": inputs, "N": outputs, "bits": bits, "block_size": _BLOCK, "accuracy_level": 4},
            domain=_MICROSOFT,
        )

    def _stored(
        self,
        node: ir.Node,
        weight: ir.Value,
        suffix: str,
        convert: Callable[[FloatArray], tuple[Int8Array | UInt8Array, FloatArray]],
    ) -> tuple[ir.Value, ir.Value]:
        """Return the integers and scales of a weight; equal wishes share them."""
        flipped = _is_flipped(node)
        name = f"{weight.name}{'.transposed' if flipped else ''}{suffix}"
        initializers = self._graph.initializers
        if name not in initializers:
            assert weight.const_value is not None
            array: FloatArray = weight.const_value.numpy()
            integers, scales = convert(array.T if flipped else array)
            self._constant(name, integers)
            self._constant(f"{name}.scales", scales)
        return initializers[name], initializers[f"{name}.scales"]

    def _zero_point(self) -> ir.Value:
        return self._constant("quantize.zero_point", np.uint8(_ZERO_POINT))

    def _constant(self, name: str, array: npt.ArrayLike) -> ir.Value:
        if name not in self._graph.initializers:
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            self._graph.register_initializer(value)
        return self._graph.initializers[name]

    def _replace(self, node: ir.Node, tape: ir.tape.Tape, new: ir.Value) -> None:
        """Put the tape's nodes in the place of `node` and drop the weights nothing else reads."""
        sources = [x for x in node.inputs if x is not None]
        self._graph.insert_before(node, tape.nodes)
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], [], node.outputs, [new])
        for source in sources:
            transpose = source.producer()
            if transpose is not None and transpose.op_type == "Transpose" and not source.uses():
                sources += [x for x in transpose.inputs if x is not None]
                self._graph.remove(transpose, safe=True)
            elif source.is_initializer() and not source.uses() and source.name is not None:
                del self._graph.initializers[source.name]


def _weight(node: ir.Node) -> ir.Value | None:
    """Return the weight a node multiplies activations by, if both can be quantised."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    attributes = node.attributes
    if attributes.get_int("transA", 0) or any(
        attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")
    ):
        return None
    activations, weight = node.inputs[:2]
    if activations is None or activations.const_value is not None or weight is None:
        return None
    producer = weight.producer()
    if producer is not None and _is_transpose(producer):
        weight = producer.inputs[0]
    return weight if _is_table(weight) else None


def _is_flipped(node: ir.Node) -> bool:
    """Tell whether a product's weight is stored as (outputs, inputs)."""
    weight = node.inputs[1]
    transposed = weight is not None and _is_transpose(weight.producer())
    return transposed != bool(node.attributes.get_int("transB", 0))


def _is_transpose(node: ir.Node | None) -> bool:
    return (
        node is not None
        and node.op_type == "Transpose"
        and list(node.attributes.get_ints("perm", [1, 0])) == [1, 0]
    )


def _is_table(value: ir.Value | None) -> bool:
    """Tell whether a value is a two-dimensional float32 initializer."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    tensor = value.const_value
    return tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) == 2


def _is_embedding(node: ir.Node) -> bool:
    """Tell whether a node looks `input_ids` up; other tables, such as angles, need their bits."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return False
    table, ids = node.inputs
    while ids is not None and (producer := ids.producer()) is not None and producer.inputs:
        ids = producer.inputs[0]
    return _is_table(table) and ids is not None and ids.name == "input_ids"


def _quantize_rows(table: FloatArray) -> tuple[Int8Array, FloatArray]:
    """Return int8 rows (rows, width) and their scales (rows, 1)."""
    integers, scales = quantize_columns(table.T)
    return np.ascontiguousarray(integers.T), scales[:, None]


def _static_shape(value: ir.Value) -> Sequence[int]:
    assert value.const_value is not None
    return value.const_value.shape.numpy()
