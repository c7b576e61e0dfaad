"""Kernels that round otherwise behind a long text are found out when the device is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import Engine, OnnxModel, SessionConfig, plan
from edgedraft.runtime.long_text_check import rows_keep_bits

ONE_THREAD = SessionConfig(threads=1)


@pytest.mark.parametrize("contract", ["own", "genai", "concat"])
def test_rows_keep_their_bits_behind_any_text(
    tiny_model: Callable[..., OnnxModel], contract: str
) -> None:
    model = tiny_model(contract=contract, context_length=900)
    for context in (100, 512):
        assert rows_keep_bits(model, context)
    assert model.length == 0


def test_a_kernel_that_changes_behind_a_long_text_is_warned_of_once(
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tiny_folder(context_length=900)
    forward = OnnxModel.forward

    def splits(self: OnnxModel, tokens: Any, parents: Any = None) -> Any:
        logits = forward(self, tokens, parents)
        return logits + 1e-4 if self.length > 300 and len(tokens) > 1 else logits

    monkeypatch.setattr(OnnxModel, "forward", splits)
    # The plan stays good, whatever else the machine is doing.
    monkeypatch.setattr(plan, "_fastest_s", lambda model: math.inf)
    for _ in range(2):
        Engine.open(folder, session=ONE_THREAD, state_dir=tmp_path)
    (message,) = caplog.messages
    assert "behind 512 tokens, other rows of a pass change a row's logits" in message
    assert "\n" not in message
