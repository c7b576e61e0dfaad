"""Quantised products: close to fp32, and a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgedraft.export.quantize import Precision, quantize, quantize_blocks
from edgedraft.runtime import SessionConfig
from edgedraft.runtime.ort_session import open_session
from edgedraft.runtime.requantize import quantize_columns

PRECISIONS = get_args(Precision)
WIDTH, OUT, VOCAB = 96, 40, 64
Array = npt.NDArray[Any]


def graph(
    nodes: list[onnx.NodeProto],
    weights: dict[str, Array],
    inputs: dict[str, list[Any]],
    opset: int = 21,
) -> ir.Model:
    types = {"input_ids": TensorProto.INT64, "position_ids": TensorProto.INT64}
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(x, types.get(x, 1), inputs[x]) for x in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    return ir.from_proto(helper.make_model(made, opset_imports=opsets, ir_version=10))


def session(model: ir.Model, threads: int = 1) -> Callable[..., Array]:
    opened = open_session(ir.to_proto(model).SerializeToString(), SessionConfig(threads=threads))

    def run(**feeds: Array) -> Array:
        result: Array = opened.run(["y"], feeds)[0]
        return result

    return run


def normal(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def matmul(width: int = WIDTH, out: int = OUT) -> ir.Model:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return graph([node], {"w": normal(width, out)}, {"x": [1, "rows", width]})


def transposed() -> ir.Model:
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["y"]),
    ]
    return graph(nodes, {"w": normal(OUT, WIDTH)}, {"x": [1, "rows", WIDTH]})


def gemm() -> ir.Model:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    weights = {"w": normal(OUT, WIDTH), "b": 5 * normal(OUT, seed=1)}
    return graph([node], weights, {"x": ["rows", WIDTH]})


@pytest.mark.parametrize("make", [matmul, transposed, gemm])
@pytest.mark.parametrize(
    ("precision", "bound"), [("int8", 0.012), ("int8-block", 0.012), ("int4-block", 0.12)]
)
def test_a_quantised_product_is_close_to_fp32(
    make: Callable[[], ir.Model], precision: Precision, bound: float
) -> None:
    x = normal(5, WIDTH, seed=2)
    x *= np.array([[1], [1e-3], [1e3], [1], [1]], np.float32)  # every row has a scale of its own
    x = x if make is gemm else x[None]
    expected = session(make())(x=x)
    model = make()
    quantize(model, precision)
    error = session(model)(x=x) - expected
    size = np.linalg.norm(expected, axis=-1)
    assert (np.linalg.norm(error, axis=-1) <= bound * size).all()
    assert "w" not in model.graph.initializers


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("precision", "fewest"), [("int8", 1), ("int8-block", 2)])
def test_a_row_has_the_same_bits_in_every_pass(
    precision: Precision, fewest: int, threads: int
) -> None:
    model = matmul(width=576, out=200)
    quantize(model, precision)
    run = session(model, threads)
    rng = np.random.default_rng(3)
    rows = normal(16, 576, seed=4)
    first = run(x=rows[None, : max(fewest, 2)])[0, 0]
    for count in range(fewest, 17):
        for place in {0, count // 2, count - 1}:
            x = normal(count, 576, seed=count) * rng.choice([1e-4, 1.0, 1e4], (count, 1))
            x = x.astype(np.float32)
            x[place] = rows[0]
            assert (run(x=x[None])[0, place] == first).all(), (count, place)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_of_zeros_gives_zeros(precision: Precision) -> None:
    model = matmul()
    quantize(model, precision)
    x = normal(1, 4, WIDTH)
    x[0, 1:3] = 0
    y = session(model)(x=x)
    assert np.isfinite(y).all()
    assert (y[0, 1:3] == 0).all()


def test_a_column_of_zeros_gives_zeros() -> None:
    weight = normal(WIDTH, OUT)
    weight[:, 7] = 0
    for precision in PRECISIONS:
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        model = graph([node], {"w": weight}, {"x": [1, "rows", WIDTH]})
        with np.errstate(all="raise"):
            quantize(model, precision)
        y = session(model)(x=normal(1, 3, WIDTH))
        assert (y[..., 7] == 0).all() and np.isfinite(y).all()


def embedding_and_head() -> ir.Model:
    """A tied head: the embedding's rows times the embedding, plus exact angles of positions."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"]),
        helper.make_node("Gather", ["angles", "position_ids"], ["a"]),
        helper.make_node("Add", ["h", "a"], ["s"]),
        helper.make_node("Transpose", ["table"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["s", "t"], ["y"]),
    ]
    weights = {"table": normal(VOCAB, WIDTH), "angles": normal(50, WIDTH, seed=1)}
    return graph(nodes, weights, {"input_ids": [1, "rows"], "position_ids": [1, "rows"]})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_the_embedding_is_stored_in_eight_bits(precision: Precision) -> None:
    nodes = [
        helper.make_node("Reshape", ["input_ids", "flat"], ["ids"]),
        helper.make_node("Gather", ["table", "ids"], ["h"]),
        helper.make_node("Gather", ["angles", "position_ids"], ["a"]),
        helper.make_node("Concat", ["h", "a"], ["y"], axis=0),
    ]
    table, angles = normal(VOCAB, WIDTH), normal(50, WIDTH, seed=1)
    table[9] = 0
    weights: dict[str, Array] = {"table": table, "angles": angles, "flat": np.array([-1])}
    model = graph(nodes, weights, {"input_ids": [1, "rows"], "position_ids": ["rows"]})
    quantize(model, precision)
    ids = np.arange(VOCAB)
    y = session(model)(input_ids=ids[None], position_ids=np.arange(50))
    step = np.abs(table).max(axis=1, keepdims=True) / 127
    assert (np.abs(y[:VOCAB] - table) <= 0.5001 * step).all()
    assert (y[VOCAB:] == angles).all()
    assert "table" not in model.graph.initializers


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tied_head_leaves_no_fp32_weight_behind(precision: Precision) -> None:
    feeds = {"input_ids": np.array([[3, 5, 60]]), "position_ids": np.array([[0, 1, 2]])}
    expected = session(embedding_and_head())(**feeds)
    model = embedding_and_head()
    quantize(model, precision)
    assert "table" not in model.graph.initializers
    assert "Transpose" not in [node.op_type for node in model.graph]
    y = session(model)(**feeds)
    bound = 0.15 if precision == "int4-block" else 0.02
    assert np.linalg.norm(y - expected) <= bound * np.linalg.norm(expected)


def test_what_feeds_several_products_is_quantised_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["x", "v"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    weights = {"w": normal(WIDTH, OUT), "v": normal(WIDTH, OUT, seed=1)}
    model = graph(nodes, weights, {"x": [1, "rows", WIDTH]})
    quantize(model, "int8")
    types = [node.op_type for node in model.graph]
    assert types.count("ReduceMax") == 1
    assert types.count("MatMulIntegerToFloat") == 2


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("MatMul", ["x", "x"], ["y"]),
        helper.make_node("MatMul", ["w", "x"], ["y"]),
        helper.make_node("Gemm", ["x", "w"], ["y"], alpha=2.0),
        helper.make_node("Gemm", ["x", "w"], ["y"], transA=1),
    ],
)
def test_other_products_are_left_alone(node: onnx.NodeProto) -> None:
    model = graph([node], {"w": normal(WIDTH, WIDTH)}, {"x": [WIDTH, WIDTH]})
    quantize(model, "int8")
    assert [x.op_type for x in model.graph] == [node.op_type]


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_hold_the_weight_to_half_a_step(bits: int) -> None:
    weight = normal(50, 3)  # 50 inputs: the last block is filled up
    levels, scales = quantize_blocks(weight, bits)
    if bits == 4:
        levels = np.stack([levels & 15, levels >> 4], axis=-1).reshape(3, 2, 32)
    middle = 1 << (bits - 1)
    back = (levels.astype(np.float32) - middle) * scales[..., None]
    padded = np.zeros((3, 64), np.float32)
    padded[:, :50] = weight.T
    error = np.abs(back.reshape(3, 64) - padded).reshape(3, 2, 32)
    # A value as large as the largest, of the other sign, is one whole step beyond the range.
    assert (error <= 1.001 * np.abs(scales)[..., None]).all()
    assert np.median(error / np.abs(scales)[..., None]) < 0.3
    assert (error.reshape(3, 64)[:, 50:] == 0).all()


def test_columns_wider_than_a_chunk_are_converted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(8, 70)
    whole = quantize_columns(weight)
    blocks = quantize_blocks(weight, 4)
    monkeypatch.setattr("edgedraft.export.quantize._CHUNK", 32)
    monkeypatch.setattr("edgedraft.runtime.requantize._CHUNK", 32)
    for expected, parts in (
        (whole, quantize_columns(weight)),
        (blocks, quantize_blocks(weight, 4)),
    ):
        np.testing.assert_array_equal(expected[0], parts[0])
        np.testing.assert_array_equal(expected[1], parts[1])


@pytest.mark.parametrize(
    ("precision", "opset", "message"),
    [
        ("int3", 21, "precision must be one of int8, int8-block, int4-block, got 'int3'"),
        ("int8", 18, "the graph must have opset >= 21 to be quantised, got 18"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(precision: Any, opset: int, message: str) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = graph([node], {"w": normal(WIDTH, OUT)}, {"x": [1, "rows", WIDTH]}, opset)
    with pytest.raises(ValueError, match=f"^{message}$"):
        quantize(model, precision)
