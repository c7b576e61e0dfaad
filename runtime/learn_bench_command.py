"""`edgedraft bench --learn`: everything around the protocol (`learn_bench.py`), from its options to
the result file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .bench import PromptResult, Skipped
from .bench_command import BenchRequest, check_request, settings
from .bench_output import plot_learning, progress_line
from .bench_report import report
from .drafting import NAMES
from .engine import Engine
from .errors import EdgeDraftError, PromptError
from .folder import open_target_folder
from .learn_bench import Order, Subject, answer, learn, run_alone, run_beside_ngrams
from .learn_bench_report import describe_alone, describe_order, moving, summarize_orders
from .prompt_files import BenchPrompt, load_prompts
from .provenance import describe_run, load_average
from .state import write_atomic

_ORDERS = 3
_REPORTED = 25  # requests between two lines of progress
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LearnBenchRequest:
    """What to learn from, and how what was learned is measured."""

    bench: BenchRequest  # its prompts are held out
    streams: tuple[str, ...]
    stream_limit: int | None = None
    orders: int = _ORDERS

    def __post_init__(self) -> None:
        for name, value in (("stream_limit", self.stream_limit), ("orders", self.orders)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")


@dataclass(slots=True)
class _Stream:
    name: str
    prompts: list[BenchPrompt]
    left_out: int  # since they are held out
    requests: list[Any] = field(default_factory=list)  # what a learner keeps of each


@dataclass(slots=True)
class _Outcome:
    """What came of the runs."""

    orders: list[Order] = field(default_factory=list)
    alone: list[PromptResult] = field(default_factory=list)
    beside_ngrams: list[PromptResult] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    interrupted: bool = False
    error: str | None = None  # what interrupted them, unless it was Ctrl-C


def add_learn_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add what makes `edgedraft bench` measure learning."""
    parser.add_argument(
        "--learn",
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure what --drafter learns from these streams of prompts, one after the other, "
        "on --prompts that are held out",
    )
    parser.add_argument(
        "--stream-limit", type=int, metavar="N", help="first N prompts of every stream"
    )
    parser.add_argument(
        "--orders", type=int, metavar="N", help=f"of a stream's prompts (default: {_ORDERS})"
    )


def learn_bench_request(args: argparse.Namespace, bench: BenchRequest) -> LearnBenchRequest | None:
    """Return what the options ask for, None without --learn; raise `ValueError` for a bad value."""
    if not args.learn:
        if args.stream_limit is not None or args.orders is not None:
            raise ValueError("--stream-limit and --orders say how to --learn: name its streams")
        return None
    orders = _ORDERS if args.orders is None else args.orders
    return LearnBenchRequest(bench, tuple(args.learn), args.stream_limit, orders)


def measure_learning(request: LearnBenchRequest, progress: Progress) -> dict[str, Any]:
    """Run the protocol, write the files that were asked for and return the JSON document.

    What can be refused is refused before the first run. Ctrl-C and errors end the runs early; what
    there is of learning is written, marked as interrupted.
    """
    bench = request.bench
    drafter = _check(request)
    check_request(bench)
    held_out = load_prompts(bench.prompts, bench.limit)
    streams = [
        _load_stream(number, source, held_out, request.stream_limit)
        for number, source in enumerate(request.streams, 1)
    ]
    folder = open_target_folder(bench.target)
    provenance = describe_run(folder, bench.session, bench.config.sampling.seed)
    engine = Engine.open(
        folder,
        drafters=["ngram", drafter],
        session=bench.session,
        state_dir=bench.state_dir,
        keep=False,  # a result must not depend on what was asked before
    )
    subject = Subject(engine)
    outcome = _Outcome()
    try:
        _run_all(subject, streams, held_out, request, outcome, progress)
    except (KeyboardInterrupt, EdgeDraftError) as error:
        # An order that was cut short says little beside whole ones.
        outcome.orders = [x for x in outcome.orders if x.model] or outcome.orders
        if not (outcome.orders and outcome.orders[0].points):
            raise
        outcome.interrupted, outcome.error = True, str(error) or None

    names = [x.name for x in streams]
    orders = [describe_order(order, names) for order in outcome.orders]
    beside = outcome.beside_ngrams
    document = {
        "summary": summarize_orders(orders, names),
        "alone": describe_alone(outcome.alone) if outcome.alone else None,
        "beside_ngrams": report(beside, (), {}) if beside else None,
        "orders": orders,
        "streams": [
            {"name": x.name, "requests": len(x.requests), "left_out": x.left_out} for x in streams
        ],
        "skipped": [{"prompt": x.prompt.id, "reason": x.reason} for x in outcome.skipped],
        "settings": {
            **settings(bench),
            "learn": list(request.streams),
            "stream_limit": request.stream_limit,
            "orders": request.orders,
        },
        "interrupted": outcome.interrupted,
        "error": outcome.error,
        "provenance": {
            **provenance,
            "drafter": {"name": subject.folder.name, "fingerprint": subject.folder.fingerprint},
            "load_average_after": load_average(),
        },
    }
    if bench.json_path:
        write_atomic(bench.json_path, json.dumps(document, indent=1).encode() + b"\n")
    if bench.plot_path:
        plot_learning([x.points for x in outcome.orders], document, bench.plot_path)
    return document


def _run_all(
    subject: Subject,
    streams: Sequence[_Stream],
    held_out: Sequence[BenchPrompt],
    request: LearnBenchRequest,
    outcome: _Outcome,
    progress: Progress,
) -> None:
    config, warm_up = request.bench.config, request.bench.warm_up
    answers = answer(subject, [prompt for x in streams for prompt in x.prompts], config)
    for stream in streams:
        for number, kept in enumerate(islice(answers, len(stream.prompts)), 1):
            found = outcome.skipped if isinstance(kept, Skipped) else stream.requests
            found.append(kept)
            if number % _REPORTED == 0 or number == len(stream.prompts):
                progress(f"[{number}/{len(stream.prompts)}] {stream.name}: answered")
        if not stream.requests:
            raise PromptError(
                f"{stream.name}: no prompt could be served; the first: {outcome.skipped[0].reason}"
            )
    total = sum(len(x.requests) for x in streams)
    for seed in range(request.orders):
        order = Order(seed, [len(x.requests) for x in streams])
        outcome.orders.append(order)
        for number, _ in enumerate(learn(subject, [x.requests for x in streams], order), 1):
            if number % _REPORTED == 0 or number == total:
                shipped, learned = moving(order.points, min(_REPORTED, number))
                progress(
                    f"[{number}/{total}] order {seed}: {learned[-1]:.2f} tokens per pass, "
                    f"as shipped {shipped[-1]:.2f}"
                )
    models = [x.model for x in outcome.orders if x.model]
    for number, result in enumerate(run_alone(subject, held_out, config, models, warm_up), 1):
        if isinstance(result, PromptResult):
            outcome.alone.append(result)
        else:
            outcome.skipped.append(result)
        progress(f"alone {progress_line(number, len(held_out), result)}")
    runs = run_beside_ngrams(subject, held_out, config, models[0], warm_up)
    for number, result in enumerate(runs, 1):
        if isinstance(result, PromptResult):  # what was skipped before is so again
            outcome.beside_ngrams.append(result)
        progress(f"beside the n-grams {progress_line(number, len(held_out), result)}")


def _check(request: LearnBenchRequest) -> str:
    """Return the drafter's folder; raise `EdgeDraftError` for what goes with no such protocol."""
    bench = request.bench
    if bench.config.sampling.temperature > 0:
        raise EdgeDraftError("--learn asks for greedy answers: leave --temperature out")
    refused = {
        "--compare": bench.peers,
        "--versus": bench.versus,
        "--tree": bench.tree,
        "--trials": bench.trials != 1,
        "--peer-model": bench.peer_model,
        "--peer-drafter": bench.peer_drafter,
    }
    if given := [name for name, value in refused.items() if value]:
        raise EdgeDraftError(f"--learn has a protocol of its own: leave {', '.join(given)} out")
    drafters = bench.drafters or ()
    if len(drafters) != 1 or drafters[0] in NAMES:
        raise EdgeDraftError(
            f"--learn measures one drafter that can learn: --drafter FOLDER, got "
            f"{' '.join(drafters) or 'none'}; n-grams run beside it by themselves"
        )
    return drafters[0]


def _load_stream(
    number: int, source: str, held_out: Sequence[BenchPrompt], limit: int | None
) -> _Stream:
    """Read a stream, without what is held out."""
    contents = [prompt.content for prompt in held_out]
    every = load_prompts([source])
    prompts = [prompt for prompt in every if prompt.content not in contents]
    if not prompts:
        raise PromptError(
            f"{source}: all of it is held out, which leaves nothing to learn from; lower --limit "
            "or name another file"
        )
    # Numbered, since a task may come again.
    name = f"{number} {Path(source).stem}"
    return _Stream(name, prompts[:limit], left_out=len(every) - len(prompts))
