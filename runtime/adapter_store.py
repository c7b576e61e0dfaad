"""The adapters of one drafter for one target on this device: generations, one of them active.

    N.onnx_adapter, N.json    generation N (`adapter_file.py`); a number is never given twice
    trail.json                the generations that were active, the present one last; null stands
                              for the drafter as it was shipped. And the highest number so far
    student.bin               what is still being learned; the learner's

A generation is whole on disk before the trail names it, and is removed after the trail has stopped
to, so a kill at any moment leaves the old or the new one active. Rolling back is going back on the
trail. It is short: what has left it is removed, except what a person gave a name.
One process at a time may change a store; of two that do, one may lose its generation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .adapter_file import (
    SUFFIX,
    Adapter,
    AdapterBase,
    manifest_path,
    read_adapter,
    write_adapter,
)
from .errors import AdapterError, StateError
from .folder import ModelFolder
from .lora import Lora
from .state import load_json, save_json
from .tokenizer_file import TokenIds
from .training_files import find_training_files, open_training_files

SHIPPED = "none"  # in the place of a name: the drafter without any adapter
_TRAIL, _STUDENT = "trail.json", "student.bin"
_KEPT = 4
_LONGEST_NAME = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """A generation as a table shows it."""

    generation: int
    name: str | None  # None: learned on this device
    is_active: bool
    rank: int
    num_modules: int
    num_bytes: int
    written: datetime
    problem: str | None = None  # why it cannot be used


def open_adapter_store(kept: Path, drafter: ModelFolder, target: TokenIds) -> AdapterStore:
    """Return the store in a target's state folder, `kept`; raise `FolderError` for a drafter that
    cannot learn.
    """
    files = open_training_files(drafter)
    folder = kept / "adapters" / files.fingerprint[:16]
    return AdapterStore(folder, AdapterBase.of(drafter, files, target))


def active_lora(kept: Path, drafter: ModelFolder, target: TokenIds) -> Lora | None:
    """Return what a drafter has learned for a target; None where it is as it was shipped."""
    if find_training_files(drafter) is None:
        return None
    adapter = open_adapter_store(kept, drafter, target).active()
    return adapter.lora if adapter else None


class AdapterStore:
    """Every method is atomic; one that raises has changed nothing."""

    def __init__(self, folder: Path, base: AdapterBase) -> None:
        self._folder = folder
        self._base = base
        self.student_path = folder / _STUDENT

    def active(self) -> Adapter | None:
        """Return the active adapter, None for the drafter as shipped. One that cannot be used is
        warned of, and the one before it is taken.
        """
        for generation in reversed(self._trail()):
            if generation is None:
                break
            try:
                return read_adapter(self._path(generation), self._base)
            except AdapterError as error:
                _log.warning("%s; going back to the one before it", error)
        return None

    def add(
        self, lora: Lora, *, name: str | None = None, provenance: Mapping[str, Any] | None = None
    ) -> int:
        """Store a generation, make it active and return its number.

        Raises `AdapterError` for one that does not fit, `StateError` when the device refuses.
        """
        trail, highest = self._saved()
        generation = highest + 1
        adapter = Adapter(lora, generation, name, provenance or {})
        try:
            with _writing(self._folder):
                write_adapter(self._path(generation), adapter, self._base)
            self._activate(trail, generation)
        except StateError:
            self._remove(generation)
            raise
        return generation

    def use(self, which: int | str) -> None:
        """Make a generation active, by number or name; "none" is the drafter as shipped."""
        generation = self._find(which)
        if generation is not None:
            read_adapter(self._path(generation), self._base)
        trail = self._trail()
        if trail[-1] != generation:
            self._activate(trail, generation)

    def rollback(self) -> int | None:
        """Make active what was before the active one, and return it; None: as shipped."""
        trail = self._trail()
        if trail == [None]:
            raise AdapterError("nothing to roll back: the drafter is as it was shipped")
        before = trail[:-1] or [None]
        self._save_trail(before)
        return before[-1]

    def import_file(self, path: Path, *, name: str | None = None) -> int:
        """Store a copy of an adapter file under a name, by default the file's, make it active and
        return its number. An older one of that name makes room.
        """
        path = path.with_suffix(SUFFIX) if path.suffix == ".json" else path
        name = path.stem if name is None else name
        is_name = name.isprintable() and 0 < len(name) <= _LONGEST_NAME
        if not is_name or name.isdigit() or name == SHIPPED:
            raise AdapterError(f"{name!r:.80} cannot be an adapter's name: choose another")
        adapter = read_adapter(path, self._base)
        return self.add(adapter.lora, name=name, provenance=adapter.provenance)

    def export_file(self, path: Path, which: int | str | None = None) -> Path:
        """Copy an adapter, by default the active one, to `path` and its manifest beside it; return
        the path with its suffix.
        """
        generation = self._trail()[-1] if which is None else self._find(which)
        if generation is None:
            raise AdapterError("the drafter as it was shipped has no adapter to export: name one")
        adapter = read_adapter(self._path(generation), self._base)
        if path.suffix != SUFFIX:
            path = path.with_name(path.name + SUFFIX)
        for taken in (path, manifest_path(path)):
            if taken.exists():
                raise AdapterError(f"{taken}: is there already; remove it or choose another name")
        with _writing(path.parent):
            write_adapter(path, adapter, self._base)
        return path

    def records(self) -> list[AdapterRecord]:
        """Return what is stored, oldest first."""
        active = self._trail()[-1]
        records = []
        for generation in self._generations():
            with suppress(FileNotFoundError):  # another process may be removing it
                records.append(self._record(generation, is_active=generation == active))
        return records

    def _activate(self, trail: list[int | None], generation: int | None) -> None:
        trail = [*trail, generation][-_KEPT:]
        self._save_trail(trail)
        named = {x.name: x.generation for x in self.records() if x.name is not None}
        kept = {str(x) for x in (*trail, *named.values())}
        kept |= {Path(x).stem for x in (_TRAIL, _STUDENT)}
        with suppress(OSError):  # what cannot be removed is in nobody's way
            # Manifests first: an adapter without one counts as not there.
            for path in sorted(self._folder.iterdir(), key=lambda x: x.suffix == SUFFIX):
                if path.stem not in kept:
                    path.unlink()

    def _find(self, which: int | str) -> int | None:
        if which == SHIPPED:
            return None
        records = self.records()
        for record in reversed(records):
            if str(which) in (str(record.generation), record.name):
                return record.generation
        names = [SHIPPED, *(x.name or str(x.generation) for x in records)]
        raise AdapterError(f"no adapter {which!r:.80} here; there are {', '.join(names)}")

    def _record(self, generation: int, *, is_active: bool) -> AdapterRecord:
        path = self._path(generation)
        status = manifest_path(path).stat()
        written = datetime.fromtimestamp(status.st_mtime, UTC)
        try:
            adapter = read_adapter(path, self._base)
        except AdapterError as error:
            return AdapterRecord(
                generation, None, is_active, 0, 0, status.st_size, written, str(error)
            )
        return AdapterRecord(
            generation,
            adapter.name,
            is_active,
            adapter.lora.rank,
            len(adapter.lora.modules),
            path.stat().st_size + status.st_size,
            written,
        )

    def _saved(self) -> tuple[list[int | None], int]:
        """Return the trail, and the highest number that a generation ever had."""
        saved, generations = load_json(self._folder / _TRAIL), self._generations()
        if not isinstance(saved, dict):  # lost, or of an older version
            # The newest generation that can be used is the best guess.
            saved = {"trail": [None, *generations], "highest": 0}
        return saved["trail"], max([saved["highest"], *generations])

    def _trail(self) -> list[int | None]:
        return self._saved()[0]

    def _save_trail(self, trail: list[int | None]) -> None:
        _, highest = self._saved()
        save_json(self._folder / _TRAIL, {"trail": trail, "highest": highest})

    def _remove(self, generation: int) -> None:
        """Remove a generation, its manifest first: an adapter without one counts as not there."""
        path = self._path(generation)
        with suppress(OSError):
            manifest_path(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def _generations(self) -> list[int]:
        return sorted(int(x.stem) for x in self._folder.glob("*.json") if x.stem.isdecimal())

    def _path(self, generation: int) -> Path:
        return self._folder / f"{generation}{SUFFIX}"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{folder}: cannot be written ({error}); choose a folder that can"
        ) from error
