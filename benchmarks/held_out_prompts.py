"""Write the prompts that drafters are measured on: rows that no drafter was trained on.

    python benchmarks/held_out_prompts.py --data ../shared/data --out FILE.jsonl [--per-group 100] \
        [--without SET ...]

Four groups, each half from one set and half from another where two of it are wanted, spread evenly
over the set: maths (GSM8K test), code (HumanEval, MBPP test), chat (MT-bench, Self-Instruct's
user-oriented instructions), summaries (SciTLDR test).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TypeVar

from edgedraft.runtime.prompt_files import BenchPrompt, load_prompts
from edgedraft.runtime.state import write_atomic

_GROUPS = {
    "maths": ("gsm8k_test",),
    "code": ("humaneval", "mbpp"),
    "chat": ("mt_bench_question", "self_instruct_user_oriented"),
    "summaries": ("scitldr_a_test",),
}
_MBPP_TEST = range(11, 511)  # task ids, by the data set's own README
_T = TypeVar("_T")


def spread(items: list[_T], count: int) -> list[_T]:
    """Take `count` items evenly, so that a file sorted by category is covered."""
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]


def is_held_out(prompt: BenchPrompt) -> bool:
    """Whether a row belongs to a test split."""
    name, row = prompt.id.split(":", 1)
    return name != "mbpp" or int(row) in _MBPP_TEST


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--per-group", type=int, default=100, metavar="N")
    sets = [name for names in _GROUPS.values() for name in names]
    parser.add_argument("--without", nargs="+", choices=sets, default=[], help="leave sets out")
    args = parser.parse_args()
    lines = []
    for group, all_names in _GROUPS.items():
        names = [name for name in all_names if name not in args.without]
        for name in names:
            prompts = [
                p for p in load_prompts([str(args.data / f"{name}.jsonl")]) if is_held_out(p)
            ]
            for prompt in spread(prompts, args.per_group // len(names)):
                row = {"id": prompt.id, "category": group, "turns": [prompt.content]}
                lines.append(json.dumps(row) + "\n")
    write_atomic(args.out, "".join(lines).encode())
    print(f"{args.out}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
