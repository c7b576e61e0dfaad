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
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import StateError

_log = logging.getLogger(__name__)
_VERSION = 1
_NOT_LEARNED = ("plans.json",)


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


def write_atomic(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file so that a reader sees the old content or the new, whatever happens meanwhile."""
    with replaced(path, private=private) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replaced(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary neighbour to write to; it takes the file's place when all went well.

    What is `private` nobody but this user can read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    mode = 0o600 if private else 0o666  # less what the user's umask takes
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def load_json(path: Path) -> Any | None:
    """Return the JSON value saved in a file; None when there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s cannot be read (%s); going on without it", path, error)
        return None
    try:
        record = json.loads(content)
        if record["version"] == _VERSION and record["sha256"] == json_sha256(record["value"]):
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


def save_json(path: Path, value: Any) -> None:
    """Save a JSON value in a file; raise `StateError` when the device refuses."""
    record = {"version": _VERSION, "sha256": json_sha256(value), "value": value}
    try:
        write_atomic(path, json.dumps(record).encode(), private=True)
    except OSError as error:
        raise StateError(
            f"{path.parent}: cannot be written ({error}); point EDGEDRAFT_STATE at a folder that "
            "can"
        ) from error


def json_sha256(value: Any) -> str:
    """Return the checksum of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class DeviceState:
    """The state of one target on this device."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.shared = directory  # for what does not depend on the target alone
        self.folder = directory / fingerprint[:32]

    def load(self, name: str) -> Any | None:
        """Return the JSON value saved under `name`; None when there is none or it is damaged."""
        return load_json(self.folder / f"{name}.json")

    def save(self, name: str, value: Any) -> None:
        """Save a JSON value under `name`; raise `StateError` when the device refuses."""
        save_json(self.folder / f"{name}.json", value)

    def forget(self) -> None:
        """Remove all that was learned of texts, unfinished and damaged files included: everything
        but the measured costs. Raises `StateError` when the device refuses.
        """
        try:
            for path in self.folder.iterdir() if self.folder.exists() else ():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in _NOT_LEARNED:
                    path.unlink()
        except OSError as error:
            raise StateError(
                f"{self.folder}: cannot be removed ({error}); remove it by hand"
            ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
