"""What a drafter adds to the opening of an engine, and to its memory.

    python benchmarks/drafter_start.py --target DIR --drafter DIR --json FILE [--starts 9]

Fresh processes take turns, with the n-grams alone and with the drafter beside them, and answer one
question. The device has its plan and the pair's table from a start that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from edgedraft.runtime import SessionConfig
from edgedraft.runtime.folder import open_target_folder
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic

# Reports seconds, and the peak of the resident memory in bytes.
_START = """
import resource, sys, time
from edgedraft.runtime import DecodeConfig, Engine
started = time.perf_counter()
engine = Engine.open(sys.argv[1], drafters=sys.argv[2:])
print(time.perf_counter() - started)
engine.generate("Why is bread baked in an oven?", DecodeConfig(max_tokens=128))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def start(target: str, drafters: list[str], state: str) -> tuple[float, float]:
    """Return the seconds that opening takes, and the bytes in the end."""
    done = subprocess.run(
        [sys.executable, "-c", _START, target, *drafters],
        env=os.environ | {"EDGEDRAFT_STATE": state},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, size = map(float, done.stdout.split())
    return seconds, size


def main() -> None:
    """Run the comparison, write the document and print what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--drafter", required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--starts", type=int, default=9, metavar="N", help="of each kind")
    args = parser.parse_args()
    ways = {"without": ["ngram"], "with": ["ngram", args.drafter]}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with TemporaryDirectory() as state:
        for name, drafters in [*ways.items(), *list(ways.items()) * args.starts]:
            found[name].append(start(args.target, drafters, state))
    document: dict[str, Any] = {
        name: {
            "opening_s": {"median": median(s for s, _ in rows[1:]), "each": [s for s, _ in rows]},
            "peak_bytes": {"median": median(b for _, b in rows[1:]), "each": [b for _, b in rows]},
        }
        for name, rows in found.items()
    }
    config, folder = SessionConfig(), open_target_folder(args.target)
    document["provenance"] = describe_run(folder, config, 0)
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    without, beside = document["without"], document["with"]
    print(
        f"opening {without['opening_s']['median']:.3f} s, with the drafter "
        f"{beside['opening_s']['median']:.3f} s; peak memory "
        f"{without['peak_bytes']['median'] / 1e6:.0f} MB, with it "
        f"{beside['peak_bytes']['median'] / 1e6:.0f} MB; the first of each made what is kept"
    )


if __name__ == "__main__":
    main()
