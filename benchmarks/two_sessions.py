"""Do a target and a drafter in one process slow each other down?

    python benchmarks/two_sessions.py --target DIR --json FILE [--threads N] [--drafter-threads 1]
    [--blocks 10]

Times the target's verify passes and the steps of a drafter-sized random model (16k tokens, width
384, 3 layers, int8), each alone and in alternation as in speculative decoding: `DRAFT_STEPS` steps,
then one pass. A target pass leaves the drafter's weights out of the caches, which is no fight over
threads: "cold" times the drafter alone after reading as much memory. Alone and alternating blocks
take turns, so that a disturbance hits both. Needs edgedraft[export].
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from edgedraft.runtime import ModelFolder, OnnxModel, SessionConfig, open_target_folder
from edgedraft.runtime.machine import weights_bytes
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic

DRAFT_STEPS = 4
_PASS_ROWS = DRAFT_STEPS + 1
_CONTEXT = 128
_PASSES = 20  # per block


def drafter_sized_folder(path: Path) -> ModelFolder:
    """Export a random model of the size of a drafter."""
    import onnx_ir as ir
    from transformers import LlamaConfig, LlamaForCausalLM

    from edgedraft.export.decoder import export_decoder
    from edgedraft.export.quantize import quantize

    config = LlamaConfig(
        vocab_size=16_384,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    graph = export_decoder(LlamaForCausalLM(config).eval(), 2048)
    quantize(graph, "int8")
    ir.save(graph, path / "decoder.onnx", external_data="decoder.onnx.data")
    return ModelFolder(
        path=path,
        name="drafter-sized",
        graph=path / "decoder.onnx",
        tokenizer=path / "none",
        chat_template=None,
        vocab_size=config.vocab_size,
        context_length=2048,
        bos_token_id=None,
        eos_token_ids=(),
        exporter="edgedraft",
        precision="int8",
        head_dim=None,
        fingerprint="",
    )


def timed_pass(model: OnnxModel, rows: int) -> float:
    """Return the seconds of one pass at the same context length as every other."""
    started = perf_counter()
    model.forward([1] * rows)
    seconds = perf_counter() - started
    model.rollback(_CONTEXT)
    return seconds


def main() -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--drafter-threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=10)
    args = parser.parse_args()
    session = SessionConfig(threads=args.threads)
    with tempfile.TemporaryDirectory() as folder:
        target = OnnxModel(open_target_folder(args.target), session)
        drafter = OnnxModel(
            drafter_sized_folder(Path(folder)), SessionConfig(threads=args.drafter_threads)
        )
        for model in (target, drafter):
            model.extend([1] * _CONTEXT)
        other_memory = np.ones(weights_bytes(target.folder) // 8, np.int64)
        measure_block(target, drafter, other_memory)  # warms up
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(args.blocks):
            for name, values in measure_block(target, drafter, other_memory).items():
                seconds[name] += values
    result: dict[str, Any] = {f"{name}_ms": fmean(v) * 1e3 for name, v in seconds.items()}
    for kind, alone in (
        ("target", "target_alone"),
        ("drafter", "drafter_alone"),
        ("drafter_over_cold", "drafter_cold"),
    ):
        who = kind.split("_")[0]
        result[f"{kind}_ratio"] = result[f"{who}_alternating_ms"] / result[f"{alone}_ms"]
    result["drafter_threads"] = args.drafter_threads
    result["provenance"] = describe_run(target.folder, session, 0)
    write_atomic(args.json, json.dumps(result, indent=1).encode())
    print({k: round(v, 3) for k, v in result.items() if isinstance(v, float)})
    return 0


def measure_block(
    target: OnnxModel, drafter: OnnxModel, other_memory: npt.NDArray[np.int64]
) -> dict[str, list[float]]:
    """Return seconds of passes: alone, alone with cold caches, and alternating."""
    times: dict[str, list[float]] = {
        "target_alone": [timed_pass(target, _PASS_ROWS) for _ in range(_PASSES)],
        "drafter_alone": [timed_pass(drafter, 1) for _ in range(_PASSES * DRAFT_STEPS)],
        "drafter_cold": [],
        "target_alternating": [],
        "drafter_alternating": [],
    }
    for _ in range(_PASSES):
        other_memory.sum()  # what a target pass does to the caches, without its threads
        times["drafter_cold"] += [timed_pass(drafter, 1) for _ in range(DRAFT_STEPS)]
    for _ in range(_PASSES):
        times["drafter_alternating"] += [timed_pass(drafter, 1) for _ in range(DRAFT_STEPS)]
        times["target_alternating"].append(timed_pass(target, _PASS_ROWS))
    return times


if __name__ == "__main__":
    sys.exit(main())
