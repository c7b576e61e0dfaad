"""What a drafter's folder holds so that it can learn on the device (docs/formats.md).

The weights lie beside the graph in the basis of their Hugging Face names, in half precision; the
graph's integers are made of exactly those, so a device that adds what was learned can make them
again. That is why such a drafter is neither rotated nor smoothed. It costs nothing there: the
shipped drafter's int8 is at KL 0.0022 from fp32 without, and at 0.0025 with smoothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from safetensors.numpy import load_file
from safetensors.torch import save

from edgedraft.runtime import SessionConfig
from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.ort_session import open_session

from .acceptance_head import AcceptanceHead
from .errors import ExportError
from .quantize import column_recipes
from .training_step import (
    TrainableModel,
    export_evaluation,
    export_training_step,
    named_weights,
)

_STEP = "training_step.onnx"
_EVALUATION = "evaluation.onnx"
_WEIGHTS = "weights.safetensors"
_TOLERANCE = 1e-3  # of a logarithm; rounding alone reaches 1e-5
_MODEL = "model."  # what the traced wrapper puts in front of the model's own names


@torch.no_grad()
def round_to_half(model: torch.nn.Module) -> None:
    """Round every weight to what half precision can hold, in place."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


def write_training_files(
    folder: Path,
    model: torch.nn.Module,
    head: AcceptanceHead | None,
    trainable: TrainableModel,
    graph: ir.Model,
) -> dict[str, Any]:
    """Write the files and return the manifest's `training`.

    `graph` is the decoder, quantised to int8, and `model` and `head`, rounded to half precision,
    what it was made of.
    """
    named = named_weights(model, head)
    weights = {name: x.detach().half().contiguous() for name, x in named.items()}
    (folder / _WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
    ir.save(export_training_step(trainable), folder / _STEP)
    ir.save(export_evaluation(trainable), folder / _EVALUATION)
    return {
        "step_graph": _STEP,
        "evaluation_graph": _EVALUATION,
        "weights": _WEIGHTS,
        "modules": trainable.modules,
        "merge": {
            initializer: [x.removeprefix(_MODEL).removesuffix(".weight") for x in parameters]
            for initializer, parameters in column_recipes(graph.graph).items()
        },
    }


def check_training_files(
    folder: Path, tokens: Sequence[int], expected: FloatArray, accepted: FloatArray | None
) -> None:
    """Raise ExportError where the step graph's forward pass is not the model's.

    `expected` are the model's logits for the tokens, shape (tokens, vocabulary), `accepted` what
    its acceptance head says of them, shape (tokens,), None where it has none.
    """
    session = open_session(folder / _EVALUATION, SessionConfig())
    feeds: dict[str, Any] = {
        "tokens": np.array([tokens]),
        "at": np.arange(len(tokens) - 1),
        "next": np.array(tokens[1:]),
        "scale": np.array(0, np.float32),
        **load_file(folder / _WEIGHTS),
    }
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.zeros(
                [x if isinstance(x, int) else 0 for x in value.shape], np.float32
            )
    prob, *judged = session.run(["prob", *(["acceptance"] if accepted is not None else [])], feeds)
    rows = torch.log_softmax(torch.from_numpy(expected[:-1]), -1).numpy()
    difference = np.abs(np.log(prob) - rows[feeds["at"], feeds["next"]]).max()
    if not difference <= _TOLERANCE:
        raise ExportError(
            f"the training step disagrees with transformers: a log probability differs by "
            f"{difference:.2g}"
        )
    for said in judged:
        assert accepted is not None
        if not (difference := np.abs(said - accepted[:-1]).max()) <= _TOLERANCE:
            raise ExportError(
                f"the acceptance head of the training step disagrees with torch by {difference:.2g}"
            )
