"""The runtime works where nothing but its own dependencies can be imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_WORKSTATION = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "optimum", "peft")

# None in sys.modules makes an import of that name fail, whether it is installed or not.
_CHAT = f"""
import sys
sys.modules.update(dict.fromkeys({_WORKSTATION}))
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("torch can be imported")
from edgedraft.runtime.cli import main
raise SystemExit(main(["chat", "--target", sys.argv[1], "--max-tokens", "8"]))
"""


def test_chat_works_where_torch_and_transformers_cannot_be_imported(
    tiny_folder: Callable[..., Path],
) -> None:
    command = [sys.executable, "-c", _CHAT, str(tiny_folder())]
    done = subprocess.run(
        command, input="the sea and the sea and\n", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "tokens per pass" in done.stderr
