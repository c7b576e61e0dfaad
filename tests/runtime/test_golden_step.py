"""A recorded training step runs in every onnxruntime, and learns what torch's autograd says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgedraft.runtime import SessionConfig
from edgedraft.runtime.ort_session import open_session

GOLDEN = Path(__file__).parents[1] / "golden"


def recorded(kind: str) -> dict[str, npt.NDArray[Any]]:
    with np.load(GOLDEN / "training_step.npz") as file:
        return {x.removeprefix(kind): file[x] for x in file.files if x.startswith(kind)}


def test_the_recorded_step_has_the_recorded_gradients() -> None:
    session = open_session(GOLDEN / "training_step.onnx", SessionConfig(threads=1))
    expected = recorded("output/")
    names = [x.name for x in session.get_outputs()]
    assert set(names) == set(expected)
    for name, got in zip(names, session.run(names, recorded("input/")), strict=True):
        error = np.linalg.norm(got - expected[name])
        assert error <= 1e-5 * np.linalg.norm(expected[name]), name
