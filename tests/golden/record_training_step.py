"""Records one training step of a tiny drafter: inputs, loss, and gradients by torch's autograd; and
one evaluation of it with an acceptance head.

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
    WIDEN,
    Feeds,
    as_drafter,
    autograd,
    judged,
    make_batch,
    make_head,
    make_lora,
)

from edgedraft.export.training_step import (  # noqa: E402
    export_evaluation,
    export_training_step,
    trainable_model,
)
from tiny_models import make_model  # noqa: E402


def main() -> None:
    drafter = as_drafter(make_model(GOLDEN))
    batch, lora = make_batch(drafter, (2, 7), 8, 4), make_lora(drafter, 2)
    inputs = {**drafter.weights, **batch, **lora}
    outputs = autograd(drafter, batch, lora)
    ir.save(export_training_step(trainable_model(drafter.model)), HERE / "training_step.onnx")
    save("training_step.npz", inputs, outputs)

    drafter = as_drafter(make_model(GOLDEN), make_head(GOLDEN.hidden_size))
    lora |= {k: x for k, x in make_lora(drafter, 2, seed=1).items() if k.startswith(WIDEN)}
    outputs = {k: x for k, x in outputs.items() if k in ("hit", "prob")}
    trainable = trainable_model(drafter.model, drafter.head)
    ir.save(export_evaluation(trainable), HERE / "evaluation.onnx")
    batch = {name: batch[name] for name in ("tokens", "at", "next", "scale")}
    save(
        "evaluation.npz",
        {**drafter.weights, **batch, **lora},
        outputs | judged(drafter, batch, lora),
    )


def save(name: str, inputs: Feeds, outputs: Feeds) -> None:
    arrays = {f"input/{k}": x for k, x in inputs.items()}
    arrays |= {f"output/{k}": x for k, x in outputs.items()}
    np.savez_compressed(HERE / name, **arrays)


if __name__ == "__main__":
    main()
