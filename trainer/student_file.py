"""What a learner needs to go on after a restart as if there had been none.

Devices end programs whenever they like, and a command line answers one question at a time: what
was learned from a few answers has to last until enough of them have come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.errors import StateError
from edgedraft.runtime.lora import Lora, Shape, lora_shapes
from edgedraft.runtime.table_file import Tables, flat, read_tables, write_tables

from .adamw import AdamState
from .evidence import Comparison, Evidence
from .student import Student

_FORMAT = {"format": "edgedraft-student", "format_version": 3}
_SHIPPED = -1  # in the place of a generation
_OPTIMIZERS = "drafter", "acceptance"  # of a student
_ROWS = "means", "squares", "averages"  # of a state

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class Progress:
    """How far learning has come."""

    next_lesson: int = 0  # number of the first that was not learned from
    student: Student | None = None  # None: begins from nothing
    evidence: Evidence = field(default_factory=Evidence)  # about the student
    generation: int | None = None  # in use while it learns; None: the drafter as shipped
    owed: int = 0  # rehearsals


class StudentFile:
    """The file of one drafter and one target; it is the old or the new one after a kill."""

    def __init__(self, path: Path, drafter: str, target: str, shapes: Mapping[str, Shape]) -> None:
        """`drafter` and `target` are fingerprints, `shapes` those of the modules that can learn."""
        self._path = path
        self._facts = _FORMAT | {"drafter": drafter, "target": target}
        self._shapes = shapes

    def write(self, progress: Progress) -> None:
        """Replace what the file holds; raise `StateError` when the device refuses."""
        generation = _SHIPPED if progress.generation is None else progress.generation
        tables: Tables = {
            "numbers": np.array([progress.next_lesson, generation, progress.owed], np.int64),
            "evidence": np.array(progress.evidence.latest, np.int64).ravel(),
        }
        if student := progress.student:
            lora = student.lora
            names = list(self._tensors(lora.modules, lora.rank))
            tables |= {
                "modules": np.frombuffer("\n".join(lora.modules).encode(), np.uint8),
                "scale": np.array([lora.rank, lora.alpha], np.float64),
                "tensors": flat((lora.tensors[name] for name in names), np.float32),
            }
            for part, state in zip(_OPTIMIZERS, _optimizers(student), strict=True):
                tables |= _state_tables(part, state, names)
        write_tables(self._path, self._facts, tables)

    def read(self) -> Progress:
        """Return what the file holds; that of a learner which has not begun where there is none or
        it is damaged.
        """
        if not self._path.exists():
            return Progress()
        try:
            tables = read_tables(self._path, self._facts)
        except StateError as error:
            _log.warning("%s", error)
            return Progress()
        next_lesson, generation, owed = tables["numbers"].tolist()
        rows = tables["evidence"].reshape(-1, len(Comparison._fields)).tolist()
        return Progress(
            next_lesson,
            self._student(tables) if "tensors" in tables else None,
            Evidence(Comparison(*row) for row in rows),
            None if generation == _SHIPPED else generation,
            owed,
        )

    def _student(self, tables: Tables) -> Student:
        modules = tables["modules"].tobytes().decode().split("\n")
        rank, alpha = int(tables["scale"][0]), float(tables["scale"][1])
        shapes = self._tensors(modules, rank)
        lora = Lora(rank, alpha, _cut(tables["tensors"], shapes))
        return Student(lora, *(_read_state(part, tables, shapes) for part in _OPTIMIZERS))

    def _tensors(self, modules: Iterable[str], rank: int) -> dict[str, Shape]:
        return lora_shapes({name: self._shapes[name] for name in modules}, rank)


def _optimizers(student: Student) -> tuple[AdamState, AdamState]:
    return student.optimizer, student.acceptance


def _state_tables(part: str, state: AdamState, names: Sequence[str]) -> Tables:
    """Return what an optimiser remembers, of those tensors that it has moved."""
    tables: Tables = {
        f"{part}_steps": np.array([state.count], np.int64),
        f"{part}_moved": np.array([name in state.means for name in names], np.uint8),
    }
    for row in _ROWS:
        arrays = getattr(state, row)
        tables[f"{part}_{row}"] = flat((arrays[x] for x in names if x in arrays), np.float32)
    return tables


def _read_state(part: str, tables: Tables, shapes: Mapping[str, Shape]) -> AdamState:
    moved = zip(shapes.items(), tables[f"{part}_moved"].tolist(), strict=True)
    own = {name: shape for (name, shape), is_moved in moved if is_moved}
    rows = (_cut(tables[f"{part}_{row}"], own) for row in _ROWS)
    return AdamState(int(tables[f"{part}_steps"][0]), *rows)


def _cut(row: FloatArray, shapes: Mapping[str, Shape]) -> dict[str, FloatArray]:
    """Undo `flat`."""
    if not row.size:
        return {}
    parts = np.split(row, np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1])
    return {
        name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
