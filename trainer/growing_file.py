"""A long run's results as JSON Lines: a run that was stopped at any moment goes on where it was.

The file grows by one whole line per result; a kill leaves at most one partial last line, which is
cut off when the file is opened again. What the results depend on stands beside them in
`*.run.json`: a run that differs in it may not add to them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgedraft.runtime.state import write_atomic

from .errors import TrainError
from .provenance import describe_training
from .texts import read_jsonl

_log = logging.getLogger(__name__)
_REPORT_S = 20.0


class GrowingFile:
    """The results of one run, perhaps of several sittings."""

    def __init__(self, path: Path, settings: Mapping[str, Any], inputs: Iterable[Path]) -> None:
        """Open the file, or begin it; raise `TrainError` where other settings made it, or where it
        cannot be written.

        `inputs` are files that the provenance describes.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._claim(settings, inputs)
            self._stream = path.open("a+b")
        except OSError as error:
            raise TrainError(
                f"{path}: cannot be written ({error}); choose another --out"
            ) from error
        self._stream.seek(0)
        content = self._stream.read()
        self._stream.truncate(content.rfind(b"\n") + 1)

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self._stream.close()

    def rows(self) -> Iterable[dict[str, Any]]:
        """Return what is there already."""
        return read_jsonl(self._path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line, which a kill of this process leaves whole."""
        self._stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._stream.flush()

    def sync(self) -> None:
        """Let the device write what it was given."""
        os.fsync(self._stream.fileno())

    def progress(self, what: str, done: int, total: int) -> Progress:
        """Return what tells how far a run is, and lets the device write now and then."""
        return Progress(self, what, done, total)

    def _claim(self, settings: Mapping[str, Any], inputs: Iterable[Path]) -> None:
        record = self._path.with_suffix(".run.json")
        if not self._path.exists() or not self._path.stat().st_size:
            made = {"settings": settings, "provenance": describe_training(inputs, settings["seed"])}
            write_atomic(record, json.dumps(made, indent=2).encode() + b"\n")
            return
        try:
            begun = json.loads(record.read_bytes())["settings"]
            others = [name for name, value in settings.items() if begun[name] != value]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainError(
                f"{self._path}: exists, but {record.name} does not say how it was made "
                f"({type(error).__name__}); choose another --out"
            ) from error
        if others:
            name = others[0]
            raise TrainError(
                f"{self._path}: was begun with {name} = {begun[name]!r:.60}, not "
                f"{settings[name]!r:.60}; go on with the same options or choose another --out"
            )


class Progress:
    """How far a run is, and how fast."""

    def __init__(self, file: GrowingFile, what: str, done: int, total: int) -> None:
        self._file = file
        self._what = what
        self._total = total
        self._done = self._done_before = done
        self._tokens = 0
        self._started = self._logged = time.monotonic()

    def count(self, results: int, tokens: int) -> None:
        """Add what one pass brought; every now and then log the whole."""
        self._done += results
        self._tokens += tokens
        if time.monotonic() - self._logged > _REPORT_S:
            self._file.sync()
            self.log()

    def log(self) -> None:
        """Say how far the run is."""
        self._logged = time.monotonic()
        elapsed = self._logged - self._started
        pace = elapsed / max(1, self._done - self._done_before)
        _log.info(
            "%d of %d %s, %.0f tokens/s, about %.0f minutes to go",
            self._done,
            self._total,
            self._what,
            self._tokens / elapsed,
            pace * (self._total - self._done) / 60,
        )
