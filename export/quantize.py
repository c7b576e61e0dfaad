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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgedraft.runtime.datatypes import FloatArray

Precision: TypeAlias = Literal["int8", "int8-block", "int4-block"]
Int8Array: TypeAlias = npt.NDArray[np.int8]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]

_MICROSOFT = "com.microsoft"
_BLOCK = 32
_LEVELS = 127
_ZERO_POINT = 128
_CHUNK = 4096  # columns of a weight, or rows of a table, that are converted at once
_BLOCKED_SCALES_OPSET = 21  # the first whose QuantizeLinear takes a scale per row of any tensor
_AXES_INPUT_OPSET = 18  # the first whose ReduceMax takes its axes as an input


def quantize(model: ir.Model, precision: Precision) -> None:
    """Quantise the embedding and every product with a constant weight, in place.

    Products are MatMul and plain Gemm nodes whose weight is a two-dimensional float32 initializer
    or the transpose of one; the embedding is what `input_ids` gathers from.
    """
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise ValueError(f"precision must be one of {known}, got {precision!r}")
    rewriter = _Rewriter(model)
    for node in list(model.graph):
        if (weight := _weight(node)) is not None:
            rewriter.replace_product(node, weight, precision)
        elif _is_embedding(node):
            rewriter.replace_embedding(node)
    model.opset_imports[_MICROSOFT] = 1


def quantize_columns(weight: FloatArray) -> tuple[Int8Array, FloatArray]:
    """Return int8 of the weight's shape (inputs, outputs) and one scale per output."""
    integers = np.empty(weight.shape, np.int8)
    scales = np.empty(weight.shape[1], np.float32)
    for start in range(0, weight.shape[1], _CHUNK):
        part = weight[:, start : start + _CHUNK]
        scales[start : start + _CHUNK] = scale = _scale(np.abs(part).max(axis=0))
        integers[:, start : start + _CHUNK] = np.rint(part / scale)
    return integers, scales


def quantize_blocks(weight: FloatArray, bits: Literal[4, 8]) -> tuple[UInt8Array, FloatArray]:
    """Return a weight (inputs, outputs) as MatMulNBits reads it.

    Integers of shape (outputs, blocks, bytes of a block) around a zero point in the middle of their
    range, two four-bit ones to a byte with the first in the low half; scales (outputs, blocks).
    """
    inputs, outputs = weight.shape
    blocks = -(-inputs // _BLOCK)
    integers = np.empty((outputs, blocks, _BLOCK * bits // 8), np.uint8)
    scales = np.empty((outputs, blocks), np.float32)
    for start in range(0, outputs, _CHUNK):
        part = np.zeros((min(_CHUNK, outputs - start), blocks * _BLOCK), np.float32)
        part[:, :inputs] = weight[:, start : start + _CHUNK].T
        part = part.reshape(-1, blocks, _BLOCK)
        middle = 1 << (bits - 1)
        if bits == 8:
            scale = _scale(np.abs(part).max(axis=-1))
        else:  # the largest value gets the end of the range that reaches one step further
            largest = np.take_along_axis(part, np.abs(part).argmax(axis=-1)[..., None], axis=-1)
            scale = _nonzero(largest[..., 0] / -middle)
        shifted = np.rint(part / scale[..., None]) + middle
        levels = shifted.clip(0, 2 * middle - 1).astype(np.uint8)
        integers[start : start + _CHUNK] = (
            levels if bits == 8 else levels[..., ::2] | levels[..., 1::2] << 4
        )
        scales[start : start + _CHUNK] = scale
    return integers, scales


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Activations with one scale per row, ready for integer products."""

    integers: ir.Value  # uint8
    scale: ir.Value  # (..., 1)


@dataclass(eq=False)
class _Rewriter:
    """Replaces nodes of one graph; what several of them need is made once."""

    model: ir.Model
    _rows: dict[ir.Value, _Rows] = field(default_factory=dict)
    _constants: dict[str, ir.Value] = field(default_factory=dict)

    def replace_product(self, node: ir.Node, weight: ir.Value, precision: Precision) -> None:
        """Put a quantised product in the place of a MatMul or Gemm."""
        tape = ir.tape.Tape()
        activations = node.inputs[0]
        assert activations is not None
        if precision == "int8":
            new = self._int8_product(tape, node, activations, weight)
        else:
            new = self._block_product(tape, node, activations, weight, precision)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None:
            new = tape.op("Add", [new, bias])
        self._replace(node, tape, new)

    def replace_embedding(self, node: ir.Node) -> None:
        """Put a Gather of int8 rows and of their scales in the place of a Gather."""
        table, ids = node.inputs
        assert table is not None
        integers, scales = self._stored(table, ".int8_rows", _quantize_rows)
        tape = ir.tape.Tape()
        rows = tape.op("Cast", [tape.op("Gather", [integers, ids])], {"to": ir.DataType.FLOAT})
        self._replace(node, tape, tape.op("Mul", [rows, tape.op("Gather", [scales, ids])]))

    def _int8_product(
        self, tape: ir.tape.Tape, node: ir.Node, activations: ir.Value, weight: ir.Value
    ) -> ir.Value:
        if activations not in self._rows:
            self._rows[activations] = self._quantized_rows(tape, activations, weight)
        rows = self._rows[activations]
        integers, scales = self._stored(
            weight, ".int8" + _side(node), lambda x: quantize_columns(_oriented(node, x))
        )
        # The operator takes the column scales itself, but copies them one by one in every call:
        # 12 us for 3,072 columns, where this Mul takes 1.3 us.
        one, zero_point = self._float("one", 1.0), self._zero_point()
        inputs = [rows.integers, integers, one, one, zero_point]
        product = tape.op("MatMulIntegerToFloat", inputs, domain=_MICROSOFT)
        return tape.op("Mul", [tape.op("Mul", [product, rows.scale]), scales])

    def _quantized_rows(
        self, tape: ir.tape.Tape, activations: ir.Value, weight: ir.Value
    ) -> _Rows:
        opset = self.model.opset_imports[""]
        sizes = tape.op("Abs", [activations])
        if opset >= _AXES_INPUT_OPSET:
            axes = self._constant("last_axis", np.array([-1], np.int64))
            reach = tape.op("ReduceMax", [sizes, axes], {"keepdims": 1})
        else:
            reach = tape.op("ReduceMax", [sizes], {"axes": [-1], "keepdims": 1})
        scale = tape.op("Mul", [reach, self._float("step", 1 / _LEVELS)])
        zero_point = self._zero_point()
        if opset < _BLOCKED_SCALES_OPSET:
            steps = tape.op("Div", [activations, scale])
            inputs = [steps, self._float("one", 1.0), zero_point]
            return _Rows(tape.op("QuantizeLinear", inputs), scale)
        # The zero points must have the shape of the scales. Any scale is 0 in steps of 1e30, so
        # this is a tensor of zero points in that shape, for one small node.
        zero_points = tape.op("QuantizeLinear", [scale, self._float("huge", 1e30), zero_point])
        inputs = [activations, scale, zero_points]
        attributes = {"axis": -1, "block_size": _width(weight)}
        return _Rows(tape.op("QuantizeLinear", inputs, attributes), scale)
