"""What an acceptance head learns from: rows of a drafter over answers, and what became of the
pieces drafted from them.

A round gets to a piece only behind pieces that are right, which are the answer's own: so one
forward pass over the answer gives every row that any round would draft from. Rows that no round
gets to, behind a wrong piece of the same target token, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgedraft.runtime.vocab_map import VocabMap

from .acceptance_head import certainty_of
from .answers import Answer
from .errors import TrainError
from .examples import Teacher, answer_example, worth_learning
from .rounds import evaluated_pieces, reachable_pieces

# What is learned. For greedy answers a piece is right or not. For coupled sampling it is the chance
# that the target's sample is this piece; for drafts that are drawn, that the ratio test keeps it.
LABELS = ("right", "chance", "ratio")
_NO_ROUND = -1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that pieces are drafted from."""

    hidden: npt.NDArray[np.float16]  # (n, width)
    certainty: npt.NDArray[np.float32]  # (n,) log-odds of the likeliest piece
    right: npt.NDArray[np.float32]  # (n,) 1 where that piece is the answer's
    chance: npt.NDArray[np.float32]  # (n,) what the target gives it; NaN where that is not known
    place: npt.NDArray[np.int16]  # (n,) in its round, when rounds follow each other; -1: in none

    @classmethod
    def join(cls, parts: Iterable[Rows]) -> Rows:
        """Put rows of several answers one after the other; raise `TrainError` if there are none."""
        listed = list(parts)
        if not listed:
            raise TrainError("no answers to learn acceptance from, or none held out")
        return cls(*(np.concatenate([getattr(x, name) for x in listed]) for name in cls.__slots__))

    def take(self, wanted: npt.NDArray[Any]) -> Rows:
        """Return some of the rows."""
        return Rows(*(getattr(self, name)[wanted] for name in self.__slots__))

    def in_rounds(self) -> Rows:
        """Return what is compared when rounds follow each other through the answers."""
        return self.take(self.place != _NO_ROUND)

    @property
    def own(self) -> npt.NDArray[np.float32]:
        """What the drafter itself gives the piece."""
        probability: npt.NDArray[np.float32] = np.reciprocal(1 + np.exp(-self.certainty))
        return probability

    def labels(self, kind: str) -> npt.NDArray[np.float32]:
        """Return what to learn; raise `TrainError` where the answers do not say it."""
        if kind == "right":
            return self.right
        if np.isnan(self.chance).any():
            raise TrainError(f"--labels {kind} needs answers with top_k_ids and top_k_logits")
        if kind == "chance":
            return self.chance
        ratio: npt.NDArray[np.float32] = np.minimum(1, self.chance / self.own)
        return ratio


@torch.inference_mode()
def rows_of(model: Any, answer: Answer, vocab_map: VocabMap) -> Rows:
    """Run the drafter over one answer."""
    example = answer_example(answer, vocab_map, teach=True)
    lengths = [len(vocab_map.spelling(token)) for token in worth_learning(answer)]
    prompt = sum(len(vocab_map.spelling(token)) for token in answer.prompt_ids)
    tokens = torch.from_numpy(example.tokens)
    hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    hidden = hidden[prompt - 1 : -1]  # the row in front of every piece of the response
    logits = model.lm_head(hidden)
    best = logits.argmax(-1).numpy()
    hits = best == example.tokens[prompt:]
    # An answer may be cut where the drafter's context is meant to end, within a token even.
    reached = [i for i in reachable_pieces(_padded(hits, sum(lengths)), lengths) if i < len(hits)]
    place = np.full(len(hits), _NO_ROUND, np.int16)
    for piece, depth in evaluated_pieces(_padded(hits, sum(lengths)), lengths):
        if piece < len(hits):
            place[piece] = depth
    rows = Rows(
        hidden.half().numpy(),
        certainty_of(logits).numpy(),
        hits.astype(np.float32),
        _chances(example.teacher, best, prompt),
        place,
    )
    return rows.take(np.array(reached, np.intp))


def _padded(hits: npt.NDArray[np.bool_], length: int) -> list[bool]:
    return [*hits.tolist(), *[False] * (length - len(hits))]


def _chances(
    teacher: Teacher | None, best: npt.NDArray[np.int64], prompt: int
) -> npt.NDArray[np.float32]:
    if teacher is None:
        return np.full(len(best), np.nan, np.float32)
    ids, probs = teacher.ids[prompt:], teacher.probs[prompt:]
    chances: npt.NDArray[np.float32] = (probs * (ids == best[:, None])).sum(-1)
    return chances
