"""The one door to onnxruntime: telemetry off, threads that do not fight, providers by name.

onnxruntime builds since 1.29 send usage data unless an environment variable forbids it before the
first import, so nothing else in EdgeDraft imports onnxruntime at the top of a file.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt

from .errors import FolderError, ProviderError

_log = logging.getLogger(__name__)
# Both spellings occur in released builds.
_TELEMETRY_SWITCHES = ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED")
CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Where a graph runs."""

    threads: int | None = None  # None: one per core this process may use
    providers: tuple[str, ...] = (CPU,)  # in order of preference; the CPU is always the last resort

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be >= 1, got {self.threads}")
        if not self.providers:
            raise ValueError("providers must name at least one execution provider")

    @property
    def num_threads(self) -> int:
        """The number of threads a session gets."""
        return self.threads or usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@cache
def onnxruntime() -> ModuleType:
    """Import onnxruntime with its telemetry switched off."""
    too_late = "onnxruntime" in sys.modules
    for switch in _TELEMETRY_SWITCHES:
        os.environ[switch] = "1"
    import onnxruntime as ort

    if too_late:
        _log.warning("onnxruntime was imported before EdgeDraft: its telemetry may have started")
        ort.disable_telemetry_events()
    module: ModuleType = ort
    return module


def open_session(
    graph: Path | bytes,
    config: SessionConfig,
    initializers: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    weights: Path | None = None,
    frugal: bool = False,
) -> Any:
    """Open an `onnxruntime.InferenceSession`.

    `initializers` take the place of those that the graph keeps in another file. The session looks
    into these arrays, so they must be contiguous and outlive it. A `frugal` one holds no memory
    between passes and little in them, at some cost in time. `weights` is the folder of the other
    files of a graph that comes as bytes. Raises `ProviderError` for a provider
    that is not there and `FolderError` for a graph that onnxruntime refuses.
    """
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = config.num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Idle threads of one session otherwise spin on the cores that the other session needs
    # (docs/experiments.md).
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if weights is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(weights)
        )
    if frugal:
        options.enable_cpu_mem_arena = False
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    providers = _available(ort, config.providers)
    try:
        if initializers:
            values = [ort.OrtValue.ortvalue_from_numpy(x) for x in initializers.values()]
            options.add_external_initializers(list(initializers), values)
        return ort.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), options, providers=providers
        )
    except Exception as error:  # onnxruntime raises a family of unrelated classes
        name = "graph" if isinstance(graph, bytes) else graph
        reason = " ".join(str(error).split())[:300]
        raise FolderError(
            f"{name}: onnxruntime {ort.__version__} cannot load this graph ({reason}); export it "
            "again"
        ) from error


def _available(ort: ModuleType, wanted: Sequence[str]) -> list[str]:
    """Return the wanted providers, and the CPU behind them."""
    there = ort.get_available_providers()
    by_short_name = {p.removesuffix("ExecutionProvider").lower(): p for p in there}
    found = []
    for name in wanted:
        provider = by_short_name.get(name.removesuffix("ExecutionProvider").lower())
        if provider is None:
            raise ProviderError(
                f"execution provider {name!r} is not in this onnxruntime {ort.__version__}, which "
                "has "
                f"{', '.join(by_short_name)}; name one of these or install another build of "
                "onnxruntime"
            )
        found.append(provider)
    return found if CPU in found else [*found, CPU]
