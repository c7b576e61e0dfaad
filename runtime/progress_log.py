"""Progress of the workstation's commands on stderr."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress_on_stderr(level: int = logging.INFO) -> Iterator[None]:
    """Show what EdgeDraft's modules log, each line with the seconds since the start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ElapsedFormatter())
    logger = logging.getLogger("edgedraft")
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _ElapsedFormatter(logging.Formatter):
    """Prefixes every line with the seconds since the start."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()

    def format(self, record: logging.LogRecord) -> str:
        return f"[{time.monotonic() - self._started:4.0f} s] {super().format(record)}"
