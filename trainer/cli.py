"""edgedraft-train: the workstation's commands; this version has none yet."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `edgedraft-train`."""
    return argparse.ArgumentParser(
        prog="edgedraft-train",
        description="Train drafters and adapters. This version of EdgeDraft drafts by copying, "
        "which needs no training: there is nothing to train yet.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Say what can be trained; return 2, since nothing can."""
    parser = build_parser()
    parser.parse_args(argv)
    print(f"edgedraft-train: {parser.description}", file=sys.stderr)
    return 2
