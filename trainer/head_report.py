"""How good an acceptance head is on held-out rounds, beside what could be had without one: the
drafter's own probability, and the mean of what came true so far, for each place in a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .acceptance_head import AcceptanceHead
from .head_rows import Rows
from .reliability import brier, reliability, running_mean

FloatArray = npt.NDArray[np.float32]


@torch.inference_mode()
def stated_by(head: AcceptanceHead, rows: Rows) -> FloatArray:
    """Return what a head says of every row."""
    logits = head(torch.from_numpy(rows.hidden).float(), torch.from_numpy(rows.certainty))
    stated: FloatArray = logits.sigmoid().numpy()
    return stated


def measure_head(head: AcceptanceHead, rows: Rows) -> dict[str, Any]:
    """Return Brier scores of greedy verification, of all pieces and by their place in the round,
    and how reliable probabilities are; `coupled` are expected scores of coupled sampling, where the
    target's chances are known.
    """
    stated = stated_by(head, rows)
    places = {str(place): rows.place == place for place in np.unique(rows.place)}
    scores = {
        name: _scores(stated[among], rows.take(among), rows.right[among])
        for name, among in {"all": rows.place >= 0, **places}.items()
    }
    measured: dict[str, Any] = {
        "brier": scores,
        "reliability": reliability(stated, rows.right),
        "reliability_own": reliability(rows.own, rows.right),
    }
    known = ~np.isnan(rows.chance)
    if known.any():
        measured["coupled"] = _scores(stated[known], rows.take(known), rows.chance[known])
    return measured


def head_table(measured: Mapping[str, Any]) -> str:
    """Return what was measured as lines for a person."""
    lines = [f"{'place':<10}{'pieces':>8}{'right':>8}{'head':>8}{'own':>8}{'mean':>8}"]
    scores: dict[str, Any] = {**measured["brier"]}
    if "coupled" in measured:
        scores["coupled"] = measured["coupled"]
    for name, row in scores.items():
        numbers = (row[x] for x in ("right", "head", "own", "running_mean"))
        lines.append(f"{name:<10}{row['count']:>8}" + "".join(f"{x:>8.4f}" for x in numbers))
    lines.append("stated -> came true")
    lines += [
        f"{x['stated']:.3f} -> {x['came_true']:.3f} ({x['count']})" for x in measured["reliability"]
    ]
    return "\n".join(lines)


def _scores(stated: FloatArray, rows: Rows, outcomes: FloatArray) -> dict[str, Any]:
    running = np.empty(len(outcomes))
    for place in np.unique(rows.place):
        running[rows.place == place] = running_mean(outcomes[rows.place == place])
    values: dict[str, npt.NDArray[Any]] = {"head": stated, "own": rows.own, "running_mean": running}
    return {
        "count": len(outcomes),
        "right": round(float(outcomes.mean()), 4),
        **{name: round(brier(x, outcomes), 4) for name, x in values.items()},
    }
