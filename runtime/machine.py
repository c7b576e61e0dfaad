"""What the machine itself allows: how fast memory can be read, and how much this process used."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np

from .folder import ModelFolder

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the present resident set
_REPEATS = 12


class PeakMemory:
    """Peak resident memory from now on, above what is resident now."""

    def __init__(self) -> None:
        self._resets = True
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            self._resets = False
        before = _status_bytes()
        self._start = before.get("VmRSS")
        self._old_peak = before.get("VmHWM")

    def growth(self) -> int | None:
        """Return the bytes by which the peak rose; None where the system does not tell."""
        peak = _status_bytes().get("VmHWM")
        if peak is None or self._start is None:
            return None
        if not self._resets and peak == self._old_peak:
            return None  # an earlier peak hides this one
        return max(0, peak - self._start)


def weights_bytes(folder: ModelFolder) -> int:
    """Return the size of the graph and its external weights."""
    graph = folder.graph
    return sum(path.stat().st_size for path in graph.parent.glob(f"{graph.name}*"))


def read_floor_s(num_bytes: int, threads: int) -> float:
    """Return the best time in which `threads` threads read as many bytes from memory once.

    A target pass reads all weights, so nothing that computes with them can be faster, unless the
    caches hold them.
    """
    words = np.ones(max(num_bytes // 8, threads), np.int64)
    parts = np.array_split(words, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_REPEATS):
            started = perf_counter()
            list(pool.map(np.sum, parts))
            best = min(best, perf_counter() - started)
    return best


def _status_bytes() -> Mapping[str, int]:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in fields}
