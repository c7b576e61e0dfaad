"""What learning brings, and what an acceptance head that ends drafts: OmniDraft's table 2.

    python benchmarks/adaptive_drafting.py --target DIR --drafter DIR --learn FILE --prompts FILE \
        --json FILE [--requests 300] [--limit 30] [--max-tokens 128]

Answers with the target's likeliest tokens (`edgedraft-train corpus --top-k-logits`) are replayed to
a learner as requests, once for every way in which the head can learn. Held-out prompts are then
answered with the drafter alone, taking turns, each way verified as ever:

    fixed         as shipped, four drafted pieces a round
    adapt only    as shipped, as many as pay by the head's probabilities
    distil only   what was learned, four pieces a round
    joint         what was learned, as many as pay; the head learns from what the drafter does
    interleaved   the head learns from a larger buffer
    gamma = X     interleaved, with the rule of the paper in place of costs

Printed are the share of submitted tokens that was accepted, tokens per target pass, and the
speed-up over the faster plain loop (median over prompts). Where nothing that was learned is in use
in the end, a row is the drafter as shipped, and the document says so.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

from learning_losses import Trial

from edgedraft.runtime import DecodeConfig, Engine, SessionConfig
from edgedraft.runtime.bench import SPECULATIVE, VERSUS, PromptResult, run_bench
from edgedraft.runtime.learn_bench import DRAFT_TOKENS, Subject
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.merged_drafter import open_drafter
from edgedraft.runtime.onnx_model import OnnxModel
from edgedraft.runtime.policy import ConstantPolicy, DraftPolicy, GammaPolicy
from edgedraft.runtime.prompt_files import load_prompts
from edgedraft.runtime.provenance import describe_run, load_average
from edgedraft.runtime.state import write_atomic
from edgedraft.runtime.stats import RunStats
from edgedraft.trainer.learner_config import Acceptance, LearnerConfig

FIXED = "fixed"
GAMMAS = (0.3, 0.5, 0.7)
HEADS: dict[str, Acceptance | None] = {
    "distil only": None,
    "joint": "joint",
    "interleaved": "interleaved",
}


def main() -> None:
    """Learn, answer, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--learn", type=Path, required=True, metavar="FILE", help="as trainer/answers.py reads"
    )
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, default=300, metavar="N")
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="of every class")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    args = parser.parse_args()
    trial = Trial(args.target, args.drafter, args.learn, args.requests)
    learned = {name: _learned(trial, kind) for name, kind in HEADS.items()}
    session = SessionConfig(threads=1)
    engine = Engine.open(args.target, drafters=[args.drafter], session=session, keep=False)
    engines = _engines(engine, learned)
    config = DecodeConfig(max_tokens=args.max_tokens)
    prompts = load_prompts(args.prompts, args.limit)
    results: list[PromptResult] = []
    for result in run_bench(engines.pop(FIXED), prompts, config, others=engines):
        if isinstance(result, PromptResult):
            results.append(result)
    kinds = {FIXED: SPECULATIVE, **{name: f"{VERSUS}{name}" for name in engines}}
    rows = {name: _row(results, kind) for name, kind in kinds.items()}
    print("| | acceptance | tokens per pass | speed-up |\n|---|---|---|---|")
    for name, row in rows.items():
        cells = row["acceptance_rate"], row["tokens_per_pass"], row["speedup_median"]
        print(f"| {name} | {cells[0]:.3f} | {cells[1]:.3f} | {cells[2]:.2f}x |")
    document = {
        "rows": rows,
        "identical": sum(x.identical for x in results),
        "prompts": len(results),
        "plan": {str(k): x for k, x in sorted((engine.plan.pass_s if engine.plan else {}).items())},
        "settings": {
            "learn": args.learn.name,
            "requests": trial.requests,
            "prompts": [Path(x).name for x in args.prompts],
            "limit": args.limit,
            "max_tokens": args.max_tokens,
            "draft_tokens": DRAFT_TOKENS,
            "learned_is_used": {name: lora is not None for name, lora in learned.items()},
        },
        "provenance": describe_run(engine.target.folder, session, 0)
        | {"load_average_after": load_average()},
    }
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")


def _learned(trial: Trial, kind: Acceptance | None) -> Lora | None:
    _, lora = trial.learn(replace(LearnerConfig(), acceptance=kind))
    return lora


def _engines(engine: Engine, learned: dict[str, Lora | None]) -> dict[str, Engine]:
    subject, costs = Subject(engine), engine.plan.costs if engine.plan else None

    def model(lora: Lora | None) -> OnnxModel:
        return open_drafter(subject.folder, engine.target.config, lora=lora)

    engines = {
        FIXED: subject.alone(model(None), ConstantPolicy(DRAFT_TOKENS)),
        "adapt only": subject.alone(model(None), DraftPolicy(costs)),
    }
    for name, lora in learned.items():
        distil_only = HEADS[name] is None
        policy = ConstantPolicy(DRAFT_TOKENS) if distil_only else DraftPolicy(costs)
        engines[name] = subject.alone(model(lora), policy)
    for gamma in GAMMAS:
        ruled = subject.alone(model(learned["interleaved"]), GammaPolicy(gamma))
        engines[f"gamma = {gamma}"] = ruled
    return engines


def _row(results: list[PromptResult], kind: str) -> dict[str, float]:
    stats = sum((result.stats_of(kind) for result in results), RunStats())
    return {
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_pass": stats.tokens_per_pass,
        "speedup_median": median(x.plain_token_s / x.token_s(kind) for x in results),
    }


if __name__ == "__main__":
    main()
