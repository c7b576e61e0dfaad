"""Measure how often a copied token is right, by length of the ending and depth of the copy.

    python benchmarks/lookup_prior.py --target DIR --data ../shared/data [--rows 100]

Replays answers that the target gave to training prompts and prints the table that
`runtime/suffix_lookup.py` starts its counts from (`_PRIOR`), and the tokens per pass of each set.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from edgedraft.runtime import SuffixLookup, open_target_folder
from edgedraft.runtime.chat_template import render_chat
from edgedraft.runtime.policy import DraftPolicy, PassCosts
from edgedraft.runtime.suffix_lookup import MATCH_BUCKETS, match_bucket
from edgedraft.runtime.tokenizer_file import load_tokenizer
from edgedraft.trainer.data_sets import DATA_SETS
from edgedraft.trainer.texts import read_jsonl

# Relative cost of a pass by rows, int8 on the development machine (docs/experiments.md).
_COSTS = {2: 1.0, 4: 1.06, 8: 1.22, 16: 1.6}
_BUDGET = 15


def prompts(data: Path) -> dict[str, list[str]]:
    """Return the prompts behind smollm2_responses.jsonl by set; its README gives the recipes."""

    found = {}
    for data_set in DATA_SETS:
        rows = data_set.rows(read_jsonl(data / f"{data_set.file}.jsonl"))
        found[data_set.name] = [data_set.prompt(row) for _, row in rows]
    return found


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100, help="answers per set")
    args = parser.parse_args()
    folder = open_target_folder(args.target)
    tokenizer = load_tokenizer(folder.tokenizer)
    asked = prompts(args.data)
    right: dict[tuple[int, int], int] = defaultdict(int)
    seen: dict[tuple[int, int], int] = defaultdict(int)
    emitted: dict[str, float] = defaultdict(float)
    passes: dict[str, float] = defaultdict(float)
    cost: dict[str, float] = defaultdict(float)
    taken: dict[str, int] = defaultdict(int)
    costs = PassCosts(_COSTS)
    policy = DraftPolicy(costs, overhead_s=0.03)
    for line in (args.data / "smollm2_responses.jsonl").read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        answer = json.loads(line)
        if taken[answer["set"]] == args.rows:
            continue
        taken[answer["set"]] += 1
        question = [{"role": "user", "content": asked[answer["set"]][answer["row"]]}]
        text = render_chat(folder.chat_template or "", question)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        whole = [*prompt, *answer["response_ids"]]

        counting = SuffixLookup()
        for at in range(len(prompt), len(whole)):
            proposal = counting.propose(whole[:at], _BUDGET)
            bucket = match_bucket(counting.match_length)
            for depth, (guess, truth) in enumerate(zip(proposal.tokens, whole[at:], strict=False)):
                seen[bucket, min(depth, 2)] += 1
                right[bucket, min(depth, 2)] += guess == truth
                if guess != truth:
                    break

        lookup, at = SuffixLookup(), len(prompt)
        while at < len(whole):
            proposal = lookup.propose(whole[:at], _BUDGET)
            count = policy.nodes_to_submit(proposal)
            accepted = 0
            while (
                accepted < count
                and at + accepted < len(whole)
                and proposal.tokens[accepted] == whole[at + accepted]
            ):
                accepted += 1
            step = min(accepted + 1, len(whole) - at)
            at += step
            emitted[answer["set"]] += step
            passes[answer["set"]] += 1
            cost[answer["set"]] += costs.seconds(max(2, count + 1)) + 0.03
    for i, bound in enumerate(MATCH_BUCKETS):
        rates = [right[i, d] / seen[i, d] if seen[i, d] else float("nan") for d in range(3)]
        counts = [seen[i, d] for d in range(3)]
        print(
            f"ending >= {bound:2}: "
            + "  ".join(f"{r:.2f} ({n})" for r, n in zip(rates, counts, strict=True))
        )
    for name in emitted:
        per_pass, speedup = emitted[name] / passes[name], emitted[name] / cost[name]
        print(f"{name}: {per_pass:.2f} tokens per pass, about {speedup:.2f}x")


if __name__ == "__main__":
    main()
