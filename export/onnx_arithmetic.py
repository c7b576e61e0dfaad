"""Lets formulas over numpy-like arrays be written down as an ONNX graph.

    x = recorder.input("x", ir.DataType.FLOAT, ["rows", 384])
    recorder.output("y", (x * x).mean() + 1e-6)

Every operation appends one node; nothing is computed. Broadcasting is ONNX's, which is numpy's.
Reductions are over the last axis and keep it. Operands that are numbers or numpy arrays become
constants: int64 for int, float32 for float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

Operand: TypeAlias = Union["Expression", float, Sequence[int], npt.NDArray[Any]]


class Expression:
    """A value of a graph in the making."""

    __slots__ = ("_tape", "value")

    def __init__(self, tape: ir.tape.Tape, value: ir.Value) -> None:
        self._tape = tape
        self.value = value

    def op(self, op_type: str, *others: Operand, **attributes: Any) -> Expression:
        """Return the output of an ONNX operator whose first input is this value."""
        inputs = [self.value, *(self._value(x) for x in others)]
        return Expression(self._tape, self._tape.op(op_type, inputs, attributes))

    def __add__(self, other: Operand) -> Expression:
        return self.op("Add", other)

    def __sub__(self, other: Operand) -> Expression:
        return self.op("Sub", other)

    def __rsub__(self, other: Operand) -> Expression:
        return Expression(self._tape, self._value(other)) - self

    def __mul__(self, other: Operand) -> Expression:
        return self.op("Mul", other)

    def __truediv__(self, other: Operand) -> Expression:
        return self.op("Div", other)

    def __matmul__(self, other: Operand) -> Expression:
        return self.op("MatMul", other)

    def __neg__(self) -> Expression:
        return self.op("Neg")

    def product(
        self,
        other: Expression,
        *added: Expression,
        flip_left: bool = False,
        flip_right: bool = False,
    ) -> Expression:
        """Return the product of two matrices, either of them transposed first, plus a third."""
        return self.op("Gemm", other, *added, transA=int(flip_left), transB=int(flip_right))

    def sum(self, axis: int = -1) -> Expression:
        return self.op("ReduceSum", [axis])

    def mean(self) -> Expression:
        return self.op("ReduceMean", [-1])

    def transpose(self, *order: int) -> Expression:
        return self.op("Transpose", perm=order)

    def flipped(self) -> Expression:
        """Return an array of rank 5 with its last two axes exchanged."""
        return self.transpose(0, 1, 2, 4, 3)

    def cast(self, dtype: ir.DataType) -> Expression:
        return self.op("Cast", to=dtype)

    def beside(self, other: Operand) -> Expression:
        """Return both joined along the last axis."""
        return self.op("Concat", other, axis=-1)

    def columns(self, start: int, stop: int) -> Expression:
        """Return columns start to stop, which may be counted from the end."""
        return self.op("Slice", [start], [stop], [-1])

    def _value(self, operand: Operand) -> ir.Value:
        return operand.value if isinstance(operand, Expression) else _constant(self._tape, operand)


class Recorder:
    """The graph in the making: its inputs, its outputs, and the nodes between them."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> Expression:
        """Return a new input of the graph; names in its shape are dynamic dimensions."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return Expression(self._tape, value)

    def constant(self, value: float | Sequence[int]) -> Expression:
        """Return a constant to start a formula with."""
        return Expression(self._tape, _constant(self._tape, value))

    def output(self, name: str, expression: Expression, shape: Sequence[int | str]) -> None:
        """Make a float32 value an output of the graph."""
        value = expression.value
        value.name, value.shape = name, ir.Shape(shape)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        self._outputs.append(value)

    def model(self, name: str, *, opset: int, ir_version: int) -> ir.Model:
        """Return the graph as it stands, without nodes that no output needs: onnxruntime would run
        them.
        """
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._tape.nodes,
            opset_imports={"": opset},
            name=name,
        )
        model = ir.Model(graph, ir_version=ir_version, producer_name="edgedraft")
        RemoveUnusedNodesPass()(model)
        return model


def _constant(tape: ir.tape.Tape, value: Any) -> ir.Value:
    array = np.asarray(value)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return tape.op("Constant", [], {"value": ir.tensor(array)})
