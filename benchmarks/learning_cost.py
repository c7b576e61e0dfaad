"""What learning takes from the requests it happens beside, and what an update and a swap take.

    python benchmarks/learning_cost.py --target DIR --drafter DIR --prompts FILE ... --json FILE \
        [--requests 100] [--max-tokens 64] [--rounds 25] [--each 12]

Requests that arrive back to back, so that nothing is learned meanwhile: what is left is to hear of
each round. Three engines take turns request by request, one with `--learn idle` and two with
learning off, since two engines that are alike differ by some percent, too: by where their memory
lies. Every round opens new ones, in another order, and takes the next of the requests. Then a
learner takes in the answers and makes its updates on one thread; the drafter is opened with every
adapter that comes of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median, stdev
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
_NEVER_S = 1e6
_ENGINES: dict[str, Learn] = {"off": "off", "off_again": "off", "idle": "idle"}


def take_turns(
    args: argparse.Namespace, plan: Path, prompts: Sequence[list[int]], number: int
) -> dict[str, float]:
    """Return the seconds that the requests take each engine; `plan` is a state folder with no more
    than the plan of the device, `number` that of the round.
    """
    config = DecodeConfig(max_tokens=args.max_tokens)
    names = deque(_ENGINES)
    names.rotate(number)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in names:
            state = Path(folder) / name
            shutil.copytree(plan, state)
            engine = engines[name] = Engine.open(
                args.target,
                drafters=["ngram", args.drafter],
                state_dir=state,
                learn=_ENGINES[name],
            )
            stack.enter_context(engine)
            if engine.learning is not None:
                engine.learning.rest_s = _NEVER_S  # its own requests are back to back
            engine.generate("Say hello.", config)
        seconds = dict.fromkeys(_ENGINES, 0.0)
        for prompt in prompts:
            names.rotate(1)
            for name in names:
                started = perf_counter()
                engines[name].generate(prompt, config)
                seconds[name] += perf_counter() - started
    return seconds


def compare_rounds(ratios: list[float]) -> dict[str, Any]:
    """Return the mean of some ratios with its standard error."""
    error = stdev(ratios) / len(ratios) ** 0.5
    return {"mean": mean(ratios), "standard_error": error, "each": ratios}


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
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="with new engines")
    parser.add_argument("--each", type=int, default=12, metavar="N", help="requests in one")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}; at least 2 tell how much rounds differ")
    config = DecodeConfig(max_tokens=args.max_tokens)
    rounds: list[dict[str, float]] = []
    with TemporaryDirectory() as folder:
        plan = Path(folder)
        engine = Engine.open(
            args.target, drafters=["ngram", args.drafter], state_dir=plan, keep=False
        )
        prompts = load_prompts(args.prompts)[: args.requests]
        encoded = [engine.encode(prompt.content) for prompt in prompts]
        following = cycle(encoded)
        for number in range(args.rounds):
            rounds.append(take_turns(args, plan, list(islice(following, args.each)), number))
            print({k: round(x, 2) for k, x in rounds[-1].items()}, file=sys.stderr, flush=True)
    costs = update(engine, prompts, config)
    against = {
        name: compare_rounds([2 * x[name] / (x["off"] + x["off_again"]) for x in rounds])
        for name in _ENGINES
    }
    document = {
        "seconds": rounds,
        "over_mean_of_off": against,
        **costs,
        "settings": {
            "requests": len(prompts),
            "requests_in_a_round": args.each,
            "max_tokens": args.max_tokens,
        },
        "provenance": describe_run(engine.target.folder, engine.target.config, 0),
    }
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    slowest = max((x["cpu_s"] for x in costs["updates"]), default=float("nan"))
    swap = median(costs["swap_s"]) if costs["swap_s"] else float("nan")
    print(
        f"idle over off: {against['idle']['mean']:.3f} (standard error "
        f"{against['idle']['standard_error']:.3f}; an engine with learning off over both: up to "
        f"{max(against['off']['each'] + against['off_again']['each']):.3f}); slowest update "
        f"{slowest:.2f} s of CPU; swap {1e3 * swap:.0f} ms"
    )


if __name__ == "__main__":
    main()
