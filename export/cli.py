"""The command line `edgedraft-export`: target, drafter, adapter, peft, check."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgedraft.runtime.exit_status import exit_status
from edgedraft.runtime.extras import need
from edgedraft.runtime.progress_log import progress_on_stderr

from .packaged_models import PACKAGED_MODELS

if TYPE_CHECKING:
    from .model import ExportOptions

_EXTRA = "edgedraft[export]"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `edgedraft-export`."""
    parser = argparse.ArgumentParser(
        prog="edgedraft-export", description="Turn PyTorch models into folders the device runs."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    target = commands.add_parser("target", help="export a target model")
    target.add_argument(
        "source",
        help=f"{', '.join(PACKAGED_MODELS)}, a GGUF file, a Hugging Face folder or a hub id "
        "(owner/name)",
    )
    _add_export_options(target)
    target.add_argument("--via", choices=("direct", "optimum"), default="direct")
    target.add_argument(
        "--hidden-state", action="store_true", help="also output the hidden state of every row"
    )
    target.add_argument(
        "--tree", action="store_true", help="add the input that lets the target verify token trees"
    )
    target.set_defaults(run=_target)

    drafter = commands.add_parser("drafter", help="export a drafter, as edgedraft-train makes one")
    drafter.add_argument("source", help="a Hugging Face folder or a hub id (owner/name)")
    _add_export_options(drafter)
    drafter.set_defaults(run=_drafter)

    adapter = commands.add_parser(
        "adapter", help="turn a LoRA that PEFT saved into an adapter file"
    )
    adapter.add_argument("checkpoint", type=Path, metavar="PEFT_DIR")
    _add_pair_options(adapter)
    adapter.add_argument("--out", type=Path, required=True, metavar="NAME.onnx_adapter")
    adapter.set_defaults(run=_adapter)

    peft = commands.add_parser("peft", help="turn an adapter file into a folder that PEFT opens")
    peft.add_argument("adapter", type=Path, metavar="NAME.onnx_adapter")
    _add_pair_options(peft)
    peft.add_argument("--out", type=Path, required=True, metavar="PEFT_DIR")
    peft.set_defaults(run=_peft)

    check = commands.add_parser("check", help="verify a folder's checksums and time its passes")
    check.add_argument("folder", type=Path, metavar="DIR")
    check.add_argument("--verbose", action="store_true", help="show what went wrong in detail")
    check.set_defaults(run=_check)
    return parser


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--precision", choices=("int8", "int8-block", "int4-block", "fp32"), default="int8"
    )
    parser.add_argument(
        "--max-context", type=int, metavar="N", help="shorten the context to N tokens"
    )
    parser.add_argument(
        "--eval-text", type=Path, nargs="+", metavar="FILE",
        help=".txt or .jsonl to measure accuracy on, in place of the exporter's own text",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace a former export")
    parser.add_argument("--verbose", action="store_true", help="show what went wrong in detail")


def _add_pair_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter", type=Path, required=True, metavar="DIR", help="exported folder of the drafter"
    )
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="target that it learned for"
    )
    parser.add_argument("--verbose", action="store_true", help="show what went wrong in detail")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, or 2 for an error the user can mend."""
    options = build_parser().parse_args(argv)
    with progress_on_stderr(logging.DEBUG if options.verbose else logging.INFO):
        return exit_status("edgedraft-export", lambda: options.run(options), ValueError)


def _target(options: argparse.Namespace) -> None:
    _need_torch()
    from .model import ExportOptions

    chosen = ExportOptions(
        precision=options.precision,
        via=options.via,
        hidden_state=options.hidden_state,
        tree=options.tree,
        max_context=options.max_context,
        force=options.force,
    )
    if chosen.via == "optimum":
        from .optimum_source import need_optimum

        need_optimum()  # before the model is loaded, which takes a while
    _export(options, chosen)


def _drafter(options: argparse.Namespace) -> None:
    _need_torch()
    from .model import ExportOptions

    chosen = ExportOptions(
        is_drafter=True,
        precision=options.precision,
        hidden_state=True,  # what an acceptance head reads
        max_context=options.max_context,
        force=options.force,
    )
    _export(options, chosen)


def _export(options: argparse.Namespace, chosen: ExportOptions) -> None:
    from .model import export_model
    from .parity import quality_table
    from .sources import load_source
    from .texts import read_texts, tokenize

    texts = [text for path in options.eval_text or () for text in read_texts(path)]
    source = load_source(options.source)
    quality = export_model(source, options.out, chosen, tokenize(source, tuple(texts)))
    print(f"{options.out}: {source.name}, {options.precision}\n{quality_table(quality)}")


def _adapter(options: argparse.Namespace) -> None:
    need("safetensors", "edgedraft-export", _EXTRA)
    from .adapters import Pair, adapter_from_peft

    pair = Pair.open(options.drafter, options.target)
    print(f"written to {adapter_from_peft(options.checkpoint, pair, options.out)}")


def _peft(options: argparse.Namespace) -> None:
    need("safetensors", "edgedraft-export", _EXTRA)
    from .adapters import Pair, peft_from_adapter

    pair = Pair.open(options.drafter, options.target)
    print(f"written to {peft_from_adapter(options.adapter, pair, options.out)}")


def _need_torch() -> None:
    for module in ("torch", "transformers", "onnxscript"):
        need(module, "edgedraft-export", _EXTRA)


def _check(options: argparse.Namespace) -> None:
    for module in ("torch", "transformers"):
        need(module, "edgedraft-export", _EXTRA)
    from edgedraft.runtime import OnnxModel
    from edgedraft.runtime.folder import check_files, open_model_folder

    from .parity import pass_milliseconds, quality_table

    folder = open_model_folder(options.folder)
    check_files(folder)
    quality = {**folder.quality, "pass_ms": pass_milliseconds(OnnxModel(folder))}
    print(f"{options.folder}: {folder.name}, {folder.precision}\n{quality_table(quality)}")
