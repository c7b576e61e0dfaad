"""What each way of translating drafts is worth, with the same drafter and the same prompts.

    python benchmarks/translation_modes.py --target DIR --drafter DIR --prompts FILE ... \
        --json FILE [--limit N] [--max-tokens 128]

The drafter drafts alone. Rivals of the product's way (the table of all spellings, and what is
learned while running): the table alone; the paper's cache, which begins empty with every prompt;
only tokens of the same bytes (intersection); the draft's text tokenized again (reencode). All take
turns on every prompt, beside plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edgedraft.runtime import DecodeConfig, Engine, OnnxModel
from edgedraft.runtime.bench import PromptResult, run_bench
from edgedraft.runtime.bench_output import progress_line
from edgedraft.runtime.bench_report import report
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.drafting import pair_roles
from edgedraft.runtime.folder import open_model_folder
from edgedraft.runtime.learning_translator import LearningTranslator
from edgedraft.runtime.policy import DraftPolicy
from edgedraft.runtime.prompt_files import load_prompts
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic
from edgedraft.runtime.tokenizer_file import load_tokenizer
from edgedraft.runtime.translate import Translator
from edgedraft.runtime.translation_modes import IntersectionTranslator, ReencodeTranslator
from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.runtime.vocabulary import Vocabulary


def main() -> None:
    """Run the comparison, write the document and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--drafter", required=True, metavar="DIR")
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, metavar="N", help="first N prompts of every class")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    args = parser.parse_args()

    base = Engine.open(args.target, keep=False)
    folder = open_model_folder(args.drafter)
    draft = Vocabulary(load_tokenizer(folder.tokenizer))
    target = Vocabulary(base.tokenizer)
    pair = VocabMap.build(draft, target, **pair_roles(folder, base.target.folder))
    model = OnnxModel(folder, tokenizer_size=len(draft))
    model.single_rows = True

    def engine(translator: Translator) -> Engine:
        assert base.plan is not None
        policy = DraftPolicy(base.plan.costs)
        proposer = DraftModel(model, pair, translator, policy)
        return Engine(base.target, base.tokenizer, proposer, base.plan, policy)

    ours = engine(LearningTranslator(pair))
    rivals = {
        "table": engine(Translator(pair)),
        "cold cache": engine(LearningTranslator(pair, static=False)),
        "intersection": engine(IntersectionTranslator(pair)),
        "reencode": engine(ReencodeTranslator(pair, draft, target)),
    }
    prompts = load_prompts(args.prompts, args.limit)
    provenance = describe_run(base.target.folder, base.target.config, 0)
    results: list[PromptResult] = []
    config = DecodeConfig(max_tokens=args.max_tokens)
    for number, result in enumerate(run_bench(ours, prompts, config, others=rivals), 1):
        if isinstance(result, PromptResult):
            results.append(result)
        print(progress_line(number, len(prompts), result), file=sys.stderr, flush=True)
    document = report(results, [], {}) | {"provenance": provenance}
    write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")
    for name, row in document["classes"].items():
        ways = {"ours": row["tokens_per_pass"], **_tokens_per_pass(row["versus"])}
        line = ", ".join(f"{way} {tokens:.2f}" for way, tokens in ways.items())
        print(f"{name}: tokens per pass {line}; identical {row['identical_outputs']}")
        for way, rival in row["versus"].items():
            print(f"    our time over that of {way}: {rival['our_seconds_over_theirs']:.3f}")


def _tokens_per_pass(versus: dict[str, dict[str, float]]) -> dict[str, float]:
    return {way: rival["tokens_per_pass"] for way, rival in versus.items()}


if __name__ == "__main__":
    main()
