"""Compare speculative with plain decoding, token by token and logit by logit, on a real model.

    python benchmarks/losslessness.py --target DIR --data ../shared/data --json FILE \
        [--prompts-per-set 60] [--max-tokens 128] [--sampled] [--threads N] [--drafter NAME ...] \
        [--learn]

With `--learn` the drafter learns after every answer, and is another one as soon as it is better.
Every emitted token and every logits row that a token came from are compared with `==`. Results
are written after every prompt; a second call goes on where the first was stopped. This times
nothing, so other work on the machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgedraft.runtime import DecodeConfig, Engine, SamplingConfig, SessionConfig
from edgedraft.runtime.drafting import DEFAULT
from edgedraft.runtime.prompt_files import load_prompts
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic
from held_out_prompts import spread

_SETS = ("gsm8k_test", "humaneval", "spec_bench_question", "scitldr_a_test")


def decode(engine: Engine, ids: list[int], config: DecodeConfig) -> tuple[list[int], Any, int]:
    """Return the tokens, their logits rows (tokens, vocab) and the number of target passes."""
    engine.forget()
    tokens: list[int] = []
    rows = []
    for piece in engine.stream(ids, config):
        if piece.trace:
            tokens += piece.trace.emitted
            rows.append(piece.trace.logits.copy())  # the array is reused by the next round
    return tokens, np.concatenate(rows), len(rows)


def compare(engine: Engine, content: Any, config: DecodeConfig) -> dict[str, Any]:
    """Decode one prompt plainly and speculatively."""
    ids = engine.encode(content)
    plain, plain_rows, _ = decode(engine, ids, replace(config, max_draft_tokens=0))
    tokens, rows, passes = decode(engine, ids, config)
    count = min(len(plain), len(tokens))
    return {
        "tokens": len(plain),
        "passes": passes,
        "identical_tokens": tokens == plain,
        "rows": count,
        "identical_rows": int((rows[:count] == plain_rows[:count]).all(axis=1).sum()),
    }


def main() -> int:
    """Run the comparison; exit status 1 when anything differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--prompts-per-set", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--sampled", action="store_true", help="coupled, temperature 0.8, top-p 0.95"
    )
    parser.add_argument("--drafter", nargs="+", default=list(DEFAULT), metavar="NAME")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--learn", action="store_true", help="let the drafter learn meanwhile")
    args = parser.parse_args()
    sampling = (
        SamplingConfig(temperature=0.8, top_p=0.95, seed=7) if args.sampled else SamplingConfig()
    )
    config = DecodeConfig(max_tokens=args.max_tokens, sampling=sampling)
    with TemporaryDirectory() as state:
        engine = Engine.open(
            args.target,
            drafters=args.drafter,
            session=SessionConfig(threads=args.threads),
            state_dir=Path(state) if args.learn else None,
            keep=args.learn,
            learn="always" if args.learn else "off",
        )
        try:
            return _compare_all(engine, config, args)
        finally:
            engine.close()


def _compare_all(engine: Engine, config: DecodeConfig, args: argparse.Namespace) -> int:
    results: dict[str, Any] = {"prompts": {}}
    if args.json.is_file():
        results = json.loads(args.json.read_text(encoding="utf-8"))
    model = _model(engine)
    for name in _SETS:
        for prompt in spread(
            load_prompts([str(args.data / f"{name}.jsonl")]), args.prompts_per_set
        ):
            if prompt.id in results["prompts"]:
                continue
            outcome = compare(engine, prompt.content, config)
            results["prompts"][prompt.id] = {"set": name, **outcome}
            done = results["prompts"].values()
            results["summary"] = {
                "prompts": len(done),
                "identical_outputs": sum(p["identical_tokens"] for p in done),
                "rows": sum(p["rows"] for p in done),
                "identical_rows": sum(p["identical_rows"] for p in done),
                "tokens_per_pass": sum(p["tokens"] for p in done) / sum(p["passes"] for p in done),
            }
            results["drafters"] = [Path(name).name for name in args.drafter]
            if engine.learning:
                used = results.get("learned_drafters_used", 0)
                results["learned_drafters_used"] = used + (_model(engine) is not model)
                model = _model(engine)
            results["provenance"] = describe_run(
                engine.target.folder, engine.target.config, config.sampling.seed
            )
            write_atomic(args.json, json.dumps(results, indent=1).encode())
            print(prompt.id, results["summary"], file=sys.stderr, flush=True)
    summary = results["summary"]
    same = (
        summary["identical_outputs"] == summary["prompts"]
        and summary["identical_rows"] == summary["rows"]
    )
    return 0 if same else 1


def _model(engine: Engine) -> Any:
    """Return what drafts beside the n-grams at present, if anything does."""
    drafter = getattr(engine.proposer, "drafter", None)
    return drafter.model if drafter else None


if __name__ == "__main__":
    sys.exit(main())
