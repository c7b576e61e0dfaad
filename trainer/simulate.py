"""Tokens per target pass, by simulating rounds over answers that a target has given.

A round drafts greedily behind the committed tokens until the draft spells k target tokens or has
`PIECE_CAP` pieces, accepts the leading tokens that equal the true answer, and emits one token more.
What is drafted depends only on where in the answer a round begins, so the drafts of all positions
are made at once: one pass over the answer, then one over the pieces that each draft goes on with,
where every draft sees the answer up to its own beginning, and itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from edgedraft.runtime.datatypes import Draft
from edgedraft.runtime.prefix import common_prefix
from edgedraft.runtime.translate import Translator
from edgedraft.runtime.vocab_map import VocabMap

from .answers import Answer
from .rounds import MAX_DRAFT_TOKENS, PIECE_CAP, Counts, count_matches


class Simulator:
    """Simulates one drafter on the answers of one target."""

    def __init__(self, model: Any, vocab_map: VocabMap) -> None:
        self._model = model
        self._map = vocab_map
        self._translator = Translator(vocab_map)
        self._unusable = torch.from_numpy(~vocab_map.usable).to(model.device)

    def measure(self, answers: Iterable[Answer]) -> dict[str, Counts]:
        """Return the counts of all answers, of the finished and the cut ones, and of every data
        set.
        """
        results: dict[str, Counts] = {}
        for answer in answers:
            counts = count_rounds(self.drafts(answer), answer.response_ids)
            for name in ("all", "finished" if answer.finished else "cut", answer.data_set):
                results.setdefault(name, Counts()).add(counts)
        return results

    def drafts(self, answer: Answer) -> list[tuple[int, ...]]:
        """Return the target tokens drafted at every position of the answer."""
        context = [p for token in answer.prompt_ids for p in self._map.spelling(token)]
        starts: list[int] = []
        for token in answer.response_ids:
            starts.append(len(context))
            context += self._map.spelling(token)
        with self._model.device:
            drafts = self._pieces(context, starts)
        return [self._translate(pieces) for pieces in drafts]

    @torch.inference_mode()
    def _pieces(self, context: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
        """Draft behind `context[:start]` for every start, side by side."""
        cache = DynamicCache()
        hidden = self._hidden(torch.tensor([context]), None, None, cache)
        drafts = [[piece] for piece in self._best(hidden[torch.tensor(starts) - 1])]
        # Which columns of the cache a draft may see: those before its start, then its own.
        sees = torch.arange(len(context)) < torch.tensor(starts)[:, None]
        for depth in range(PIECE_CAP - 1):
            open_ = [i for i, draft in enumerate(drafts) if not self._is_enough(draft)]
            if not open_:
                break
            own = torch.zeros(len(starts), len(open_), dtype=torch.bool)
            own[open_, range(len(open_))] = True
            sees = torch.cat([sees, own], dim=1)
            mask = torch.zeros(len(open_), sees.shape[1]).masked_fill(~sees[open_], -torch.inf)
            hidden = self._hidden(
                torch.tensor([[drafts[i][-1] for i in open_]]),
                mask[None, None],
                torch.tensor([[starts[i] + depth for i in open_]]),
                cache,
            )
            for i, piece in zip(open_, self._best(hidden), strict=True):
                drafts[i].append(piece)
        return drafts

    def _hidden(
        self,
        pieces: torch.Tensor,  # (1, rows)
        mask: torch.Tensor | None,  # (1, 1, rows, columns), added to the scores
        positions: torch.Tensor | None,  # (1, rows)
        cache: DynamicCache,
    ) -> torch.Tensor:
        # By position: transformers is renaming the cache's keyword.
        output = self._model.model(pieces, mask, positions, cache, use_cache=True)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _best(self, hidden: torch.Tensor) -> list[int]:
        logits = self._model.lm_head(hidden).masked_fill(self._unusable, -torch.inf)
        best: list[int] = logits.argmax(-1).tolist()
        return best

    def _is_enough(self, pieces: Sequence[int]) -> bool:
        return len(self._translate(pieces)) >= MAX_DRAFT_TOKENS

    def _translate(self, pieces: Sequence[int]) -> tuple[int, ...]:
        draft = Draft(tuple(pieces), (1.0,) * len(pieces))
        return self._translator.translate(draft, MAX_DRAFT_TOKENS).tokens


def count_rounds(drafts: Sequence[Sequence[int]], truth: Sequence[int]) -> Counts:
    """Count the rounds of an answer, given what is drafted at every position of it."""
    return count_matches(
        [common_prefix(tuple(draft), tuple(truth[i:])) for i, draft in enumerate(drafts)]
    )


def table(results: dict[str, Counts]) -> str:
    """Return the results as lines for a person."""
    lines = [f"{'':<20}{'tokens':>9}{'tau':>8}{'a1':>8}"]
    for name, counts in results.items():
        lines.append(f"{name:<20}{counts.tokens:>9}{counts.tau:>8.3f}{counts.first_rate:>8.3f}")
    return "\n".join(lines)
