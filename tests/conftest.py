"""Shared set-up: nothing is written to the user's own state directory, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import OnnxModel, SessionConfig, open_target_folder
from edgedraft.runtime.ort_session import onnxruntime
from graphs import tiny_target

try:
    from hypothesis import settings
except ImportError:  # a wheel run may go without it; the property tests then skip
    pass
else:
    settings.register_profile("edgedraft", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("edgedraft")


onnxruntime()  # some tests import it by themselves: its telemetry is off by then


@pytest.fixture(autouse=True)
def own_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep device state of a test in its own folder."""
    monkeypatch.setenv("EDGEDRAFT_STATE", str(tmp_path / "state"))
    yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a maker of tiny target folders; equal wishes share one folder: do not change it."""

    @cache
    def make(**wishes: Any) -> Path:
        return tiny_target(tmp_path_factory.mktemp("target") / "tiny", **wishes)

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[..., Path]) -> Callable[..., OnnxModel]:
    """Return a maker of fresh `OnnxModel`s on one thread over tiny folders."""

    def make(threads: int = 1, **wishes: Any) -> OnnxModel:
        folder = open_target_folder(tiny_folder(**wishes))
        return OnnxModel(folder, SessionConfig(threads=threads))

    return make
