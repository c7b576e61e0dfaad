"""What the runtime remembers on this device between sessions.

One folder per target, named by its fingerprint. Every file is written to a temporary neighbour,
synced and renamed, so that it is whole after a kill at any moment; it carries a version and a
checksum, and one that does not read back is set aside with a message: losing what was remembered
never stops generation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import StateError

_log = logging.getLogger(__name__)
_VERSION = 1


def default_state_dir() -> Path:
    """Return the folder for device state: $EDGEDRAFT_STATE, or the user's state directory.

    Raises `StateError` for a user without one.
    """
    if chosen := os.environ.get("EDGEDRAFT_STATE"):
        return Path(chosen)
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "edgedraft"
    try:
        return Path.home() / ".local" / "state" / "edgedraft"
    except RuntimeError as error:
        raise StateError("this user has no home directory: set EDGEDRAFT_STATE") from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class DeviceState:
    """The state of one target on this device."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.shared = directory  # for what does not depend on the target alone
        self.folder = directory / fingerprint[:32]

    def load(self, name: str) -> Any | None:
        """Return the JSON value saved under `name`; None when there is none or it is damaged."""
        path = self.folder / f"{name}.json"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s cannot be read (%s); going on without it", path, error)
            return None
        try:
            record = json.loads(content)
            if record["version"] == _VERSION and record["sha256"] == _checksum(record["value"]):
                return record["value"]
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        aside = path.with_suffix(".damaged")
        _log.warning("%s is damaged; set aside as %s", path, aside.name)
        try:
            os.replace(path, aside)
        except OSError as error:
            _log.warning("%s cannot be set aside (%s)", path, error)
        return None

    def save(self, name: str, value: Any) -> None:
        """Save a JSON value under `name`; raise `StateError` when the device refuses."""
        record = {"version": _VERSION, "sha256": _checksum(value), "value": value}
        try:
            write_atomic(self.folder / f"{name}.json", json.dumps(record).encode())
        except OSError as error:
            raise StateError(
                f"{self.folder}: cannot be written ({error}); point EDGEDRAFT_STATE at a folder "
                "that can"
            ) from error


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
