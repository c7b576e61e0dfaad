"""Measure what the n-gram model is worth, by replaying answers that the target gave.

    python benchmarks/ngram_replay.py --target DIR --answers FILE [FILE ...] [--seed PATH]
    python benchmarks/ngram_replay.py --target DIR --answers FILE [FILE ...] --write-seed PATH \\
        [--max-bytes 1000000]

No model runs: a round proposes, the policy cuts, and the answer itself says what is accepted. What
is reported is measured on the held-out prompts only (`trainer/data_sets.py`). `--write-seed` learns
from the others and writes the seed file that a drafter's folder may carry. The speed-up is tokens
per second over plain decoding by a table of pass costs, so it holds as far as the table.

The last lines are where `runtime/ngram_model.py` starts its counts from (`_PRIOR`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgedraft.runtime import Proposer, SuffixLookup, open_target_folder
from edgedraft.runtime.composite import CompositeProposer
from edgedraft.runtime.datatypes import Proposal, RoundTrace, Timings, Verdict
from edgedraft.runtime.learned_ngrams import LearnedNgrams
from edgedraft.runtime.ngram_model import _CLASSES, _CONTEXTS, _PRIOR, NgramModel
from edgedraft.runtime.policy import DraftPolicy, PassCosts
from edgedraft.runtime.tokenizer_file import TokenIds, load_tokenizer
from edgedraft.trainer.answers import Answer, read_answers
from edgedraft.trainer.target import Target

# Seconds of an int8 pass of SmolLM2 by rows on the development machine (docs/experiments.md).
_COSTS = PassCosts({2: 6.7e-3, 4: 7.3e-3, 8: 9.9e-3})
_OVERHEAD_S = 2e-4
_BUDGET = 8


class LookupFirst(Proposer):
    """Copies what an earlier occurrence of the ending went on with, else asks the n-gram model."""

    def __init__(self, model: LearnedNgrams) -> None:
        self._lookup, self._model = SuffixLookup(), model

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Propose at most `budget` tokens to follow `committed`."""
        copied = self._lookup.propose(committed, budget)
        usual = self._model.propose(committed, budget)  # asked every time, so that it learns
        return copied if copied.tokens else usual

    def forget(self) -> None:
        """Drop every text seen so far."""
        self._lookup.forget()
        self._model.forget()


class CountingModel(NgramModel):
    """Counts, by kind of guess and context, how many were right."""

    def __init__(self) -> None:
        super().__init__()
        self.right: Counter[tuple[int, int]] = Counter()
        self.seen: Counter[tuple[int, int]] = Counter()

    def _score(self, cell: int, right: bool) -> None:
        super()._score(cell, right)
        row = cell // _CLASSES
        key = row % len(_PRIOR), row // len(_PRIOR) % len(_CONTEXTS)
        self.seen[key] += 1
        self.right[key] += right


@dataclass(slots=True)
class Tally:
    """What rounds cost and brought."""

    emitted: int = 0
    passes: int = 0
    seconds: float = 0.0

    @property
    def speedup(self) -> float:
        """Tokens per second over plain decoding."""
        return self.emitted * (_COSTS.seconds(1) + _OVERHEAD_S) / self.seconds


def replay(
    proposer: Proposer | NgramModel, answers: Iterable[Answer], policy: DraftPolicy
) -> tuple[dict[str, Tally], float]:
    """Return the tally of each group of answers, and the seconds that one proposal took."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    spent, calls = 0.0, 0
    for answer in answers:
        text, at = [*answer.prompt_ids, *answer.response_ids], len(answer.prompt_ids)
        proposer.propose(text[:at], 0)  # reading the prompt is not a round
        while at < len(text):
            committed = text[:at]
            began = time.perf_counter()
            proposal = proposer.propose(committed, _BUDGET)
            spent, calls = spent + time.perf_counter() - began, calls + 1
            count = policy.nodes_to_submit(proposal)
            accepted = 0
            for guess, truth in zip(proposal.tokens[:count], text[at:], strict=False):
                if guess != truth:
                    break
                accepted += 1
            end = min(at + accepted + 1, len(text))
            policy.observe(_trace(proposal.head(count), accepted))
            for group in _groups(answer):
                tally = tallies[group]
                tally.emitted += end - at
                tally.passes += 1
                tally.seconds += _COSTS.seconds(max(2, count + 1)) + _OVERHEAD_S
            at = end
    return tallies, spent / max(calls, 1)


def _groups(answer: Answer) -> tuple[str, ...]:
    # What is unfinished was cut off, mostly in a loop.
    return answer.data_set, "finished" if answer.finished else "unfinished", "all"


def _trace(proposal: Proposal, accepted: int) -> RoundTrace:
    """Return what the policy is told of a round."""
    verdict = Verdict(tuple(range(accepted)), next_token=0)
    nothing = np.zeros((0, 0), np.float32)
    pass_s = _COSTS.seconds(len(proposal.tokens) + 1)  # as planned
    return RoundTrace(proposal, verdict, (), nothing, Timings(0.0, pass_s, _OVERHEAD_S), None)


def report(
    name: str, proposer: Proposer, answers: Sequence[Answer], policy: DraftPolicy | None = None
) -> None:
    """Replay, and print one line of tokens per pass and speed-ups."""
    policy = policy or DraftPolicy(_COSTS, _OVERHEAD_S)
    tallies, seconds = replay(proposer, answers, policy)
    shown = [tallies[group] for group in group_names(answers)]
    cells = [f"{tally.emitted / tally.passes:.2f} {tally.speedup:.2f}x" for tally in shown]
    print(f"{name:26}" + "  ".join(cells) + f"  {seconds * 1e6:4.0f} us", flush=True)


def group_names(answers: Iterable[Answer]) -> list[str]:
    """Return the groups there are: data sets in their order, how answers ended, all."""
    names = dict.fromkeys(name for answer in answers for name in _groups(answer))
    last = [name for name in ("finished", "unfinished", "all") if name in names]
    return [*(name for name in names if name not in last), *last]


def main() -> None:
    """Run the measurement, or write a seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument(
        "--answers", type=Path, nargs="+", required=True, help="files as trainer/answers.py reads"
    )
    parser.add_argument("--seed", type=Path, help="measure this seed as well")
    parser.add_argument("--write-seed", type=Path, help="write a seed instead of measuring")
    parser.add_argument("--max-bytes", type=int, default=1_000_000, help="size of the seed")
    args = parser.parse_args()
    tokenizer = load_tokenizer(open_target_folder(args.target).tokenizer)
    vocabulary = TokenIds(tokenizer).fingerprint
    target = Target(args.target)
    answers = [answer for file in args.answers for answer in read_answers(file, target)]
    held_out = [answer for answer in answers if answer.is_held_out]
    trained = CountingModel()
    replay(
        trained,
        (answer for answer in answers if not answer.is_held_out),
        DraftPolicy(_COSTS, _OVERHEAD_S),
    )
    if args.write_seed:
        trained.save(args.write_seed, vocabulary, max_bytes=args.max_bytes)
        return
    with tempfile.TemporaryDirectory() as scratch:
        seeds: dict[str, Path | None] = {"cold": None, "trained": Path(scratch) / "ngrams.bin"}
        trained.save(Path(scratch) / "ngrams.bin", vocabulary)
        if args.seed:
            seeds["seed"] = args.seed
        print(f"{len(held_out)} held-out answers; tokens per pass and speed-up; time per proposal")
        print(" " * 26 + "  ".join(f"{group[:10]:>10}" for group in group_names(held_out)))
        report("lookup", SuffixLookup(), held_out)
        for name, seed in seeds.items():
            report(f"n-grams, {name}", LearnedNgrams(vocabulary, seed=seed), held_out)
            report(
                f"lookup first, {name}", LookupFirst(LearnedNgrams(vocabulary, seed=seed)), held_out
            )
            both: list[Proposer] = [SuffixLookup(), LearnedNgrams(vocabulary, seed=seed)]
            policy = DraftPolicy(_COSTS, _OVERHEAD_S)
            report(
                f"better of both, {name}", CompositeProposer(both, None, policy), held_out, policy
            )
    print("where counts start from, by kind (rows) and context")
    for kind in range(len(_PRIOR)):
        keys = [(kind, context) for context in range(len(_CONTEXTS))]
        rates = [trained.right[key] / max(trained.seen[key], 1) for key in keys]
        print("    (" + ", ".join(f"{rate:.2f}" for rate in rates) + "),")


if __name__ == "__main__":
    main()
