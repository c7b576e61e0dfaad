"""What learning takes from the requests it happens beside, and what an update and a swap take.

    python benchmarks/learning_cost.py --target DIR --drafter DIR --prompts FILE ... --json FILE \
        [--requests 100] [--max-tokens 64] [--blocks 4]

The same requests arrive back to back, in blocks that take turns: with learning off, and with
`--learn idle`, which has enough to learn from after a few of them. Every block has an engine of its
own, and begins with nothing but the plan of the device. Then a learner takes in the answers
and makes its updates on one thread; the drafter is opened with every adapter that comes of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from edgedraft.runtime import DecodeConfig, Engine
from edgedraft.runtime.bench import Skipped
from edgedraft.runtime.learn_bench import Subject, answer
from edgedraft.runtime.learning import Learn
from edgedraft.runtime.prompt_files import BenchPrompt, load_prompts
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic
from edgedraft.trainer.online import OnlineLearner

_SWAPS = 7


def block(args: argparse.Namespace, learn: Learn, plan: Path, prompts: list[list[int]]) -> float:
    """Return the seconds that all requests take, one right after the other; `plan` is a state
    folder with no more than that.
    """
    config = DecodeConfig(max_tokens=args.max_tokens)
    with TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        shutil.copytree(plan, state)
        engine = Engine.open(
            args.target, drafters=["ngram", args.drafter], state_dir=state, learn=learn
        )
        engine.generate(prompts[0], config)
        started = perf_counter()
        for prompt in prompts:
            engine.generate(prompt, config)
        seconds = perf_counter() - started
        engine.close()
    return seconds


def update(engine: Engine, prompts: Sequence[BenchPrompt], config: DecodeConfig) -> dict[str, Any]:
    """Let a learner take in the answers one by one, without rehearsals, and open the drafter that
    comes of it; return what both took.
    """
    subject = Subject(engine)
    updates: list[dict[str, float]] = []
    swaps: list[float] = []
    with TemporaryDirectory() as kept:
        learner = subject.learner(Path(kept))
        assert isinstance(learner, OnlineLearner)
        # Updates only; a rehearsal takes about as long as one.
        learner.config = replace(learner.config, rehearsal_steps=0)
        answers = list(answer(subject, prompts, config))
        for request in (x for x in answers if not isinstance(x, Skipped)):
            learner.add(request)
            wall_s, cpu_s = perf_counter(), process_time()
            changed = learner.work(float("inf"), lambda: False)
            cost = {"wall_s": perf_counter() - wall_s, "cpu_s": process_time() - cpu_s}
            if cost["cpu_s"] > 0.05:  # not only the file of lessons
                updates.append(cost)
            if changed:
                for _ in range(_SWAPS):
                    started = perf_counter()
                    subject.model(Path(kept))
                    swaps.append(perf_counter() - started)
    return {"updates": updates, "swap_s": sorted(swaps)}


def main() -> None:
    """Run the comparison, write the document and print what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--drafter", required=True, metavar="DIR")
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, default=100, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--blocks", type=int, default=4, metavar="N", help="of each kind")
    args = parser.parse_args()
    config = DecodeConfig(max_tokens=args.max_tokens)
    seconds: dict[Learn, list[float]] = {"off": [], "idle": []}
    with TemporaryDirectory() as folder:
        plan = Path(folder)
        engine = Engine.open(
            args.target, drafters=["ngram", args.drafter], state_dir=plan, keep=False
        )
        prompts = load_prompts(args.prompts)[: args.requests]
        encoded = [engine.encode(prompt.content) for prompt in prompts]
        for number in range(args.blocks):
            for name in list(seconds)[:: 1 if number % 2 else -1]:
                seconds[name].append(block(args, name, plan, encoded))
                print(name, f"{seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    costs = update(engine, prompts, config)
    ratios = [a / b for a, b in zip(seconds["idle"], seconds["off"], strict=True)]
    document = {
        "seconds": seconds,
        "idle_over_off": {"median": median(ratios), "each": ratios},
        **costs,
        "settings": {"requests": len(prompts), "max_tokens": args.max_tokens},
        "provenance": describe_run(engine.target.folder, engine.target.config, 0),
    }
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    slowest = max((x["cpu_s"] for x in costs["updates"]), default=float("nan"))
    swap = median(costs["swap_s"]) if costs["swap_s"] else float("nan")
    print(
        f"idle over off: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); slowest "
        f"update {slowest:.2f} s of CPU; swap {1e3 * swap:.0f} ms"
    )


if __name__ == "__main__":
    main()
