"""What this device's passes cost, measured once and remembered.

v(M), the seconds of a target pass with M rows, decides how long a draft may be (`policy.py`). It
depends on the graph, the CPU, the number of threads and onnxruntime, so those make up the key under
which a plan is kept.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from .onnx_model import VERIFY_ROWS, OnnxModel
from .ort_session import onnxruntime
from .policy import PassCosts
from .state import DeviceState

_ROWS = (1, 2, 3, 4, 6, 8, 12, VERIFY_ROWS)
_REPEATS = 7
_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """Measured costs of one target on this device."""

    pass_s: Mapping[int, float]  # rows -> median seconds; 1 is the single-row loop

    @property
    def costs(self) -> PassCosts:
        """The costs of the passes the decoder makes, which never have one row."""
        verify = {rows: s for rows, s in self.pass_s.items() if rows > 1}
        return PassCosts(verify or self.pass_s)

    @property
    def plain_s(self) -> float:
        """Seconds of the fastest pass that can decode plainly."""
        return min(s for rows, s in self.pass_s.items() if rows <= 2)


def load_or_measure_plan(model: OnnxModel, state: DeviceState, *, remeasure: bool = False) -> Plan:
    """Return the remembered plan of this model on this device, or measure it (about a second) and
    remember it; always measure with `remeasure`.
    """
    key = _key(model)
    plans = state.load("plans")
    plans = plans if isinstance(plans, dict) else {}
    if remeasure or (plan := _from_json(plans.get(key))) is None:
        plan = measure_plan(model)
        state.save("plans", {**plans, key: {str(rows): s for rows, s in plan.pass_s.items()}})
    return plan


def measure_plan(
    model: OnnxModel, row_counts: Sequence[int] = _ROWS, context: int = _CONTEXT
) -> Plan:
    """Time passes of several row counts behind `context` tokens, as far as the model allows them.

    The row counts take turns, so that a disturbance hits them alike; the cache is emptied.
    """
    most = min(model.max_rows, model.context_length)
    row_counts = [rows for rows in row_counts if rows <= most]
    context = max(0, min(context, model.context_length - VERIFY_ROWS - 1))
    model.rollback(0)
    model.extend([0] * context)
    seconds: dict[int, list[float]] = {rows: [] for rows in row_counts}
    single_rows = model.single_rows
    for repeat in range(_REPEATS + 1):
        for rows in row_counts:
            model.single_rows = rows == 1
            started = perf_counter()
            model.forward([0] * rows)
            if repeat:  # the first pass of a shape also allocates
                seconds[rows].append(perf_counter() - started)
            model.rollback(context)
    model.single_rows = single_rows
    model.rollback(0)
    return Plan({rows: median(times) for rows, times in seconds.items()})


def _key(model: OnnxModel) -> str:
    config = model.config
    return " ".join(
        (
            f"cpu={cpu_name()}",
            f"threads={config.num_threads}",
            f"providers={','.join(config.providers)}",
            f"onnxruntime={onnxruntime().__version__}",
        )
    )


def cpu_name() -> str:
    """Return what the system calls this CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(("model name", "Hardware")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _from_json(value: Any) -> Plan | None:
    try:
        plan = Plan({int(rows): float(s) for rows, s in value.items()})
    except (AttributeError, TypeError, ValueError):
        return None
    return plan if 1 in plan.pass_s and all(s > 0 for s in plan.pass_s.values()) else None
