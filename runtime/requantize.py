"""Puts weights into eight bits, one scale per output: for the exporter, and again on the device.

A drafter that has learned is its own weights plus what it learned, put into the graph in place of
the exported integers. Both sides call this one function, so a drafter that has learned nothing is
the exported one to the bit.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .datatypes import FloatArray

Int8Array: TypeAlias = npt.NDArray[np.int8]

_LEVELS = 127
_CHUNK = 256  # columns that are converted at once: few enough for the cache


def quantize_columns(weight: FloatArray) -> tuple[Int8Array, FloatArray]:
    """Return int8 of the weight's shape (inputs, outputs) and one scale per output."""
    integers = np.empty(weight.shape, np.int8)
    scales = np.empty(weight.shape[1], np.float32)
    for start in range(0, weight.shape[1], _CHUNK):
        part = weight[:, start : start + _CHUNK]
        scale = (np.abs(part).max(axis=0) / _LEVELS).astype(np.float32)
        integers[:, start : start + _CHUNK] = np.rint(part / nonzero(scale))
        scales[start : start + _CHUNK] = scale
    return integers, scales


def nonzero(scale: FloatArray) -> FloatArray:
    """Return scales that can be divided by: 1 for those of zeros alone."""
    return np.where(scale == 0, np.float32(1), scale)
