"""From prompt results to the benchmark's JSON document.

Ratios of times are means, medians and percentiles over prompts; ratios of counts are taken from the
counts added up, so that a long answer weighs more than a short one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from .bench import ONE_ROW, PLAIN, SPECULATIVE, TWO_ROWS, VERSUS, PromptResult, Skipped
from .peers import own_plain
from .stats import RunStats


def group_by_class(results: Iterable[PromptResult]) -> dict[str, list[PromptResult]]:
    """Return results by class, in order of first appearance."""
    classes: dict[str, list[PromptResult]] = {}
    for result in results:
        classes.setdefault(result.prompt.class_name, []).append(result)
    return classes


def summarize(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Return the figures of a class, or of all prompts together."""
    stats = sum((r.stats for r in results), RunStats())
    rounds = max(stats.rounds, 1)
    ended = [r.reference.finish_reason == "stop" for r in results]
    differing = [r.prompt.id for r in results if not r.identical]
    losses = sorted((r for r in results if r.speedup < 1), key=lambda r: r.speedup)
    outside_s = sum(r.speculative_s for r in results) - stats.forward_s
    return {
        **_ratios(results),
        "identical_outputs": not differing,
        "identical_prompts": len(results) - len(differing),
        "differing_prompts": differing,
        "emitted_tokens": sum(len(r.reference.token_ids) for r in results),
        "plain_tokens_per_second": _tokens_per_second(results, PLAIN),
        "plain_two_rows_tokens_per_second": _tokens_per_second(results, (TWO_ROWS,)),
        "plain_one_row_tokens_per_second": _tokens_per_second(results, (ONE_ROW,)),
        "speculative_tokens_per_second": _tokens_per_second(results, (SPECULATIVE,)),
        "proposed_per_round": stats.proposed / rounds,
        "draft_ms_per_round": 1e3 * stats.draft_s / rounds,
        "verify_ms_per_round": 1e3 * stats.forward_s / rounds,
        # All time outside the target's pass, by the clock: drafting, verification, text.
        "overhead_ms_per_round": 1e3 * outside_s / rounds,
        "prefill_s": median([r.prefill_s for p in results for r in p.runs[SPECULATIVE]] or [0.0]),
        "losses": [{"prompt": r.prompt.id, "speedup": r.speedup} for r in losses],
        "finished": _ratios([r for r, stop in zip(results, ended, strict=True) if stop]),
        "unfinished": _ratios([r for r, stop in zip(results, ended, strict=True) if not stop]),
    }


def compare_peers(
    results: Sequence[PromptResult], peers: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return every peer's facts, its speed, and ours over it: medians over the paired prompts."""
    out: dict[str, Any] = {}
    for peer, facts in peers.items():
        kinds = [k for k in results[0].runs if k.split(":")[0] == peer]
        plain = own_plain(peer)
        timed_kinds = [*kinds, plain] if plain else kinds
        # An answer of one token comes with the prefill: there is no decoding to compare.
        timed = [r for r in results if all(x.timed_tokens for k in timed_kinds for x in r.runs[k])]
        if not timed:
            continue
        peer_s = [min(r.token_s(kind) for kind in kinds) for r in timed]
        out[peer] = {
            **facts,
            "prompts": len(timed),
            "tokens_per_second": _tokens_per_second(timed, kinds),
            "variants": {
                kind: {
                    "tokens_per_second": _tokens_per_second(timed, [kind]),
                    "tokens_per_pass": _tokens_per_pass(timed, kind),
                    "our_plain_over_variant": median(
                        r.token_s(kind) / r.plain_token_s for r in timed
                    ),
                }
                for kind in kinds
            },
            "our_plain_tokens_per_second": _tokens_per_second(timed, PLAIN),
            "our_plain_over_peer": median(
                s / r.plain_token_s for s, r in zip(peer_s, timed, strict=True)
            ),
            "our_speculative_over_peer": median(
                s / r.token_s(SPECULATIVE) for s, r in zip(peer_s, timed, strict=True)
            ),
            # Another engine's kernels may round differently: this many answers were the same.
            "same_answers": sum(r.runs[peer][0].token_ids == r.reference.token_ids for r in timed),
        }
        if plain:
            # Within one framework, so that its kernels say nothing about the way to draft; ours
            # beside it, over our own plain loop and for the same prompts.
            out[peer] |= {
                "speedup_over_own_plain": median(
                    r.token_s(plain) / s for s, r in zip(peer_s, timed, strict=True)
                ),
                "our_speedup": median(r.speedup for r in timed),
                "same_answers_as_own_plain": sum(_same_answer(r, kinds, plain) for r in timed),
            }
    return out


def report(
    results: Sequence[PromptResult],
    skipped: Sequence[Skipped],
    peers: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what the runs tell, as a JSON object; `peers` has the facts of every other engine."""
    overall = summarize(results)
    compared = compare_peers(results, peers)
    if compared:
        overall["peers"] = compared
    if "genai" in compared:
        overall["plain_vs_genai"] = compared["genai"]["our_plain_over_peer"]
        overall["genai_tokens_per_second"] = compared["genai"]["tokens_per_second"]
    return {
        "classes": {name: summarize(group) for name, group in group_by_class(results).items()},
        "overall": overall,
        "prompts": [_row(r) | _peer_rows(r, peers) for r in results],
        "skipped": [{"prompt": s.prompt.id, "reason": s.reason} for s in skipped],
    }


def _ratios(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Return the figures that do not depend on how fast the machine is; None without prompts."""
    stats = sum((r.stats for r in results), RunStats())
    speedups = [r.speedup for r in results]
    some = bool(results)
    return {
        "prompts": len(results),
        "speedup_mean": fmean(speedups) if some else None,
        "speedup_median": median(speedups) if some else None,
        "speedup_p10": float(np.percentile(speedups, 10)) if some else None,
        "speedup_p90": float(np.percentile(speedups, 90)) if some else None,
        "end_to_end_speedup_mean": (fmean(r.end_to_end_speedup for r in results) if some else None),
        "tokens_per_pass": stats.tokens_per_pass if some else None,
        "acceptance_rate": stats.acceptance_rate if some else None,
        "accepted_by_origin": dict(stats.accepted_by_origin),
        "versus": {
            kind.removeprefix(VERSUS): _versus(results, kind)
            for kind in (results[0].versus if some else ())
        },
    }


def _versus(results: Sequence[PromptResult], kind: str) -> dict[str, Any]:
    """Return how the same drafts' rivals did, and our time over theirs."""
    stats = sum((r.stats_of(kind) for r in results), RunStats())
    ours, theirs = (
        sum(len(r.reference.token_ids) * r.token_s(k) for r in results) for k in (SPECULATIVE, kind)
    )
    return {
        "speedup_median": median(r.plain_token_s / r.token_s(kind) for r in results),
        "speedup_mean": fmean(r.plain_token_s / r.token_s(kind) for r in results),
        "tokens_per_pass": stats.tokens_per_pass,
        "our_seconds_over_theirs": ours / theirs,
        "our_seconds_over_theirs_median": median(
            r.token_s(SPECULATIVE) / r.token_s(kind) for r in results
        ),
    }


def _tokens_per_second(results: Sequence[PromptResult], kinds: Sequence[str]) -> float | None:
    """Return tokens over seconds of all prompts, each by the fastest of the given kinds."""
    seconds = [
        (len(r.reference.token_ids), min(r.token_s(kind) for kind in kinds)) for r in results
    ]
    total = sum(tokens * token_s for tokens, token_s in seconds)
    return sum(tokens for tokens, _ in seconds) / total if total else None


def _tokens_per_pass(results: Sequence[PromptResult], kind: str) -> float:
    return sum((r.stats_of(kind) for r in results), RunStats()).tokens_per_pass


def _same_answer(result: PromptResult, kinds: Sequence[str], plain: str) -> bool:
    """Return whether an engine gave the answer of its own plain loop in every trial."""
    answer = result.runs[plain][0].token_ids
    return all(run.token_ids == answer for kind in kinds for run in result.runs[kind])


def _peer_rows(result: PromptResult, peers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a prompt's figures of every way to decode that speeds up another engine."""
    rows = {
        kind: {
            "speedup_over_own_plain": result.token_s(plain) / result.token_s(kind),
            "tokens_per_pass": _tokens_per_pass([result], kind),
            "same_as_own_plain": _same_answer(result, [kind], plain),
        }
        for kind in result.runs
        if kind.split(":")[0] in peers and (plain := own_plain(kind))
    }
    return {"peers": rows} if rows else {}


def _row(result: PromptResult) -> dict[str, Any]:
    reference = result.reference
    return {
        "id": result.prompt.id,
        "class": result.prompt.class_name,
        "prompt_tokens": result.prompt_tokens,
        "tokens": len(reference.token_ids),
        "finish_reason": reference.finish_reason,
        "speedup": result.speedup,
        "end_to_end_speedup": result.end_to_end_speedup,
        "tokens_per_pass": result.stats.tokens_per_pass,
        "acceptance_rate": result.stats.acceptance_rate,
        "identical": result.identical,
        "seconds_per_token": {kind: result.token_s(kind) for kind in result.runs},
        "prefill_s": {
            kind: median(r.prefill_s for r in runs) for kind, runs in result.runs.items()
        },
        "decode_s": {kind: [r.decode_s for r in runs] for kind, runs in result.runs.items()},
    }
