"""Do drawn drafts leave the distribution of a real model's first tokens alone?

    python benchmarks/first_token_law.py --target DIR --drafter DIR --prompts FILE --json FILE \
        [--limit 20] [--draws 400]

For every prompt the first token is drawn many times at temperature 1 through the whole loop with
`verification="lattice"`, and the counts are compared with the target's own probabilities by a
chi-square test (its p-value by simulation) over the tokens expected at least five times, the rest
taken together. Exact laws are a matter of enumeration (tests/runtime/test_drawing.py); this shows
that nothing between a real drafter and a real target bends them. Exits with 1 when the smallest
p-value, corrected for the number of prompts (Bonferroni), is under 0.01.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgedraft.runtime import DecodeConfig, Engine, SamplingConfig
from edgedraft.runtime.composite import CompositeProposer
from edgedraft.runtime.prompt_files import load_prompts
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.sampling import Sampler
from edgedraft.runtime.state import write_atomic

_LEAST_EXPECTED = 5
_SIGNIFICANT = 0.01
_SIMULATIONS = 20_000
FloatArray: TypeAlias = npt.NDArray[np.float64]


def bins(counts: Counter[int], p: FloatArray, draws: int) -> tuple[FloatArray, FloatArray]:
    """Return observed and expected counts of the frequent tokens, and of the rest together."""
    frequent = np.flatnonzero(p * draws >= _LEAST_EXPECTED)
    observed = np.array([counts[int(token)] for token in frequent], float)
    expected = p[frequent] * draws
    return np.append(observed, draws - observed.sum()), np.append(expected, draws - expected.sum())


def p_value(observed: FloatArray, expected: FloatArray) -> float:
    """Return how often chance alone gives a chi-square statistic as large, by simulation."""
    expected = np.maximum(expected, 1e-9)

    def statistic(counts: npt.NDArray[Any]) -> FloatArray:
        result: FloatArray = ((counts - expected) ** 2 / expected).sum(axis=-1)
        return result

    rng = np.random.default_rng(0)
    draws = int(round(observed.sum()))
    chance = rng.multinomial(draws, expected / expected.sum(), size=_SIMULATIONS)
    larger = np.count_nonzero(statistic(chance) >= statistic(observed))
    return float((larger + 1) / (_SIMULATIONS + 1))


def main() -> int:
    """Run the test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--drafter", required=True, metavar="DIR")
    parser.add_argument("--prompts", required=True, metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=20, metavar="N")
    parser.add_argument("--draws", type=int, default=400, metavar="N")
    args = parser.parse_args()
    engine = Engine.open(args.target, drafters=[args.drafter], keep=False)
    assert isinstance(engine.proposer, CompositeProposer)
    # Without whoever would leave a drafter alone that is only ever asked once per request.
    engine = Engine(engine.target, engine.tokenizer, engine.proposer.drafter, engine.plan)
    rows: list[dict[str, Any]] = []
    prompts = load_prompts([args.prompts])
    for prompt in prompts[:: max(1, len(prompts) // args.limit)][: args.limit]:
        ids = engine.encode(prompt.content)
        one = SamplingConfig(temperature=1.0)
        (trace,) = engine.decoder.rounds(ids, DecodeConfig(1, max_draft_tokens=0, sampling=one))
        p = Sampler(one, ids, engine.target.vocab_size).probabilities(trace.logits[0])
        counts: Counter[int] = Counter()
        accepted = 0
        for seed in range(args.draws):
            sampling = SamplingConfig(temperature=1.0, seed=seed, verification="lattice")
            config = DecodeConfig(max_tokens=8, sampling=sampling)
            first = next(engine.decoder.rounds(ids, config))
            counts[first.emitted[0]] += 1
            accepted += first.verdict.num_accepted
        observed, expected = bins(counts, p, args.draws)
        row = {"prompt": prompt.id, "p": p_value(observed, expected), "bins": len(observed)}
        rows.append(row | {"accepted_per_round": accepted / args.draws})
        print(rows[-1], file=sys.stderr, flush=True)
    smallest = min(row["p"] for row in rows) * len(rows)
    document = {
        "prompts": rows,
        "draws": args.draws,
        "smallest_p_corrected": min(1.0, smallest),
        "provenance": describe_run(engine.target.folder, engine.target.config, 0),
    }
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    return int(smallest < _SIGNIFICANT)


if __name__ == "__main__":
    sys.exit(main())
