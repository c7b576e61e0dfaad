"""`edgedraft state`: what this device keeps of the texts of a target, and how to be rid of it."""

from __future__ import annotations

import argparse
import fnmatch
import tarfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from .cli_options import add_action, device_state, target_folder
from .errors import StateError
from .folder import open_target_folder
from .state import DeviceState, replaced

# What file names say; whatever else there is was learned as well.
_KINDS = {
    "plans.json": "what passes cost on this device",
    "ngrams.bin": "what usually follows what in texts that were seen",
    "spellings-*.bin": "how a drafter spells the target's tokens, and how often",
    "lessons.bin": "texts that a drafter learns from",
    "adapters/*/student.bin": "what a drafter is learning",
    "adapters/*": "what a drafter has learned",
}


def add_state_command(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the subparsers of `edgedraft` and return its parser; `args.lines(args)`
    carries it out and yields what is to be printed.
    """
    state: argparse.ArgumentParser = commands.add_parser(
        "state", help="show, erase and copy what was learned of texts"
    )
    actions = state.add_subparsers(dest="action", required=True, metavar="ACTION")

    add_action(actions, "show", _show, "list what is kept of a target")
    forget = "erase all that was learned of texts; end other programs first"
    add_action(actions, "forget", _forget, forget)
    export = add_action(actions, "export", _export, "copy what is kept of a target to a .tar file")
    export.add_argument("file", type=Path, metavar="FILE.tar")
    return state


def _show(args: argparse.Namespace) -> Iterator[str]:
    state = _state(args)
    files = _files(state)
    yield f"{state.folder}: {len(files)} files"
    for path in files:
        status, inside = path.stat(), path.relative_to(state.folder)
        written = datetime.fromtimestamp(status.st_mtime)
        yield (
            f"{status.st_size / 1e6:9.2f} MB  {written:%Y-%m-%d %H:%M}  {inside.as_posix():46}  "
            f"{_kind(inside)}".rstrip()
        )


def _forget(args: argparse.Namespace) -> Iterator[str]:
    state = _state(args)
    state.forget()
    yield f"{state.folder}: nothing that was learned is left"


def _export(args: argparse.Namespace) -> Iterator[str]:
    state = _state(args)
    if args.file.exists():
        raise StateError(f"{args.file}: is there already; remove it or choose another name")
    files = _files(state)
    try:
        with (
            replaced(args.file, private=True) as temporary,
            tarfile.open(temporary, "w") as archive,
        ):
            for path in files:
                archive.add(path, path.relative_to(state.folder.parent).as_posix())
    except OSError as error:
        raise StateError(f"{args.file}: cannot be written ({error})") from error
    yield f"{len(files)} files written to {args.file}; they tell of texts that were seen here"


def _state(args: argparse.Namespace) -> DeviceState:
    return device_state(args, open_target_folder(target_folder(args)))


def _files(state: DeviceState) -> list[Path]:
    return sorted(path for path in state.folder.rglob("*") if path.is_file())


def _kind(path: Path) -> str:
    name = path.as_posix()
    return next((about for x, about in _KINDS.items() if fnmatch.fnmatch(name, x)), "")
