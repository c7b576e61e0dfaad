"""`edgedraft adapter`: what a drafter has learned for a target, and which of it is used."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .adapter_store import SHIPPED, AdapterRecord, AdapterStore, open_adapter_store
from .cli_options import add_action, device_state, target_folder
from .folder import open_model_folder, open_target_folder
from .tokenizer_file import TokenIds, load_tokenizer

_ROW = "{:1} {:>10}  {:20} {:>5} {:>8} {:>9}  {}"


def add_adapter_command(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the subparsers of `edgedraft` and return its parser; `args.lines(args)`
    carries it out and yields what is to be printed.
    """
    adapter: argparse.ArgumentParser = commands.add_parser(
        "adapter", help="list, choose and copy what a drafter has learned for a target"
    )
    actions = adapter.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, lines: Callable[..., Iterator[str]], about: str) -> argparse.ArgumentParser:
        parser = add_action(actions, name, lines, about)
        parser.add_argument("--drafter", required=True, metavar="DIR", help="drafter folder")
        return parser

    add("list", _list, "show what there is")
    use = add("use", _use, "choose another one")
    use.add_argument(
        "which", metavar="WHICH", help=f'generation or name; "{SHIPPED}": the drafter as shipped'
    )
    add("rollback", _rollback, "go back to the one used before")
    export = add("export", _export, "copy one to a file, with its manifest beside it")
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument(
        "--adapter", metavar="WHICH", help="generation or name (default: the active one)"
    )
    imported = add("import", _import, "copy one from a file and use it")
    imported.add_argument("file", type=Path, metavar="FILE")
    imported.add_argument("--name", help="what to call it (default: as the file)")
    return adapter


def _list(args: argparse.Namespace) -> Iterator[str]:
    records = _store(args).records()
    yield _ROW.format("", "generation", "name", "rank", "modules", "size", "written")
    shipped = not any(record.is_active for record in records)
    yield _ROW.format("*" if shipped else "", "", SHIPPED, "", "", "", "as shipped")
    yield from map(_row, records)


def _use(args: argparse.Namespace) -> Iterator[str]:
    store = _store(args)
    store.use(args.which)
    yield _active(store)


def _rollback(args: argparse.Namespace) -> Iterator[str]:
    store = _store(args)
    store.rollback()
    yield _active(store)


def _export(args: argparse.Namespace) -> Iterator[str]:
    yield f"written to {_store(args).export_file(args.file, args.adapter)}"


def _import(args: argparse.Namespace) -> Iterator[str]:
    store = _store(args)
    store.import_file(args.file, name=args.name)
    yield _active(store)


def _store(args: argparse.Namespace) -> AdapterStore:
    target = open_target_folder(target_folder(args))
    ids = TokenIds(load_tokenizer(target.tokenizer))
    kept = device_state(args, target).folder
    return open_adapter_store(kept, open_model_folder(args.drafter), ids)


def _active(store: AdapterStore) -> str:
    adapter = store.active()
    if adapter is None:
        return "in use: the drafter as it was shipped"
    name = f" ({adapter.name})" if adapter.name else ""
    return f"in use: generation {adapter.generation}{name}"


def _row(record: AdapterRecord) -> str:
    written = f"{record.written.astimezone():%Y-%m-%d %H:%M}"
    return _ROW.format(
        "*" if record.is_active else "",
        record.generation,
        record.name or "",
        record.rank or "",
        record.num_modules or "",
        f"{record.num_bytes / 1e6:.1f} MB",
        f"{written}  unusable: {record.problem}" if record.problem else written,
    )
