"""Measure what a drafter learns from a stream of answers, by loss, by rank of what it adds, by how
long it rehearses, and by what its acceptance head learns from.

    python benchmarks/learning_losses.py --target DIR --drafter DIR --learn FILE --test FILE \
        --json FILE [--requests 500] [--orders 1] [--only NAME ...]

Answers with the target's likeliest tokens (`edgedraft-train corpus --top-k-logits`) are replayed to
the learner as requests, in one order or several. Then the drafter drafts other answers as it was
shipped and as it has learned, by itself, greedily, four tokens a round: one pass over an answer
tells what that would be. Prints one row of a table for each variant and order.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgedraft.runtime.adapter_store import AdapterStore, open_adapter_store
from edgedraft.runtime.drafting import pair_roles
from edgedraft.runtime.folder import open_model_folder, open_target_folder
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.ort_session import SessionConfig
from edgedraft.runtime.provenance import describe_run
from edgedraft.runtime.state import write_atomic
from edgedraft.runtime.tokenizer_file import TokenIds, load_tokenizer
from edgedraft.runtime.training_files import open_training_files
from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.runtime.vocabulary import Vocabulary
from edgedraft.trainer.answers import read_answers
from edgedraft.trainer.learner_config import LearnerConfig
from edgedraft.trainer.lesson import TOP, Lesson
from edgedraft.trainer.online import OnlineLearner
from edgedraft.trainer.rounds import MAX_DRAFT_TOKENS, Counts, count_matches, matches_of
from edgedraft.trainer.step_graph import StepGraph
from edgedraft.trainer.target import Target
from edgedraft.trainer.teacher import Objective, Teacher

_DEFAULT = LearnerConfig()
VARIANTS = {
    "cross-entropy": replace(_DEFAULT, objective=Objective("cross-entropy")),
    "marginal, KL(p||q)": replace(_DEFAULT, objective=Objective()),
    "marginal, KL(q||p)": replace(_DEFAULT, objective=Objective("marginal", (0.0, 1.0, 0.0))),
    "marginal, KL(p||q) / 2 + TV": replace(
        _DEFAULT, objective=Objective("marginal", (0.5, 0.0, 1.0))
    ),
    "hybrid of the paper": replace(_DEFAULT, objective=Objective.paper()),
    "without its n-grams": replace(_DEFAULT, objective=Objective.paper(0.0)),
    "with their dynamic weight": replace(_DEFAULT, objective=Objective.paper(None)),
    "rank 8": replace(_DEFAULT, rank=8, alpha=8.0),
    "rank 16": replace(_DEFAULT, rank=16, alpha=16.0),
    "rank 32": replace(_DEFAULT, rank=32, alpha=32.0),
    "rank 64": replace(_DEFAULT, rank=64, alpha=64.0),
    "no rehearsals": replace(_DEFAULT, rehearsal_steps=0),
    "rehearsals of 7 steps": replace(_DEFAULT, rehearsal_steps=7),
    "rehearsals of 14 steps": replace(_DEFAULT, rehearsal_steps=14),
    "acceptance head as shipped": replace(_DEFAULT, acceptance=None),
    "acceptance head, joint": replace(_DEFAULT, acceptance="joint"),
    "acceptance head, interleaved": replace(_DEFAULT, acceptance="interleaved"),
}


def read_lessons(path: Path, target: Target) -> list[list[Lesson]]:
    """Return what every answer of a file can teach."""
    requests = []
    for answer in read_answers(path, target):
        lesson = Lesson.certain(answer.prompt_ids, answer.response_ids)
        if answer.top_k is not None:
            count = min(TOP, answer.top_k.ids.shape[1])
            # What lies behind the tokens that are named is so little that it is left out.
            logits = answer.top_k.logits - answer.top_k.logits.max(1, keepdims=True)
            log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            lesson.top_ids[:, :count] = answer.top_k.ids[:, :count]
            lesson.top_log_probs[:, :count] = log_probs[:, :count]
        requests.append(list(lesson.parts()))
    return requests


class Trial:
    """A pair, and answers to learn from and to be tested with."""

    def __init__(
        self, target: Path, drafter: Path, learn: Path, requests: int, test: Path | None = None
    ) -> None:
        self.target, self._folder = open_target_folder(target), open_model_folder(drafter)
        tokenizers = [load_tokenizer(folder.tokenizer) for folder in (self._folder, self.target)]
        roles = pair_roles(self._folder, self.target)
        self._map = VocabMap.build(*map(Vocabulary, tokenizers), **roles)
        self._ids = TokenIds(tokenizers[1])
        self._files = open_training_files(self._folder)
        self._graph = StepGraph(self._files)
        reader = Target(target)
        self._stream = read_lessons(learn, reader)
        self.requests = min(requests, len(self._stream))
        tests = read_lessons(test, reader) if test else []
        teacher = Teacher(self._map, Objective())
        self._tests = [x for request in tests for lesson in request if (x := teacher.spell(lesson))]

    def learn(self, config: LearnerConfig, order: int = 0) -> tuple[OnlineLearner, Lora | None]:
        """Replay the stream once, in an order of its own: a file may be in that in which answers
        ended.
        """
        drawn = np.random.default_rng(order).permutation(len(self._stream))[: self.requests]
        with TemporaryDirectory() as folder:
            store = open_adapter_store(Path(folder), self._folder, self._ids)
            learner = self._learner(store, config)
            for i in drawn:
                learner.add(self._stream[i])
                learner.work(math.inf, lambda: False)
            adapter = store.active()
            return learner, adapter.lora if adapter else None

    def test(self, lora: Lora | None) -> dict[str, float | None]:
        """Return tokens per pass, how many of the drafted tokens are accepted, and the Brier score
        of the acceptance head, of all pieces.
        """
        counts, accepted, proposed = Counts(), 0, 0
        predictions = self._graph.predictions([x.passage for x in self._tests], lora)
        for spelled, prediction in zip(self._tests, predictions, strict=True):
            matches = matches_of(prediction.hit.tolist(), spelled.lengths)
            counts.add(count_matches(matches))
            at = 0
            while at < len(matches):
                accepted += matches[at]
                proposed += min(MAX_DRAFT_TOKENS, len(matches) - at)
                at += matches[at] + 1
        scores = [(x.brier, x.hit.size) for x in predictions if x.brier is not None]
        weight = sum(size for _, size in scores)
        return {
            "tokens_per_pass": counts.tau,
            "acceptance_rate": accepted / proposed,
            "brier": sum(x * size for x, size in scores) / weight if weight else None,
        }

    def _learner(self, store: AdapterStore, config: LearnerConfig) -> OnlineLearner:
        return OnlineLearner(self._files, self._map, store, None, self._ids.fingerprint, config)


def row(name: str, cells: Sequence[str]) -> None:
    """Print a row of the table."""
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def cells(measured: Mapping[str, float | None]) -> list[str]:
    """Return what `test` measured, as a row of the table has it."""
    return ["" if x is None else f"{x:.3f}" for x in measured.values()]


def main() -> None:
    """Run the variants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--learn", type=Path, required=True, metavar="FILE", help="as trainer/answers.py reads"
    )
    parser.add_argument("--test", type=Path, required=True, metavar="FILE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, default=500, metavar="N")
    parser.add_argument("--orders", type=int, default=1, metavar="N", help="of the answers")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", default=VARIANTS)
    args = parser.parse_args()
    trial = Trial(args.target, args.drafter, args.learn, args.requests, args.test)
    before = trial.test(None)
    document: dict[str, Any] = {
        "shipped": before,
        "variants": {name: [] for name in args.only},
        "settings": {
            "learn": args.learn.name,
            "test": args.test.name,
            "requests": trial.requests,
        },
        "provenance": describe_run(trial.target, SessionConfig(threads=_DEFAULT.threads), 0),
    }
    row("", ["tokens per pass", "acceptance", "Brier score", "updates used", "undone", "CPU s"])
    row("---", ["---"] * 6)
    row("as shipped", [*cells(before), "", "", ""])
    for order in range(args.orders):
        for name, found in document["variants"].items():
            learner, lora = trial.learn(VARIANTS[name], order)
            after, stats = trial.test(lora), learner.stats
            found.append(
                {
                    **after,
                    "used": stats.accepted,
                    "undone": stats.rolled_back,
                    "begun_anew": stats.begun_anew,
                    "steps": stats.steps,
                    "cpu_s": stats.cpu_s,
                }
            )
            numbers = [str(stats.accepted), str(stats.rolled_back), f"{stats.cpu_s:.0f}"]
            row(name, [*cells(after), *numbers])
            write_atomic(args.json, json.dumps(document, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
