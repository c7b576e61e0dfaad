"""What the measured costs of a device mean, as a table and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .config import DecodeConfig
from .engine import Engine
from .folder import ModelFolder
from .machine import weights_bytes
from .merged_drafter import open_drafter
from .plan import Plan, measure_passes
from .stats import RunStats

DRAFT_LENGTHS = (1, 2, 4, 8, 12, 15)
_PROBE_TOKENS = 48
_MANY = 1000
_STEP_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """What a drafter takes."""

    name: str
    step_s: float  # c: of one token
    num_bytes: int  # of its weights


def measure_drafter(folder: ModelFolder, engine: Engine) -> DrafterCosts:
    """Time the steps of a drafter, as it drafts for this target."""
    model = open_drafter(folder, engine.target.config)
    step_s = measure_passes(model, (1,), _STEP_CONTEXT)[1]
    return DrafterCosts(folder.name, step_s, weights_bytes(folder))


def measure_rounds(engine: Engine) -> RunStats:
    """Return the statistics of a short speculative answer to a prompt that repeats itself, so that
    there is something to copy.
    """
    room = engine.target.context_length // 2
    count = max(1, min(_PROBE_TOKENS, room))
    period = min(8, engine.target.vocab_size)
    engine.generate(
        [i % period for i in range(count)], DecodeConfig(max_tokens=count, ignore_eos=True)
    )
    engine.forget()
    return engine.stats


def plan_lines(
    plan: Plan,
    rounds: RunStats,
    target: ModelFolder,
    cache_bytes_per_token: int,
    drafter: DrafterCosts | None = None,
) -> Iterator[str]:
    """Yield the report line by line; `rounds` comes from `measure_rounds`."""
    yield f"rows   seconds of a pass   against one row   {_MANY} more tokens in the cache add"
    single = plan.pass_s[1]
    for rows, seconds in sorted(plan.pass_s.items()):
        more = _MANY * plan.token_s[rows]
        yield f"{rows:4d}{1e3 * seconds:17.2f} ms{seconds / single:17.2f}x{1e3 * more:28.2f} ms"
    yield ""
    yield (
        f"A round spends {1e3 * rounds.overhead_s_per_round:.2f} ms outside the target, with "
        f"{rounds.proposed / max(rounds.rounds, 1):.1f} proposed tokens on average."
    )
    full = target.context_length * cache_bytes_per_token
    yield (
        f"The weights take {_megabytes(weights_bytes(target))}, the cache "
        f"{cache_bytes_per_token / 1024:.1f} KiB per token, {_megabytes(full)} when it is full."
    )
    if 2 not in plan.pass_s:
        yield "This graph cannot verify several rows in one pass."
        return
    yield from _words(plan, rounds.overhead_s_per_round)
    if drafter is not None:
        yield ""
        yield from _drafter_words(plan, rounds.overhead_s_per_round, drafter)


def _words(plan: Plan, overhead_s: float) -> Iterator[str]:
    one, two = plan.pass_s[1], plan.pass_s[2]
    faster, by = ("one row", two / one) if one <= two else ("two rows", one / two)
    yield (
        f"The faster plain loop has {faster} a pass, by {100 * (by - 1):.0f} %. EdgeDraft's own "
        "plain loop has two, for the sake of identical logits."
    )
    yield "With little in the cache:"
    for length in DRAFT_LENGTHS:
        needed = to_accept(plan, overhead_s, length)
        noun = "token is" if length == 1 else "tokens are"
        yield (
            f"A draft of {length} costs {needed + 1:.2f} plain passes: it pays when more than "
            f"{needed:.2f} of its {noun} accepted on average."
        )


def _drafter_words(plan: Plan, overhead_s: float, drafter: DrafterCosts) -> Iterator[str]:
    yield (
        f"A step of {drafter.name} takes {1e3 * drafter.step_s:.2f} ms, "
        f"{drafter.step_s / plan.plain_s:.2f} of a plain pass; its weights take "
        f"{_megabytes(drafter.num_bytes)}."
    )
    for length in DRAFT_LENGTHS:
        needed = to_accept(plan, overhead_s, length, drafter.step_s)
        verdict = (
            f"pays when more than {needed:.2f} of them are accepted"
            if needed < length
            else "never pays"
        )
        steps = "1 token, in a step," if length == 1 else f"{length} tokens, in as many steps,"
        yield f"A draft of {steps} costs {needed + 1:.2f} plain passes: it {verdict}."


def to_accept(plan: Plan, overhead_s: float, length: int, step_s: float = 0.0) -> float:
    """Return how many tokens of a draft have to be accepted for the time that it takes."""
    round_s = plan.costs.seconds(length + 1) + overhead_s + length * step_s
    return max(round_s / plan.plain_s - 1, 0)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
