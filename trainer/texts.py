"""Named files as texts to learn from; held-out rows and test files stay out.

.jsonl of a known data set   the fields of a row joined as `data_sets.py` says
.jsonl of answers            "response" of each row, held out by its "set" and "row"
.jsonl of anything else      "text" of each row
a folder                     every .txt, .md, .rst and .py file in it, in the order of names
any other file               the whole file
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .data_sets import BY_FILE, TEST_FILES, is_held_out
from .errors import TrainError

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of these files and folders in order."""
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.suffix in _TEXT_SUFFIXES:
                    yield _whole(file)
        elif path.suffix == ".jsonl":
            yield from _rows(path)
        else:
            yield _whole(path)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file; raise `TrainError` for anything else."""
    try:
        with path.open(encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise TrainError(f"{path}:{number}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise TrainError(f"{path}:{number}: expected an object, got {line:.40}")
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"{path}: cannot be read ({error}); check the name") from error


def _rows(path: Path) -> Iterator[str]:
    if path.stem in TEST_FILES:
        raise TrainError(f"{path}: holds test rows, which are never trained on; leave it out")
    if data_set := BY_FILE.get(path.stem):
        for number, row in data_set.rows(read_jsonl(path)):
            if not is_held_out(data_set.name, number):
                yield data_set.text(row)
        return
    for number, row in enumerate(read_jsonl(path)):
        text = row.get("response", row.get("text"))
        if not isinstance(text, str):
            raise TrainError(f"{path}:{number + 1}: has neither a 'response' nor a 'text'")
        if not is_held_out(row.get("set", path.stem), row.get("row", number)):
            yield text


def _whole(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"{path}: cannot be read as UTF-8 text ({error})") from error
