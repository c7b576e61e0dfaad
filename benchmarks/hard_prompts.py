"""Write prompts whose answers nobody can guess: drafting them should cost nothing.

    python benchmarks/hard_prompts.py --out FILE.jsonl

Random words, scripts that drafters rarely see, and base64: forty prompts, the same every time.
"""

from __future__ import annotations

import argparse
import base64
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgedraft.runtime.state import write_atomic

_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu".split()
_LETTERS = ("Ll", "Lo", "Lu")
_SCRIPTS = {  # first and last letter
    "Armenian": (0x561, 0x586),
    "Georgian": (0x10D0, 0x10F0),
    "Devanagari": (0x905, 0x939),
    "Tamil": (0xB85, 0xBB9),
    "Thai": (0xE01, 0xE2E),
    "Ethiopic": (0x1200, 0x1248),
    "Cherokee": (0x13A0, 0x13F4),
    "Hangul": (0xAC00, 0xD7A3),
    "Han": (0x4E00, 0x9FA5),
    "Hebrew": (0x5D0, 0x5EA),
}


def random_words(rng: np.random.Generator, number: int) -> str:
    words = ["".join(rng.choice(_SYLLABLES, rng.integers(2, 5))) for _ in range(25)]
    return "Repeat these words in another order, then add more of the kind: " + " ".join(words)


def foreign_script(rng: np.random.Generator, number: int) -> str:
    name = list(_SCRIPTS)[number % len(_SCRIPTS)]
    first, last = _SCRIPTS[name]
    letters = [x for x in map(chr, range(first, last + 1)) if unicodedata.category(x) in _LETTERS]
    words = ["".join(rng.choice(letters, rng.integers(2, 7))) for _ in range(12)]
    return f"Continue this text in {name} letters: " + " ".join(words)


def base64_text(rng: np.random.Generator, number: int) -> str:
    return "Continue this base64 data:\n" + base64.b64encode(rng.bytes(120)).decode()


_KINDS: dict[str, tuple[Callable[[np.random.Generator, int], str], int]] = {
    "random words": (random_words, 13),
    "foreign scripts": (foreign_script, 14),
    "base64": (base64_text, 13),
}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lines = []
    for kind, (make, count) in _KINDS.items():
        for number in range(count):
            row = {"id": f"{kind}:{number}", "category": kind, "turns": [make(rng, number)]}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(args.out, "".join(lines).encode())
    print(f"{args.out}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
