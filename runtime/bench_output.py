"""What was measured, for people: a line per prompt, a table, pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from .bench import SPECULATIVE, PromptResult, Skipped
from .bench_report import group_by_class
from .errors import EdgeDraftError
from .extras import need
from .learn_bench import Point
from .learn_bench_report import WINDOW, moving
from .plan import Plan
from .plan_report import DRAFT_LENGTHS, DrafterCosts, to_accept
from .state import replaced

_OURS, _GREY = "#1f6f8b", "#8a8a8a"


def need_figures() -> Any:
    """Return what draws pictures; raise `EdgeDraftError` where it is not installed."""
    return need("matplotlib.figure", "--plot", "edgedraft[bench]")


def check_picture(path: Path) -> None:
    """Raise `EdgeDraftError` unless a picture can be drawn and written there."""
    kinds = need_figures().Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise EdgeDraftError(
            f"{path}: no name of a picture; it must end in one of .{', .'.join(sorted(kinds))}"
        )
    check_file(path)


def check_file(path: Path) -> None:
    """Raise `EdgeDraftError` unless a file can be written there; make the folder it goes to."""
    try:
        if path.is_dir():
            raise EdgeDraftError(f"{path}: is a folder, a file name is needed")
        path.parent.mkdir(parents=True, exist_ok=True)
        # `state.replaced` will need a neighbour with a name as long.
        NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent).close()
    except OSError as error:
        raise EdgeDraftError(f"{path}: cannot be written ({error}); name another file") from error


def progress_line(number: int, count: int, result: PromptResult | Skipped) -> str:
    """Return one line about a prompt that has just been answered."""
    if isinstance(result, Skipped):
        return f"[{number}/{count}] {result.prompt.id}: skipped, {result.reason}"
    stats = result.stats
    return (
        f"[{number}/{count}] {result.prompt.id}: {result.speedup:.2f}x, "
        f"{1 / result.token_s(SPECULATIVE):.1f} against {1 / result.plain_token_s:.1f} tokens/s, "
        f"accepted {stats.accepted}/{stats.proposed}, "
        f"{'identical' if result.identical else 'OUTPUT DIFFERS'}"
    )


def table_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result table and what else was measured."""
    classes, overall = document["classes"], document["overall"]
    width = max(len("overall"), *(len(name) for name in classes))
    yield (
        f"{'':{width}}  prompts  speed-up  (10 to 90 %)    mean  end to end  "
        "tokens/pass  accepted  identical"
    )
    for name, row in [*classes.items(), ("overall", overall)]:
        identical = f"{row['identical_prompts']}/{row['prompts']}"
        yield (
            f"{name:{width}}  {row['prompts']:7d}  {row['speedup_median']:7.2f}x  "
            f"({row['speedup_p10']:.2f} to {row['speedup_p90']:.2f})  "
            f"{row['speedup_mean']:5.2f}x  {row['end_to_end_speedup_mean']:9.2f}x  "
            f"{row['tokens_per_pass']:11.2f}  {100 * row['acceptance_rate']:7.0f}%  {identical:>9}"
        )
    yield ""
    yield (
        f"plain {overall['plain_tokens_per_second']:.1f} tokens/s, speculative "
        f"{overall['speculative_tokens_per_second']:.1f}; a round: draft "
        f"{overall['draft_ms_per_round']:.2f} ms, verify {overall['verify_ms_per_round']:.2f} ms, "
        f"all outside the target {overall['overhead_ms_per_round']:.2f} ms"
    )
    floor, memory = document["floor"], overall["peak_memory"]
    yield (
        f"reading the weights once takes {1e3 * floor['seconds']:.1f} ms; a plain token takes "
        f"{floor['plain_token_over_floor']:.2f}x that"
    )
    if memory["ratio"] is not None:
        yield (
            f"peak memory {memory['session_peak_bytes'] / 1e6:.0f} MB, {memory['ratio']:.2f}x the "
            f"weights' {memory['weights_bytes'] / 1e6:.0f} MB"
        )
    for name in overall["versus"]:
        ratios = (
            f"{group} {row['versus'][name]['our_seconds_over_theirs']:.3f}"
            for group, row in [*classes.items(), ("overall", overall)]
        )
        yield f"time over that of {name}: {', '.join(ratios)}"
    for name, peer in overall.get("peers", {}).items():
        yield (
            f"{name}: {peer['tokens_per_second']:.1f} tokens/s; ours over it: plain "
            f"{peer['our_plain_over_peer']:.2f}x, speculative "
            f"{peer['our_speculative_over_peer']:.2f}x"
        )
        if "speedup_over_own_plain" in peer:
            passes = ", ".join(f"{v['tokens_per_pass']:.2f}" for v in peer["variants"].values())
            yield (
                f"{'':{len(name)}}  {peer['speedup_over_own_plain']:.2f}x its own plain loop (ours "
                f"{peer['our_speedup']:.2f}x), {passes} tokens/pass, its plain answer "
                f"{peer['same_answers_as_own_plain']}/{peer['prompts']}"
            )
    if losses := overall["losses"]:
        worst = losses[0]
        yield (
            f"slower than plain: {len(losses)} of {overall['prompts']} prompts, at worst "
            f"{worst['speedup']:.2f}x ({worst['prompt']})"
        )
    if overall["differing_prompts"]:
        yield f"OUTPUT DIFFERS from plain: {', '.join(overall['differing_prompts'])}"


def plot_speedups(results: Sequence[PromptResult], document: Mapping[str, Any], path: Path) -> None:
    """Write a picture of every class's speed-ups: each prompt, the middle 80 % and the median."""
    figures = need_figures()
    classes = group_by_class(results)
    figure = figures.Figure(figsize=(8, 1.6 + 0.45 * len(classes)), layout="constrained")
    axes = figure.add_subplot()
    for y, (name, group) in enumerate(classes.items()):
        row = document["classes"][name]
        low, middle, high = (row[f"speedup_{part}"] for part in ("p10", "median", "p90"))
        below = [y + 0.12 + 0.06 * (i % 5) for i in range(len(group))]  # clear of the label
        axes.scatter([r.speedup for r in group], below, s=12, color=_GREY, alpha=0.5, lw=0)
        axes.hlines(y, low, high, color=_OURS, lw=4, alpha=0.5)
        axes.plot(middle, y, "o", color=_OURS, ms=8)
        axes.annotate(
            f"{middle:.2f}x",
            (middle, y),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=_OURS,
            fontweight="bold",
            bbox={"color": "white", "pad": 0.5},
        )
    axes.axvline(1, color="black", lw=1, ls=":")
    axes.set_yticks(range(len(classes)), [f"{n} ({len(g)})" for n, g in classes.items()])
    axes.set_ylim(len(classes) - 0.4, -0.6)
    axes.set_xlim(left=min(0.5, *(r.speedup - 0.1 for r in results)))
    axes.set_xlabel("speed-up over the fastest plain loop, decoding only")
    target = document["provenance"]["target"]
    axes.set_title(
        f"{target['name']} ({target['precision']}), "
        f"{document['provenance']['threads']} threads: median, middle 80 % and every prompt",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_plan(
    plan: Plan, overhead_s: float, title: str, path: Path, drafter: DrafterCosts | None = None
) -> None:
    """Write a picture of how many tokens of a draft have to be accepted for what it costs."""
    figure = need_figures().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    lengths = range(1, DRAFT_LENGTHS[-1] + 1)
    curves = [("copied", 0.0, _GREY)]
    if drafter is not None:
        curves.append((f"by {drafter.name}", drafter.step_s, _OURS))
    for label, step_s, colour in curves:
        needed = [to_accept(plan, overhead_s, length, step_s) for length in lengths]
        axes.plot(lengths, needed, "o-", ms=3, color=colour, label=label)
    axes.plot(lengths, lengths, color="black", lw=1, ls=":", label="all of them")
    axes.set_xlabel("tokens in a draft")
    axes.set_ylabel("accepted on average where it begins to pay")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_learning(
    orders: Sequence[Sequence[Point]], document: Mapping[str, Any], path: Path
) -> None:
    """Write a picture of the learning curve over all orders, and of the drafter as shipped."""
    figures = need_figures()
    figure = figures.Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    window = min(WINDOW, len(orders[0]))
    shipped, learned = zip(*(moving(points, window) for points in orders), strict=True)
    requests = range(window, len(orders[0]) + 1)
    axes.plot(requests, np.mean(shipped, axis=0), color=_GREY, label="as shipped")
    low, high = np.min(learned, axis=0), np.max(learned, axis=0)
    axes.fill_between(requests, low, high, color=_OURS, alpha=0.25, lw=0)
    axes.plot(requests, np.mean(learned, axis=0), color=_OURS, label="learning")
    lengths = [stream["requests"] for stream in document["streams"]]
    for switch in accumulate(lengths[:-1]):
        axes.axvline(switch, color="black", lw=1, ls=":")
    axes.set_xlabel(f"requests (each point: the {window} before it)")
    axes.set_ylabel("target tokens per pass")
    provenance = document["provenance"]
    axes.set_title(
        f"{provenance['drafter']['name']} for {provenance['target']['name']}: mean and range of "
        f"{len(orders)} orders",
        fontsize=10,
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    with replaced(path) as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:])
