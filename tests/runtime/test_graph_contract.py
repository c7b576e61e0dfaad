"""What a graph wants is read from the graph; what cannot be rolled back or verified is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgedraft.runtime import FolderError, OnnxModel, SessionConfig, open_target_folder
from edgedraft.runtime.graph_contract import discover, probe
from edgedraft.runtime.ort_session import open_session
from graphs import decoder_graph

ONE_THREAD = SessionConfig(threads=1)


def contract_of(graph: bytes, head_dim: int | None = None) -> Any:
    session = open_session(graph, ONE_THREAD)
    return probe(session, discover(session, "g.onnx", head_dim), "g.onnx")


def refusal(graph: bytes | onnx.ModelProto, head_dim: int | None = None) -> str:
    if isinstance(graph, onnx.ModelProto):
        graph = graph.SerializeToString()
    with pytest.raises(FolderError) as caught:
        contract_of(graph, head_dim)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "in_place"),
    [
        ({"contract": "own"}, True),
        ({"contract": "own", "attention_bias": False, "logit_rows": False}, True),
        ({"contract": "genai"}, True),
        ({"contract": "genai", "position_ids": False}, True),
        ({"contract": "concat"}, False),
        ({"contract": "concat", "position_ids": False}, False),
    ],
    ids=str,
)
def test_exporters_are_told_apart_by_their_graphs(changes: dict[str, Any], in_place: bool) -> None:
    contract = contract_of(decoder_graph(**changes), head_dim=16)
    assert contract.in_place is in_place
    assert contract.every_row
    assert contract.row_difference == 0
    assert contract.logits_width == 40
    assert len(contract.cache) == 4
    assert contract.has("attention_bias") is (
        changes["contract"] == "own" and changes.get("attention_bias", True)
    )


def renamed(graph: bytes, old: str, new: str) -> onnx.ModelProto:
    """Return the graph with one input or output renamed."""
    model = onnx.load_from_string(graph)
    for value in (*model.graph.input, *model.graph.output):
        if value.name == old:
            value.name = new
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new
    return model


@pytest.mark.parametrize("present", ["present.{}.{}", "present_key_values.{}.{}"])
@pytest.mark.parametrize("past", ["past_key_values.{}.{}", "past_{1}_{0}"])
def test_caches_are_found_under_the_names_in_use(past: str, present: str) -> None:
    graph = decoder_graph()
    for layer in range(2):
        for kind in ("key", "value"):
            for old, new in (
                (f"past_key_values.{layer}.{kind}", past.format(layer, kind)),
                (f"present.{layer}.{kind}", present.format(layer, kind)),
            ):
                graph = renamed(graph, old, new).SerializeToString()
    names = {(t.past, t.present) for t in contract_of(graph).cache}
    assert names == {
        (past.format(layer, kind), present.format(layer, kind))
        for layer in range(2)
        for kind in ("key", "value")
    }


def test_a_state_that_cannot_be_rolled_back_is_refused_by_name() -> None:
    message = refusal(decoder_graph(recurrent_state=True))
    assert "inputs 'past_conv.0' are neither tokens nor a key/value cache" in message
    assert "cannot be rolled back" in message


def test_graphs_that_are_no_decoder_are_refused() -> None:
    assert "expected an input 'input_ids'" in refusal(
        renamed(decoder_graph(), "input_ids", "tokens")
    )
    assert "an output 'logits'" in refusal(renamed(decoder_graph(), "logits", "scores"))
    x = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "n"])
    y = helper.make_tensor_value_info("logits", TensorProto.INT64, [1, "n"])
    node = helper.make_node("Identity", ["input_ids"], ["logits"])
    imports = [helper.make_opsetid("", 18)]
    bare = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=imports, ir_version=9
    )
    assert "no key/value cache; export it with one" in refusal(bare)


def test_caches_without_outputs_are_refused() -> None:
    model = onnx.load_from_string(decoder_graph())
    model.graph.output.remove(next(o for o in model.graph.output if o.name == "present.1.key"))
    assert "4 cache inputs, but 3 cache outputs; export it again" in refusal(model)


def test_a_symbolic_head_size_needs_the_configuration() -> None:
    graph = decoder_graph(contract="genai")
    assert contract_of(graph, head_dim=16).cache[0].head_dim == 16
    assert "expected (batch, heads, length, head size)" in refusal(graph)
    assert "fails on two tokens" in refusal(graph, head_dim=8)


def test_an_unknown_element_type_is_refused() -> None:
    model = onnx.load_from_string(decoder_graph(contract="concat"))
    logits = next(o for o in model.graph.output if o.name == "logits")
    logits.type.tensor_type.elem_type = TensorProto.DOUBLE
    cast = next(n for n in model.graph.node if n.output[0] == "logits")
    cast.op_type = "Cast"
    cast.attribute.append(helper.make_attribute("to", TensorProto.DOUBLE))
    assert "'logits' has type tensor(double), which is not supported" in refusal(model)


def test_a_graph_without_the_cache_length_is_refused() -> None:
    model = onnx.load_from_string(decoder_graph(contract="concat", position_ids=True))
    mask = next(i for i in model.graph.input if i.name == "attention_mask")
    model.graph.input.remove(mask)
    model.graph.initializer.append(
        numpy_helper.from_array(np.ones((1, 2), np.int64), "attention_mask")
    )
    assert "no input tells the cache length" in refusal(model)


def test_a_graph_that_fails_is_refused_with_the_reason() -> None:
    model = onnx.load_from_string(decoder_graph(contract="concat"))
    gather = next(n for n in model.graph.node if n.op_type == "Gather")
    table = next(w for w in model.graph.initializer if w.name == gather.input[0])
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table)[:0], table.name))
    assert "fails on two tokens" in refusal(model)


def test_a_graph_of_last_rows_only_is_recognised() -> None:
    for contract in ("own", "genai", "concat"):
        found = contract_of(
            decoder_graph(contract=contract, last_row_only=True, logit_rows=False), head_dim=16
        )
        assert not found.every_row
        assert found.obstacle is not None and "last row only" in found.obstacle


def test_rows_that_share_an_activation_scale_are_found_out() -> None:
    """As DynamicQuantizeLinear does: rejected drafts would change accepted tokens."""
    model = onnx.load_from_string(decoder_graph(contract="genai"))
    matmul = [n for n in model.graph.node if n.op_type == "MatMul"][0]
    x, weight = matmul.input
    at = list(model.graph.node).index(matmul)
    quantize = helper.make_node("DynamicQuantizeLinear", [x], ["q", "scale", "zero"])
    back = helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["coarse"])
    matmul.input[0] = "coarse"
    model.graph.node.insert(at, back)
    model.graph.node.insert(at, quantize)
    contract = contract_of(model.SerializeToString(), head_dim=16)
    assert contract.row_difference > 1e-3
    assert not contract.every_row
    assert contract.obstacle is not None and "change each other's logits" in contract.obstacle


def test_whether_a_row_may_have_logits_alone_is_tried_out() -> None:
    assert contract_of(decoder_graph()).lone_logits
    assert not contract_of(decoder_graph(lone_logits_differ=True)).lone_logits
    assert not contract_of(decoder_graph(logit_rows=False)).lone_logits


def test_a_context_shorter_than_the_probe_is_one_error_or_works() -> None:
    for positions in (2, 4, 12, 19):
        try:
            contract_of(decoder_graph(max_positions=positions))
        except FolderError as error:
            assert "\n" not in str(error)


def test_loading_a_good_graph_prints_nothing(
    tiny_folder: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for contract in ("own", "genai", "concat"):
        folder = open_target_folder(tiny_folder(contract=contract))
        with caplog.at_level(logging.WARNING):
            OnnxModel(folder, ONE_THREAD, tokenizer_size=290)
        captured = capfd.readouterr()
        assert (captured.out, captured.err) == ("", "")
    assert caplog.records == []
