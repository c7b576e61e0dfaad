"""A tiny drafter that can learn, in the folder that `edgedraft-export drafter` would write: int8
products in a file beside the graph, the weights they were made of, and what says how.

    folder = open_model_folder(tiny_drafter(tmp_path))
    retrained = tiny_drafter(tmp_path / "other", {"module.0.left": weight})
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from edgedraft.runtime.lora import Lora
from edgedraft.runtime.requantize import quantize_columns
from graphs import byte_level_tokenizer, decoder_graph, file_entry, write_target_folder

Weights = Mapping[str, npt.NDArray[Any]]

_SMALLEST_OUTSIDE = 100  # bytes: scales lie outside the graph, shapes within


def tiny_drafter(path: Path, weights: Weights | None = None, *, seed: int = 3) -> Path:
    """Write a drafter's folder and return it; `weights`, (outputs, inputs) by module, replace its
    own.
    """
    tokenizer = byte_level_tokenizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    model = onnx.load_from_string(decoder_graph(vocab_size=size, seed=seed))
    own, merge = _quantize(model, weights or {})
    write_target_folder(
        path,
        tokenizer=tokenizer,
        chat_template=None,
        format="edgedraft-drafter",
        precision="int8",
        graph=b"later",
    )
    onnx.save(
        model,
        path / "decoder.onnx",
        save_as_external_data=True,
        location="decoder.onnx.data",
        size_threshold=_SMALLEST_OUTSIDE,
    )
    weights_by_name = {f"{name}.weight": weight for name, weight in own.items()}
    add_training_files(path, weights_by_name, {name: f"{name}.weight" for name in own}, merge)
    return path


def add_training_files(
    path: Path,
    weights: Mapping[str, npt.NDArray[Any]],
    modules: Mapping[str, str],
    merge: Mapping[str, list[str]],
) -> None:
    """Let a drafter's folder say what it learns with; its graphs are nobody's to open."""
    (path / "weights.safetensors").write_bytes(safetensors(weights))
    for name in ("training_step.onnx", "evaluation.onnx"):
        (path / name).write_bytes(b"the runtime does not open it")
    manifest = json.loads((path / "manifest.json").read_text())
    names = [x.name for x in path.iterdir() if x.name != "manifest.json"]
    manifest["files"] = {name: file_entry(path / name) for name in names}
    manifest["training"] = {
        "step_graph": "training_step.onnx",
        "evaluation_graph": "evaluation.onnx",
        "weights": "weights.safetensors",
        "modules": modules,
        "merge": merge,
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


def tiny_lora(shapes: Mapping[str, tuple[int, int]], *, seed: int = 0, rank: int = 4) -> Lora:
    """Return a LoRA of these modules that changes what a tiny drafter says."""
    lora = Lora.initial(shapes, rank, 2.0 * rank, np.random.default_rng(seed))
    rng = np.random.default_rng(seed + 1)
    tensors = {
        name: x + 0.3 * rng.standard_normal(x.shape, np.float32) for name, x in lora.tensors.items()
    }
    return Lora(rank, lora.alpha, tensors)


def safetensors(tensors: Mapping[str, npt.NDArray[Any]], **metadata: str) -> bytes:
    """Return what a .safetensors file of half and single precision holds."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, array in tensors.items():
        kind = {"float16": "F16", "float32": "F32"}[array.dtype.name]
        end = len(body) + array.nbytes
        offsets = [len(body), end]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        body += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def _quantize(
    model: onnx.ModelProto, weights: Weights
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, list[str]]]:
    """Put every product's weight into eight bits; return the weights by module, and of which
    modules each integer initializer was made.
    """
    graph = model.graph
    constants = {x.name: x for x in graph.initializer}
    own: dict[str, npt.NDArray[Any]] = {}
    merge: dict[str, list[str]] = {}
    products = [x for x in graph.node if x.op_type == "MatMul" and x.input[1] in constants]
    for count, node in enumerate(products):
        whole = numpy_helper.to_array(constants[node.input[1]])
        # As if two modules were one product, like query, key and value of a real one.
        halves = np.split(whole, 2, axis=1)
        modules = [f"module.{count}.{side}" for side in ("left", "right")]
        for module, half in zip(modules, halves, strict=True):
            own[module] = weights.get(module, half.T.astype(np.float16))
        together = np.concatenate([own[x].T.astype(np.float32) for x in modules], axis=1)
        name = f"{'+'.join(modules)}.int8"
        merge[name] = modules
        integers, scales = quantize_columns(together)
        graph.initializer.append(numpy_helper.from_array(integers, name))
        graph.initializer.append(numpy_helper.from_array(scales, f"{name}.scales"))
        graph.initializer.remove(constants[node.input[1]])
        floats = f"{name}.floats"
        graph.node.insert(
            0, helper.make_node("DequantizeLinear", [name, f"{name}.scales"], [floats], axis=1)
        )
        node.input[1] = floats
    return own, merge
