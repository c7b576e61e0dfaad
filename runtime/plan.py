"""What this device's passes cost, measured once and remembered.

v(M), the seconds of a target pass with M rows, decides how long a draft may be (`policy.py`); it
grows with the tokens in the cache. It depends on the graph, the CPU, the number of threads and
onnxruntime, so those make up the key under which a plan is kept.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from .long_text_check import rows_keep_bits
from .onnx_model import VERIFY_ROWS, OnnxModel
from .ort_session import onnxruntime
from .policy import PassCosts
from .state import DeviceState

_log = logging.getLogger(__name__)

_ROWS = (1, 2, 3, 4, 6, 8, 12, VERIFY_ROWS)
_REPEATS = 7
_CONTEXT = 64
# Enough that attention shows, little enough that reading it takes a second and not a minute.
_LONG_CONTEXT = 512
_PREFILL_ROWS = 128
_CHECKS = 3  # passes
_FASTER = 0.7  # of what was remembered: noise between one start and the next is less


@dataclass(frozen=True, slots=True)
class Plan:
    """Measured costs of one target on this device."""

    # rows -> median seconds behind a short context; 1 is the single-row loop
    pass_s: Mapping[int, float]
    token_s: Mapping[int, float]  # rows -> seconds that each further token in the cache adds

    @property
    def costs(self) -> PassCosts:
        """The costs of the passes the decoder makes, which never have one row."""
        verify = [rows for rows in self.pass_s if rows > 1] or list(self.pass_s)
        empty = {rows: self.pass_s[rows] - _CONTEXT * self.token_s[rows] for rows in verify}
        return PassCosts(empty, {rows: self.token_s[rows] for rows in verify})

    @property
    def plain_s(self) -> float:
        """Seconds of the fastest pass that can decode plainly."""
        return min(s for rows, s in self.pass_s.items() if rows <= 2)


def load_or_measure_plan(model: OnnxModel, state: DeviceState, *, remeasure: bool = False) -> Plan:
    """Return the remembered plan of this model on this device, or measure it (about a second) and
    remember it; always measure with `remeasure`, and where passes turn out to take much less than
    they did: something else had the machine then. That they take more says nothing.
    """
    key = _key(model)
    plans = state.load("plans")
    plans = plans if isinstance(plans, dict) else {}
    plan = None if remeasure else _from_json(plans.get(key))
    if plan is None or _fastest_s(model) < _FASTER * plan.costs.seconds(2):
        plan = measure_plan(model)
        state.save("plans", {**plans, key: _to_json(plan)})
        _check_bits(model)
    return plan


def measure_plan(model: OnnxModel) -> Plan:
    """Time passes behind a short and a longer context; the cache is emptied."""
    short = measure_passes(model, _ROWS, _CONTEXT)
    if model.context_length <= _LONG_CONTEXT + VERIFY_ROWS:
        return Plan(short, dict.fromkeys(short, 0.0))
    long = measure_passes(model, _ROWS, _LONG_CONTEXT)
    # Noise must not make a full cache look cheaper than one that holds less, or an empty one free.
    more = {rows: min(max(long[rows] - s, 0.0), 4 * s) for rows, s in short.items()}
    return Plan(short, {rows: s / (_LONG_CONTEXT - _CONTEXT) for rows, s in more.items()})


def measure_passes(model: OnnxModel, row_counts: Sequence[int], context: int) -> dict[int, float]:
    """Return the median seconds of passes of these row counts behind `context` tokens, as far as
    the model allows them.

    The row counts take turns, so that a disturbance hits them alike; the cache is emptied.
    """
    most = min(model.max_rows, model.context_length)
    row_counts = [rows for rows in row_counts if rows <= most]
    context = max(0, min(context, model.context_length - VERIFY_ROWS - 1))
    model.rollback(0)
    for start in range(0, context, _PREFILL_ROWS):
        model.extend([0] * min(_PREFILL_ROWS, context - start))
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
    return {rows: median(times) for rows, times in seconds.items()}


def _check_bits(model: OnnxModel) -> None:
    if model.max_rows == 1 or model.context_length <= _LONG_CONTEXT + VERIFY_ROWS:
        return
    if not rows_keep_bits(model, _LONG_CONTEXT):
        _log.warning(
            "%s: behind %d tokens, other rows of a pass change a row's logits with onnxruntime %s "
            "on %s, so speculation may, rarely, change a token",
            model.folder.graph,
            _LONG_CONTEXT,
            onnxruntime().__version__,
            ", ".join(model.config.providers),
        )


def _fastest_s(model: OnnxModel) -> float:
    """Return the seconds of the fastest of a few passes of two rows; the cache is emptied."""
    seconds = []
    for _ in range(_CHECKS):
        model.rollback(0)
        started = perf_counter()
        model.forward([0] * 2)
        seconds.append(perf_counter() - started)
    model.rollback(0)
    return min(seconds)


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


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        name: {str(rows): seconds for rows, seconds in table.items()}
        for name, table in asdict(plan).items()
    }


def _from_json(value: Any) -> Plan | None:
    try:
        pass_s, token_s = (
            {int(rows): float(s) for rows, s in value[name].items()}
            for name in ("pass_s", "token_s")
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if pass_s.keys() != token_s.keys() or 1 not in pass_s:
        return None
    sane = min(pass_s.values()) > 0 and min(token_s.values()) >= 0
    return Plan(pass_s, token_s) if sane else None
