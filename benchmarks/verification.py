"""Which way of verifying sampled answers brings more, by temperature.

    python benchmarks/verification.py --target DIR --drafter NAME ... --prompts FILE --json FILE \
        [--limit 6] [--max-tokens 96] [--temperatures 0.3 0.6 1.0] [--top-p 1.0]

Every prompt is answered plainly, with `coupled` verification (the text of plain decoding with the
same seed) and with `lattice` verification (another text of the same distribution), taking turns.
Printed are tokens per target pass, and seconds per token over those of the plain loop (paired by
prompt, medians): a drawn draft is accepted more often than a likely one when the temperature is
high, and costs more to draw and to verify.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from edgedraft.runtime import DecodeConfig, Engine, SamplingConfig
from edgedraft.runtime.prompt_files import load_prompts
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic
from edgedraft.runtime.stats import RunStats

_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)


def main() -> None:
    """Run the comparison, write the document and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--drafter", required=True, nargs="+", metavar="NAME")
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=6, metavar="N", help="of every class")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--temperatures", type=float, nargs="+", default=_TEMPERATURES)
    parser.add_argument("--top-p", type=float, default=1.0)
    args = parser.parse_args()
    engine = Engine.open(args.target, drafters=args.drafter, keep=False)
    prompts = load_prompts(args.prompts, args.limit)
    rows: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        sampling = SamplingConfig(temperature=temperature, top_p=args.top_p)
        coupled = DecodeConfig(max_tokens=args.max_tokens, sampling=sampling)
        lattice = replace(coupled, sampling=replace(sampling, verification="lattice"))
        ways = {"plain": replace(coupled, max_draft_tokens=0), "coupled": coupled}
        ways["lattice"] = lattice
        runs: defaultdict[str, list[RunStats]] = defaultdict(list)
        for number, prompt in enumerate(prompts):
            ids = engine.encode(prompt.content)
            names = list(ways)[number % 3 :] + list(ways)[: number % 3]
            for name in names:
                engine.forget()
                config = ways[name]
                seeded = replace(config, sampling=replace(config.sampling, seed=number))
                runs[name].append(engine.generate(ids, seeded).stats)
        row: dict[str, Any] = {"temperature": temperature}
        for name in ("coupled", "lattice"):
            total = sum(runs[name], RunStats())
            pairs = zip(runs[name], runs["plain"], strict=True)
            speedups = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
            row[name] = {
                "tokens_per_pass": total.tokens_per_pass,
                "acceptance_rate": total.acceptance_rate,
                "speedup_median": median(speedups),
                "overhead_ms_per_round": 1e3 * total.overhead_s_per_round,
            }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    document = {
        "temperatures": rows,
        "prompts": len(prompts),
        "provenance": describe_run(engine.target.folder, engine.target.config, 0),
    }
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    print(
        "temperature   tokens per pass: coupled  lattice   over the two-row loop: coupled  lattice"
    )
    for row in rows:
        ways_of = (row["coupled"], row["lattice"])
        passes = "".join(f"{way['tokens_per_pass']:9.2f}" for way in ways_of)
        speed = "".join(f"{way['speedup_median']:9.2f}" for way in ways_of)
        print(f"{row['temperature']:11.1f}{'':16}{passes}{'':23}{speed}")


if __name__ == "__main__":
    main()
