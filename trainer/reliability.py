"""How good stated probabilities are: Brier scores, and how often what is stated comes true.

An outcome is 1, 0, or the chance of it that is known beforehand; what is scored is then the
expectation. The score of always saying the share that came true is what there is to beat, here as a
device would know it: the mean of all outcomes before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_BINS = 10
_PRIOR = 0.5, 1.0  # what a running mean begins with, and its weight in outcomes


def brier(stated: npt.ArrayLike, outcomes: npt.ArrayLike) -> float:
    """Return the mean of (stated - outcome) squared."""
    p, y = np.asarray(stated, np.float64), np.asarray(outcomes, np.float64)
    return float((y * (1 - p) ** 2 + (1 - y) * p**2).mean())


def running_mean(outcomes: npt.ArrayLike) -> FloatArray:
    """Return for every outcome the mean of those before it."""
    y = np.asarray(outcomes, np.float64)
    mean, weight = _PRIOR
    before: FloatArray = np.cumsum(y) - y
    return (mean * weight + before) / (weight + np.arange(len(y)))


def reliability(stated: npt.ArrayLike, outcomes: npt.ArrayLike) -> list[dict[str, Any]]:
    """Return for each tenth of the probabilities how many were stated, their mean, and the share
    that came true; tenths without any are left out.
    """
    p, y = np.asarray(stated, np.float64), np.asarray(outcomes, np.float64)
    bins = np.minimum((p * _BINS).astype(int), _BINS - 1)
    return [
        {
            "count": int(inside.sum()),
            "stated": round(float(p[inside].mean()), 4),
            "came_true": round(float(y[inside].mean()), 4),
        }
        for b in range(_BINS)
        if (inside := bins == b).any()
    ]
