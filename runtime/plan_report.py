"""What the measured costs of a device mean, as a table and in words."""

from __future__ import annotations

from collections.abc import Iterator

from .config import DecodeConfig
from .engine import Engine
from .plan import Plan
from .stats import RunStats

_DRAFT_LENGTHS = (1, 2, 4, 8, 12, 15)
_PROBE_TOKENS = 48
_MANY = 1000


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


def plan_lines(plan: Plan, rounds: RunStats, cache_bytes_per_token: int) -> Iterator[str]:
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
    yield f"The cache takes {cache_bytes_per_token / 1024:.1f} KiB per token."
    if 2 not in plan.pass_s:
        yield "This graph cannot verify several rows in one pass."
        return
    yield from _words(plan, rounds.overhead_s_per_round)


def _words(plan: Plan, overhead_s: float) -> Iterator[str]:
    one, two = plan.pass_s[1], plan.pass_s[2]
    faster, by = ("one row", two / one) if one <= two else ("two rows", one / two)
    yield (
        f"The faster plain loop has {faster} a pass, by {100 * (by - 1):.0f} %. EdgeDraft's own "
        "plain loop has two, for the sake of identical logits."
    )
    costs = plan.costs
    yield "With little in the cache:"
    for draft in _DRAFT_LENGTHS:
        passes = (costs.seconds(draft + 1) + overhead_s) / plan.plain_s
        noun = "token is" if draft == 1 else "tokens are"
        yield (
            f"A draft of {draft} costs {passes:.2f} plain passes: it pays when more than "
            f"{max(passes - 1, 0):.2f} of its {noun} accepted on average."
        )
