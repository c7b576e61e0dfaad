"""What an acceptance head adds to the time of a draft.

    python benchmarks/head_cost.py --target DIR --with DIR --without DIR --prompts FILE ... \
        --json FILE [--limit 40] [--drafts 24]

Two exports of one drafter, with its head and without, draft eight pieces (and what is missing of
the last token) behind the same texts, in turn; whichever is first is second the next time. Nothing
but the budget ends a draft, so a head changes nothing but its time. What a machine adds to it is
never less than nothing: so of the drafts of one text, each of which is made several times, the
fastest counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter

from edgedraft.runtime import Engine
from edgedraft.runtime.config import SamplingConfig
from edgedraft.runtime.errors import PromptError
from edgedraft.runtime.interfaces import Proposer
from edgedraft.runtime.learn_bench import Subject
from edgedraft.runtime.prompt_files import BenchPrompt, load_prompts
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic

_PIECES = 8


def open_drafter(target: str, folder: str) -> tuple[Engine, Proposer]:
    """Open a drafter that weighs no cost, and an engine over its target."""
    subject = Subject(Engine.open(target, drafters=["ngram", folder], keep=False))
    engine = subject.alone(subject.model())
    assert engine.proposer is not None
    return engine, engine.proposer


def encoded(engine: Engine, prompts: Sequence[BenchPrompt]) -> Iterator[list[int]]:
    """Yield the tokens of those prompts that the target has room for."""
    for prompt in prompts:
        with suppress(PromptError):
            yield engine.encode(prompt.content)


def seconds(drafter: Proposer, text: list[int]) -> float:
    """Return what a draft behind this text takes, which the drafter has read before."""
    drafter.propose(text, _PIECES)
    started = perf_counter()
    drafter.propose(text, _PIECES)
    return perf_counter() - started


def main() -> None:
    """Run the comparison, write the document and print what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--with", required=True, metavar="DIR", dest="with_head")
    parser.add_argument("--without", required=True, metavar="DIR")
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=40, metavar="N", help="of prompts")
    parser.add_argument("--drafts", type=int, default=24, metavar="N", help="behind each prompt")
    args = parser.parse_args()
    names = "with", "without"
    folders = args.with_head, args.without
    engines, drafters = zip(*(open_drafter(args.target, x) for x in folders), strict=True)
    texts = list(encoded(engines[0], load_prompts(args.prompts)[: args.limit]))
    fastest: dict[str, list[float]] = {name: [] for name in names}
    for text in texts:
        found: list[list[float]] = [[], []]
        for drafter in drafters:
            drafter.begin(SamplingConfig())
        for turn in range(args.drafts):
            for i in (0, 1) if turn % 2 else (1, 0):
                found[i].append(seconds(drafters[i], text))
        for name, times in zip(names, found, strict=True):
            fastest[name].append(min(times))
    ratios = [a / b for a, b in zip(*fastest.values(), strict=True)]
    document = {
        "fastest_draft_s": fastest,
        "with_over_without": {"median": median(ratios), "each": ratios},
        "settings": {"pieces": _PIECES, "texts": len(texts), "drafts": args.drafts},
        "provenance": describe_run(engines[0].target.folder, engines[0].target.config, 0),
    }
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    low, high = sorted(ratios)[len(ratios) // 10], sorted(ratios)[-1 - len(ratios) // 10]
    print(
        f"a draft with the head over one without: {median(ratios):.3f} "
        f"(a tenth each under {low:.3f} and over {high:.3f}), "
        f"{1e3 * median(fastest['without']):.2f} ms without"
    )


if __name__ == "__main__":
    main()
