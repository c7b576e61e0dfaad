"""Speculative against plain decoding: same prompts, same process, taking turns.

Every prompt is answered by

* the plain loop whose passes have two rows: the reference, bit-identical to verification,
* the plain loop whose passes have one row: not bit-identical, but sometimes faster,
* the speculative loop,
* and, when asked for, the same with other drafters, and other engines (`peers.py`).

Speed-ups are quoted over the faster of the two plain loops, measured for the same prompt. The order
changes from prompt to prompt, so that no loop always runs on a warmer machine. Everything is
forgotten before each run: nothing may be copied from another run's answer to the same prompt, and
no run may reuse cache rows that another loop computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from time import perf_counter

from .config import DecodeConfig
from .datatypes import FinishReason
from .engine import Engine
from .errors import PromptError
from .prompt_files import BenchPrompt
from .stats import RunStats

TWO_ROWS, ONE_ROW, SPECULATIVE = "plain_two_rows", "plain_one_row", "speculative"
PLAIN = (TWO_ROWS, ONE_ROW)
VERSUS = "versus "  # begins the kind of a run with other drafters
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One answer, timed from outside the engine that gave it."""

    token_ids: tuple[int, ...]
    prefill_s: float
    decode_s: float  # everything after the prefill, text included
    timed_tokens: int  # the tokens that `decode_s` was spent on
    finish_reason: FinishReason | None = None  # None where an engine does not say
    stats: RunStats = field(default_factory=RunStats)

    @property
    def token_s(self) -> float:
        """Seconds of decoding per token."""
        return self.decode_s / max(self.timed_tokens, 1)


Runner = Callable[[Sequence[int], DecodeConfig], Run]


@dataclass(frozen=True)
class PromptResult:
    """All runs of one prompt; `runs` has a list of trials for each kind of run."""

    prompt: BenchPrompt
    prompt_tokens: int
    runs: Mapping[str, Sequence[Run]]

    @cached_property
    def reference(self) -> Run:
        """The first two-row plain run, which says what the answer is."""
        return self.runs[TWO_ROWS][0]

    @cached_property
    def identical(self) -> bool:
        """Whether speculation gave the plain tokens in every trial."""
        kinds = (TWO_ROWS, SPECULATIVE, *self.versus)
        answers = (r.token_ids for kind in kinds for r in self.runs[kind])
        return all(ids == self.reference.token_ids for ids in answers)

    @property
    def versus(self) -> list[str]:
        """The kinds of runs with other drafters."""
        return [kind for kind in self.runs if kind.startswith(VERSUS)]

    @cached_property
    def stats(self) -> RunStats:
        """Counts and phase seconds of the speculative runs, added up."""
        return self.stats_of(SPECULATIVE)

    @cached_property
    def speculative_s(self) -> float:
        """Seconds of all speculative runs after their prefill."""
        return sum(r.decode_s for r in self.runs[SPECULATIVE])

    @cached_property
    def plain_token_s(self) -> float:
        """Decode seconds per token of the faster plain loop."""
        return min(self.token_s(kind) for kind in PLAIN)

    @cached_property
    def speedup(self) -> float:
        """Plain over speculative decode seconds per token."""
        return self.plain_token_s / self.token_s(SPECULATIVE)

    @cached_property
    def end_to_end_speedup(self) -> float:
        """The same with the prefill counted in."""
        plain = min(self._total_token_s(kind) for kind in PLAIN)
        return plain / self._total_token_s(SPECULATIVE)

    def stats_of(self, kind: str) -> RunStats:
        """Return counts and phase seconds of a kind of run, added up."""
        return sum((r.stats for r in self.runs[kind]), RunStats())

    def token_s(self, kind: str) -> float:
        """Return the median decode seconds per token of a kind of run."""
        return median(r.token_s for r in self.runs[kind])

    def _total_token_s(self, kind: str) -> float:
        return median((r.prefill_s + r.decode_s) / len(r.token_ids) for r in self.runs[kind])


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that could not be served, a too long one for instance."""

    prompt: BenchPrompt
    reason: str


def run_bench(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    config: DecodeConfig,
    *,
    trials: int = 1,
    warm_up: int = 1,
    others: Mapping[str, Engine] | None = None,
    peers: Mapping[str, Runner] | None = None,
) -> Iterator[PromptResult | Skipped]:
    """Answer every prompt with every kind of run, yielding one result per prompt.

    The first `warm_up` prompts are answered briefly beforehand. `others` are engines over the same
    target with other drafters, by name.
    """
    versus = {f"{VERSUS}{name}": partial(_run, other) for name, other in (others or {}).items()}
    runners: dict[str, Runner] = {**_own_runners(engine), **versus, **(peers or {})}
    brief = replace(config, max_tokens=min(config.max_tokens, _WARM_UP_TOKENS))
    for prompt in prompts[:warm_up]:
        _run_prompt(engine, prompt, brief, runners, trials=1, turn=0)
    for number, prompt in enumerate(prompts):
        yield _run_prompt(engine, prompt, config, runners, trials, turn=number * trials)


def _run_prompt(
    engine: Engine,
    prompt: BenchPrompt,
    config: DecodeConfig,
    runners: Mapping[str, Runner],
    trials: int,
    turn: int,
) -> PromptResult | Skipped:
    runs: dict[str, list[Run]] = {kind: [] for kind in runners}
    try:
        ids = engine.encode(prompt.content)
        for trial in range(trials):
            for kind in _order(list(runners), turn + trial):
                runs[kind].append(runners[kind](ids, config))
    except PromptError as error:
        return Skipped(prompt, str(error))
    return PromptResult(prompt, len(ids), runs)


def _order(kinds: list[str], turn: int) -> list[str]:
    """Rotate, and turn round after every full rotation: each kind comes first equally often, and
    after each of its neighbours.
    """
    shift = turn % len(kinds)
    order = kinds[shift:] + kinds[:shift]
    return order[::-1] if turn // len(kinds) % 2 else order


def _own_runners(engine: Engine) -> dict[str, Runner]:
    def plain(ids: Sequence[int], config: DecodeConfig) -> Run:
        return _run(engine, ids, replace(config, max_draft_tokens=0))

    def one_row(ids: Sequence[int], config: DecodeConfig) -> Run:
        before = engine.target.single_rows
        engine.target.single_rows = True
        try:
            return plain(ids, config)
        finally:
            engine.target.single_rows = before

    def speculative(ids: Sequence[int], config: DecodeConfig) -> Run:
        return _run(engine, ids, config)

    return {TWO_ROWS: plain, ONE_ROW: one_row, SPECULATIVE: speculative}


def _run(engine: Engine, ids: Sequence[int], config: DecodeConfig) -> Run:
    engine.forget()
    tokens: list[int] = []
    finish: FinishReason | None = None
    started = perf_counter()
    for piece in engine.stream(ids, config):
        if piece.trace:
            tokens.extend(piece.trace.emitted)
        finish = piece.finish_reason
    elapsed = perf_counter() - started
    return Run(
        tuple(tokens),
        prefill_s=engine.stats.prefill_s,
        decode_s=elapsed - engine.stats.prefill_s,
        timed_tokens=len(tokens),
        finish_reason=finish,
        stats=engine.stats,
    )
