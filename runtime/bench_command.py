"""`edgedraft bench`: everything around the runs, from opening the target to the result file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bench import PromptResult, Runner, Skipped, run_bench
from .bench_output import check_file, check_picture, plot_speedups, progress_line
from .bench_report import report
from .config import DecodeConfig
from .engine import Engine
from .errors import EdgeDraftError, PromptError
from .folder import open_target_folder
from .machine import PeakMemory, read_floor_s, weights_bytes
from .ort_session import SessionConfig, onnxruntime
from .peers import Peer, peer_drafter, peer_model
from .plan import measure_plan
from .prompt_files import BenchPrompt, load_prompts
from .provenance import describe_run, load_average
from .state import write_atomic


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What to measure, and where the result goes."""

    target: str
    prompts: tuple[str, ...]
    limit: int | None
    config: DecodeConfig
    session: SessionConfig
    drafters: tuple[str, ...] | None = None  # None: as the engine chooses
    tree: bool = False
    state_dir: Path | None = None
    trials: int = 1
    warm_up: int = 1
    versus: tuple[tuple[str, ...], ...] = ()  # other drafters to measure beside them
    peers: tuple[str, ...] = ()
    peer_model: str | None = None
    peer_drafter: str | None = None
    json_path: Path | None = None
    plot_path: Path | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("limit", self.limit, 1),
            ("trials", self.trials, 1),
            ("warm_up", self.warm_up, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")


@dataclass(slots=True)
class _Outcome:
    """What came of the runs."""

    results: list[PromptResult] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    peers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    interrupted: bool = False
    error: str | None = None  # what interrupted them, unless it was Ctrl-C


def measure(request: BenchRequest, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark, write the files that were asked for and return the JSON document.

    What can be refused is refused before the first run. Ctrl-C and errors, as of a peer that dies,
    end the runs early; what was measured so far is written, marked as interrupted.
    """
    check_request(request)
    prompts = load_prompts(request.prompts, request.limit)
    folder = open_target_folder(request.target)
    provenance = describe_run(folder, request.session, request.config.sampling.seed)
    size, threads = weights_bytes(folder), request.session.num_threads
    # Twice, since the machine may be busy now; before the peak of the memory is watched.
    floor_s = read_floor_s(size, threads)
    onnxruntime()  # its library is not part of what the session needs
    memory = PeakMemory()
    engine = Engine.open(
        folder,
        drafters=request.drafters,
        tree=request.tree,
        session=request.session,
        state_dir=request.state_dir,
        keep=False,  # a result must not depend on what was asked before
    )
    outcome = _run_all(engine, prompts, request, progress)
    peak = memory.growth()
    floor_s = min(floor_s, read_floor_s(size, threads))
    plan = engine.plan or measure_plan(engine.target)

    document = report(outcome.results, outcome.skipped, outcome.peers)
    overall = document["overall"]
    overall["peak_memory"] = {
        "weights_bytes": size,
        "session_peak_bytes": peak,
        "ratio": peak / size if peak is not None else None,
    }
    document["floor"] = {
        "seconds": floor_s,
        "bytes_per_second": size / floor_s,
        "threads": threads,
        "plain_pass_over_floor": plan.plain_s / floor_s,
        "plain_token_over_floor": 1 / overall["plain_tokens_per_second"] / floor_s,
    }
    document["plan"] = {str(rows): seconds for rows, seconds in sorted(plan.pass_s.items())}
    document["settings"] = settings(request)
    document["interrupted"], document["error"] = outcome.interrupted, outcome.error
    document["provenance"] = {**provenance, "load_average_after": load_average()}
    if request.json_path:
        write_atomic(request.json_path, json.dumps(document, indent=1).encode() + b"\n")
    if request.plot_path:
        plot_speedups(outcome.results, document, request.plot_path)
    return document


def _run_all(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    request: BenchRequest,
    progress: Callable[[str], None],
) -> _Outcome:
    outcome = _Outcome()
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for name in request.peers:
            model = peer_model(name, engine.target.folder, request.peer_model)
            drafter = peer_drafter(request.peer_drafter) if name == "transformers" else None
            peer = stack.enter_context(Peer(name, model, request.session.num_threads, drafter))
            runners.update(peer.runners())
            outcome.peers.update({kind: peer.facts for kind in peer.runners() if ":" not in kind})
        runs = run_bench(
            engine,
            prompts,
            request.config,
            trials=request.trials,
            warm_up=request.warm_up,
            others={
                _name_in_result(names): engine.with_drafters(names) for names in request.versus
            },
            peers=runners,
        )
        try:
            for number, result in enumerate(runs, 1):
                if isinstance(result, PromptResult):
                    outcome.results.append(result)
                else:
                    outcome.skipped.append(result)
                progress(progress_line(number, len(prompts), result))
        except (KeyboardInterrupt, EdgeDraftError) as error:
            if not outcome.results:
                raise
            outcome.interrupted, outcome.error = True, str(error) or None
    if not outcome.results:
        raise PromptError(f"no prompt could be served; the first: {outcome.skipped[0].reason}")
    return outcome


def check_request(request: BenchRequest) -> None:
    """Fail now rather than after the last run."""
    if request.peers and request.config.sampling.temperature > 0:
        raise EdgeDraftError("peers are compared greedily: leave --temperature or --compare out")
    if request.peer_drafter and "transformers" not in request.peers:
        raise EdgeDraftError("--peer-drafter is for transformers: add --compare transformers")
    rivals = Counter(map(_name_in_result, request.versus))
    if same := [name for name, count in rivals.items() if count > 1]:
        raise EdgeDraftError(
            f"--versus: two drafters would be called {same[0]!r} in the result; rename one of them "
            "or measure them in two runs"
        )
    if request.plot_path:
        check_picture(request.plot_path)
    if request.json_path:
        check_file(request.json_path)


def _name_in_result(drafters: Sequence[str]) -> str:
    """Return what drafters are called in a result, which tells no folders of this machine."""
    return " ".join(Path(drafter).name for drafter in drafters)


def settings(request: BenchRequest) -> dict[str, Any]:
    """Return what was asked for, as a JSON object."""
    config, sampling = request.config, request.config.sampling
    return {
        "prompts": list(request.prompts),
        "limit": request.limit,
        "drafters": request.drafters and [Path(name).name for name in request.drafters],
        "versus": [[Path(name).name for name in names] for names in request.versus],
        "peer_drafter": request.peer_drafter and Path(request.peer_drafter).name,
        "tree": request.tree,
        "max_tokens": config.max_tokens,
        "max_draft_tokens": config.max_draft_tokens,
        "ignore_eos": config.ignore_eos,
        "trials": request.trials,
        "warm_up": request.warm_up,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
        "verification": sampling.verification,
    }
