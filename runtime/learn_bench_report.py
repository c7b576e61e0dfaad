"""From what was learned to the JSON document of `edgedraft bench --learn`, and a few lines of it.

A rise is a difference. Ratios are taken of counts added up; over several orders their mean and
range are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from .bench import SPECULATIVE, PromptResult
from .bench_report import group_by_class
from .learn_bench import DRAFT_TOKENS, SHIPPED, Order, Point
from .stats import RunStats

WINDOW = 50  # requests: what a learning curve is smoothed over, and a change of task judged by
_PART = 25  # requests of a row in the document
_MEASURES = ("tokens_per_pass", "acceptance_rate", "alpha")
_Curve = npt.NDArray[np.float64]


def moving(points: Sequence[Point], window: int = WINDOW) -> tuple[_Curve, _Curve]:
    """Return the tokens per pass of every `window` consecutive requests, as shipped and learned."""
    counts = np.array([(p.tokens, p.shipped, p.learned) for p in points]).reshape(-1, 3)
    sums = np.concatenate([np.zeros((1, 3)), counts.cumsum(axis=0)])
    tokens, shipped, learned = np.maximum(sums[window:] - sums[: max(0, len(sums) - window)], 1).T
    return tokens / shipped, tokens / learned


def requests_until_above(stream: Sequence[Point], window: int = WINDOW) -> int | None:
    """Return after how many requests of a stream the windows that begin there, or later, are all
    better than with the drafter as shipped; None if the last one is not.
    """
    shipped, learned = moving(stream, window)
    not_above = np.flatnonzero(learned <= shipped)
    first = int(not_above[-1]) + 1 if len(not_above) else 0
    return first if first < len(shipped) else None


def least_ratio(points: Sequence[Point], window: int = WINDOW) -> float | None:
    """Return the worst that learning made of so many consecutive requests; None if there are fewer
    of them.
    """
    shipped, learned = moving(points, window)
    return float((learned / shipped).min()) if len(shipped) else None


def describe_order(order: Order, names: Sequence[str]) -> dict[str, Any]:
    """Return one learning curve as a JSON object; `names` are the streams'."""
    points = order.points
    seconds = [p.cpu_s for p in points]
    return {
        "seed": order.seed,
        **_ratios(points),
        "least_ratio": least_ratio(points),
        "learning": {
            "cpu_s": sum(seconds),
            "cpu_s_per_request": fmean(seconds),
            "slowest_cpu_s": max(seconds),
            "changes": sum(p.changed for p in points),
        },
        "streams": {
            name: {**_ratios(stream), "requests_until_above": requests_until_above(stream)}
            for name, stream in zip(names, order.streams, strict=True)
        },
        "windows": [
            {"begin": i, **_ratios(points[i : i + _PART])} for i in range(0, len(points), _PART)
        ],
    }


def describe_alone(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Return how the drafter did on held-out prompts, as shipped and after every order."""
    differing = [r.prompt.id for r in results if not r.identical]
    groups = {name: _frozen(group) for name, group in group_by_class(results).items()}
    return {
        "draft_tokens": DRAFT_TOKENS,
        "classes": groups,
        "overall": _frozen(results),
        "differing_prompts": differing,
    }


def summarize_orders(orders: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return mean and range, over orders, of what the learning curves came to."""
    return {
        "rise": spread(x["rise"] for x in orders),
        "least_ratio": spread(x["least_ratio"] for x in orders),
        "cpu_s": spread(x["learning"]["cpu_s"] for x in orders),
        "cpu_s_per_request": spread(x["learning"]["cpu_s_per_request"] for x in orders),
        "slowest_cpu_s": spread(x["learning"]["slowest_cpu_s"] for x in orders),
        "streams": {
            name: {
                key: spread(x["streams"][name][key] for x in orders)
                for key in ("rise", "requests_until_above")
            }
            for name in names
        },
    }


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean and range of those that there are; None without any."""
    known = [x for x in values if x is not None]
    if not known:
        return None
    return {"mean": fmean(known), "min": min(known), "max": max(known)}


def learning_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what came of it, in a few lines."""
    summary, orders = document["summary"], document["orders"]
    cpu_s = summary["cpu_s_per_request"]["mean"]
    yield (
        f"{len(orders)} orders of {orders[0]['requests']} requests; learning took {cpu_s:.2f} s of "
        f"CPU per request, at most {summary['slowest_cpu_s']['max']:.1f} s at once"
    )
    yield f"while learning: tokens per pass {_signed(summary['rise'])} over the drafter as shipped"
    for name, stream in summary["streams"].items():
        until = stream["requests_until_above"]
        since = (
            f"after {until['max']:.0f} requests" if until else f"for no {WINDOW} requests to come"
        )
        yield f"  {name}: {_signed(stream['rise'])}; above it {since}"
    if summary["least_ratio"]:
        yield f"worst {WINDOW} requests in a row: {summary['least_ratio']['min']:.3f} of it"
    if alone := document["alone"]:
        groups = alone["classes"] if len(alone["classes"]) > 1 else {}
        for name, row in [*groups.items(), ("held out", alone["overall"])]:
            shipped = row["shipped"]
            yield (
                f"{name}, drafter alone, k = {DRAFT_TOKENS}: {shipped['tokens_per_pass']:.2f} "
                f"tokens per pass, {_signed(row['rise']['tokens_per_pass'])}; accepted "
                f"{shipped['acceptance_rate']:.3f}, {_signed(row['rise']['acceptance_rate'])}; "
                f"identical {row['identical_prompts']}/{row['prompts']}"
            )
    if combined := document["beside_ngrams"]:
        overall = combined["overall"]
        shipped = overall["versus"][SHIPPED]
        yield (
            f"beside the n-grams: {shipped['speedup_mean']:.2f}x plain as shipped, "
            f"{overall['speedup_mean']:.2f}x learned; time over that as shipped "
            f"{shipped['our_seconds_over_theirs']:.3f}; identical "
            f"{overall['identical_prompts']}/{overall['prompts']}"
        )
    if document["interrupted"]:
        yield "interrupted: this is not all of it"


def _ratios(points: Sequence[Point]) -> dict[str, Any]:
    tokens, shipped, learned = (
        sum(getattr(p, name) for p in points) for name in ("tokens", "shipped", "learned")
    )
    per_pass = {"shipped": tokens / max(shipped, 1), "learned": tokens / max(learned, 1)}
    rise = _rise(per_pass["learned"], per_pass["shipped"])
    return {"requests": len(points), "tokens": tokens, "tokens_per_pass": per_pass, "rise": rise}


def _frozen(results: Sequence[PromptResult]) -> dict[str, Any]:
    kinds = [SPECULATIVE, *(results[0].versus if results else ())]
    shipped, *learned = (_measures(results, kind) for kind in kinds)
    return {
        "prompts": len(results),
        "identical_prompts": sum(r.identical for r in results),
        "shipped": shipped,
        "orders": learned,
        "rise": {
            name: spread(_rise(x[name], shipped[name]) for x in learned) for name in _MEASURES
        },
    }


def _measures(results: Sequence[PromptResult], kind: str) -> dict[str, float]:
    stats = sum((r.stats_of(kind) for r in results), RunStats())
    return {name: getattr(stats, name) for name in _MEASURES}


def _rise(learned: float, shipped: float) -> float | None:
    return learned - shipped if shipped else None


def _signed(rise: Mapping[str, float] | None) -> str:
    if rise is None:
        return "no rise to tell"
    return f"{rise['mean']:+.3f} ({rise['min']:+.3f} to {rise['max']:+.3f})"
