"""Records one training step of a tiny drafter: inputs, loss, and gradients by torch's autograd.

The graph and the arrays let an environment without torch, and implementations in other languages,
check what runs a step. Record again with `python tests/golden/record_training_step.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "export")]

from test_training_step import (  # noqa: E402
    GOLDEN,
    as_drafter,
    autograd,
    make_batch,
    make_lora,
)

from edgedraft.export.training_step import export_training_step, trainable_model  # noqa: E402
from tiny_models import make_model  # noqa: E402


def main() -> None:
    drafter = as_drafter(make_model(GOLDEN))
    batch, lora = make_batch(drafter, (2, 7), 8, 4), make_lora(drafter, 2)
    inputs = {**drafter.weights, **batch, **lora}
    outputs = autograd(drafter, batch, lora)
    ir.save(export_training_step(trainable_model(drafter.model)), HERE / "training_step.onnx")
    np.savez_compressed(
        HERE / "training_step.npz",
        **{f"input/{name}": x for name, x in inputs.items()},
        **{f"output/{name}": x for name, x in outputs.items()},
    )


if __name__ == "__main__":
    main()
