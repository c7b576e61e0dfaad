"""A recorded training step, and a recorded evaluation with an acceptance head, run in every
onnxruntime, and learn what torch's autograd says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgedraft.runtime import SessionConfig
from edgedraft.runtime.ort_session import open_session

GOLDEN = Path(__file__).parents[1] / "golden"


def recorded(name: str, kind: str) -> dict[str, npt.NDArray[Any]]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {x.removeprefix(kind): file[x] for x in file.files if x.startswith(kind)}


@pytest.mark.parametrize("graph", ["training_step", "evaluation"])
def test_a_recorded_graph_has_the_recorded_gradients(graph: str) -> None:
    session = open_session(GOLDEN / f"{graph}.onnx", SessionConfig(threads=1))
    expected = recorded(graph, "output/")
    names = [x.name for x in session.get_outputs()]
    assert set(names) == set(expected)
    for name, got in zip(names, session.run(names, recorded(graph, "input/")), strict=True):
        error = np.linalg.norm(got - expected[name])
        assert error <= 1e-5 * np.linalg.norm(expected[name]), name
