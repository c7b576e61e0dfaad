"""Exporting needs torch; without it the tests of this folder are skipped."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest


def pytest_pycollect_makemodule() -> None:
    """Skip a test file before it is imported where it could not be."""
    for module in ("torch", "transformers", "onnxscript"):
        if find_spec(module) is None:
            pytest.skip(f'needs {module}: pip install "edgedraft[export]"', allow_module_level=True)


@pytest.fixture(scope="session")
def text() -> list[int]:
    """A token sequence longer than every sliding window of the tiny models."""
    return [int(x) for x in np.random.default_rng(0).integers(3, 304, 40)]
