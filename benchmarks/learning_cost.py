"""What learning takes from the requests it happens beside, and what an update and a swap take.

    python benchmarks/learning_cost.py --target DIR --drafter DIR --prompts FILE ... --json FILE \
        [--requests 100] [--max-tokens 64] [--rounds 4]

The same requests arrive back to back, again and again, each by turns with learning off and with
`--learn idle`, which has enough to learn from after a few of them. All in one engine, since where
its weights lie in memory makes more of a difference than learning; a first round, in which its
n-grams hear the answers, is not counted. Then a learner takes in the answers and makes its updates
on one thread; the drafter is opened with every adapter that comes of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
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


def rounds(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int, config: DecodeConfig
) -> Iterator[dict[Learn, float]]:
    """Yield the seconds that all requests take without learning and with it, round after round."""
    learning = engine.learning
    assert learning is not None
    for number in range(count + 1):
        seconds: dict[Learn, float] = {"off": 0.0, "idle": 0.0}
        for turn in range(2):
            for i, prompt in enumerate(prompts):
                learn: Learn = "idle" if (i + turn) % 2 else "off"
                # Without it, the learner must not believe that nobody is asking.
                learning.begin(())
                engine.learning = learning if learn == "idle" else None
                started = perf_counter()
                engine.generate(prompt, config)
                seconds[learn] += perf_counter() - started
        if number:
            yield seconds
    engine.learning = learning


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
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    args = parser.parse_args()
    config = DecodeConfig(max_tokens=args.max_tokens)
    drafters = ["ngram", args.drafter]
    with TemporaryDirectory() as folder:
        engine = Engine.open(args.target, drafters=drafters, state_dir=Path(folder), learn="idle")
        prompts = load_prompts(args.prompts)[: args.requests]
        encoded = [engine.encode(prompt.content) for prompt in prompts]
        seconds = []
        for found in rounds(engine, encoded, args.rounds, config):
            seconds.append(found)
            print(f"off {found['off']:.2f} s, idle {found['idle']:.2f} s", file=sys.stderr)
        engine.close()
        # Another one, which nobody learns beside; what passes cost is known by now.
        engine = Engine.open(args.target, drafters=drafters, state_dir=Path(folder), keep=False)
        costs = update(engine, prompts, config)
    ratios = [x["idle"] / x["off"] for x in seconds]
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
