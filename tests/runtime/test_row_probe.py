"""Rows that influence each other are found when a graph is opened: nothing is verified then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from edgedraft.runtime import DecodeConfig, Engine

Folder = Callable[..., Path]
PROMPT = [5, 9, 7, 5, 9, 7, 5, 9]


def copy_of(folder: Path, out: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """Copy a stock folder, changing its graph."""
    shutil.copytree(folder, out)
    model = onnx.load(out / "model.onnx")
    change(model)
    onnx.save(model, out / "model.onnx")
    return out


def answers_plainly(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    reason: str = "the rows of a pass change each other's logits",
) -> None:
    """Check that a folder is used as a graph of single rows, and says why."""
    engine = Engine.open(folder)
    assert engine.target.max_rows == 1
    assert engine.target.single_rows
    assert reason in caplog.text
    config = DecodeConfig(max_tokens=30)
    answer = engine.generate(PROMPT, config)
    assert answer.stats.proposed == 0
    plain = Engine.open(folder, drafters=["none"]).generate(PROMPT, config)
    assert answer.token_ids == plain.token_ids


@pytest.mark.parametrize("contract", ["genai", "concat"])
def test_rows_with_a_common_activation_scale(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture, contract: str
) -> None:
    """What onnx-community calls model_quantized.onnx: a rejected draft would change the answer."""
    folder = tmp_path / "folder"
    shutil.copytree(tiny_folder(contract=contract), folder)
    graph = folder / "model.onnx"
    # onnx knows no types behind GroupQueryAttention.
    known = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(graph, graph, weight_type=QuantType.QInt8, extra_options=known)
    answers_plainly(folder, caplog)


def test_heads_whose_order_of_summation_depends_on_the_cpu(
    tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(heads=2, kv_heads=1, head_dim=160)
    answers_plainly(folder, caplog, "attention over heads of 160 changes its order of summation")


def test_rows_that_see_what_follows_them(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Old exporters traced a pass of one row, whose mask hides nothing among several."""

    def unmask(model: onnx.ModelProto) -> None:
        hidden = next(n.input[2] for n in model.graph.node if n.op_type == "Where")
        weight = next(w for w in model.graph.initializer if w.name == hidden)
        weight.CopyFrom(numpy_helper.from_array(np.zeros((), np.float32), hidden))

    answers_plainly(copy_of(tiny_folder(contract="concat"), tmp_path / "folder", unmask), caplog)


def test_rows_that_are_not_numbers(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(model: onnx.ModelProto) -> None:
        weight = next(w for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT)
        values = numpy_helper.to_array(weight) * np.float32(np.nan)
        weight.CopyFrom(numpy_helper.from_array(values, weight.name))

    folder = copy_of(tiny_folder(contract="concat"), tmp_path / "folder", spoil)
    assert Engine.open(folder).target.max_rows == 1
    assert "nan%" in caplog.text


@pytest.mark.parametrize("contract", ["own", "genai", "concat"])
def test_a_sound_graph_is_opened_without_a_word(
    tiny_folder: Folder, contract: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Trying what a graph can do makes onnxruntime complain, which is nobody's concern."""
    target = Engine.open(tiny_folder(contract=contract), drafters=["none"]).target
    assert target.obstacle is None
    assert target.max_rows > 1
    assert capfd.readouterr() == ("", "")
