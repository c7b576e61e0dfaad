"""A small model as a proposer, whatever the vocabulary of its target.

What the drafter reads is a function of the committed target tokens alone: their spellings, one
after the other (`vocab_map.py`). So its KV cache is appended to and rolled back, never rewritten,
and after a round it keeps whatever of its own draft turned out right.

Usually the likeliest tokens are drafted, until the whole draft is unlikely to be reached. How
likely each of them is an acceptance head says, or the drafter itself where it has none. Where the
request wants it, tokens are drawn instead, and verified with the probabilities they had
(`rejection.py`); no head is asked then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf, prod
from time import perf_counter

import numpy as np
import numpy.typing as npt

from .branching import branched
from .config import SamplingConfig
from .datatypes import NOTHING, Draft, FloatArray, Proposal
from .drawing import Choice, Choose, DraftDrawing
from .interfaces import LanguageModel, Proposer
from .policy import DraftPolicy
from .prefix import common_prefix
from .translate import Translator
from .trie_marginal import TrieMarginal
from .vocab_map import VocabMap

_PREFILL_ROWS = 128
_OVERTIME = 3  # pieces that may be drafted to finish a target token
_SLOWING = 1.02  # how fast a step's known seconds may rise, per step
_LEAST = 1e-30  # stands in for no odds at all
_READ_S = 1e-4  # of a piece in a prompt, before one was read
_ROUND_PIECES = 32  # a round adds fewer to the context; reading more is no cost of a round


class DraftModel(Proposer):
    """Drafts for one target with a model that has its own vocabulary."""

    def __init__(
        self,
        model: LanguageModel,
        vocab_map: VocabMap,
        translator: Translator | None = None,
        policy: DraftPolicy | None = None,
        *,
        target_vocab_size: int | None = None,
        trees: bool = False,
    ) -> None:
        """`policy` says what time is worth; without it drafts fill their budget. `trees` says
        whether the target verifies them: then drafts branch. `target_vocab_size` says how wide its
        logits are, by default as its tokenizer, which matters for drafts that are drawn.
        """
        self._model = model
        self._map = vocab_map
        self._translator = translator or Translator(vocab_map)
        self._unusable = np.flatnonzero(~self._translator.usable)
        self._policy = policy or DraftPolicy()
        self._step_s = inf  # the fastest of late
        self._reading_s = 0.0  # spent on reading a prompt in this round
        self._read_s = inf  # of a piece of it, the fastest of late
        self._trees = trees
        self._target_vocab_size = target_vocab_size or vocab_map.spelling_start.size - 1
        self._drawing: DraftDrawing | None = None  # None: the likeliest tokens are drafted
        self._proposed: tuple[int, Proposal] = (0, NOTHING)  # where it began, and what
        self._committed: list[int] = []  # target tokens that `_context` spells
        self._ends: list[int] = []  # length of the context behind each of them
        self._context: list[int] = []
        self._cached: list[int] = []  # draft tokens in the model's cache
        self._offset = 0  # context tokens that no longer fit into the model's context

    @property
    def model(self) -> LanguageModel:
        """What it drafts with."""
        return self._model

    @property
    def vocab_map(self) -> VocabMap:
        """Its vocabulary beside the target's."""
        return self._map

    def begin(self, sampling: SamplingConfig) -> None:
        """Draft as the request's tokens are chosen."""
        self._translator.begin()
        self._drawing = None
        if sampling.uses_draft_laws:
            self._drawing = DraftDrawing(
                sampling, self._marginal, self._model.vocab_size, trees=self._trees
            )

    @cached_property
    def _marginal(self) -> TrieMarginal:
        return TrieMarginal(self._map, self._target_vocab_size)

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        """Draft until the budget is spent or the draft is unlikely to be reached."""
        started = perf_counter()
        position, proposed = self._proposed
        self._translator.learn(proposed, committed[position:])
        unchanged = self._spell(committed)
        budget = min(budget, self._model.context_length // 2 - _OVERTIME)
        if budget < 1 or not self._context:
            self._proposed = len(committed), NOTHING
            return NOTHING
        row = self._read_context(unchanged, budget + _OVERTIME)
        if self._drawing is not None:
            draft = self._draft(row, budget, self._drawing.chooser(len(committed)))
            proposal = self._drawing.proposal(draft, budget)
        else:
            draft = self._draft(row, budget, self._likeliest)
            proposal = self._translator.translate(draft, budget, committed)
            self._proposed = len(committed), proposal
            proposal = branched(proposal, self._map, budget)
        draft_s = perf_counter() - started - self._reading_s
        return replace(proposal, draft_s=draft_s, reading_s=self._reading_s)

    def reading_s(self, committed: Sequence[int]) -> float:
        """Return the seconds that it would take to read what is new of a text, but for what a round
        adds.
        """
        known = common_prefix(self._committed, list(committed)) if self._cached else 0
        pieces = len(committed) - known
        if self._committed:
            pieces = pieces * len(self._context) // len(self._committed)
        if pieces > self._model.context_length:  # the newest half of it is read
            pieces = self._model.context_length // 2
        piece_s = self._read_s if self._read_s < inf else _READ_S
        return pieces * piece_s if pieces > _ROUND_PIECES else 0.0

    def use(self, model: LanguageModel) -> None:
        """Draft with another model of the same vocabulary from the next round on; it reads the text
        so far by itself.
        """
        self._model = model
        self._cached = []

    def forget(self) -> None:
        """Drop every token read so far."""
        self._committed, self._ends, self._context, self._cached = [], [], [], []
        self._offset = 0
        self._proposed = 0, NOTHING
        self._model.rollback(0)
        self._translator.forget()

    def save(self) -> None:
        """Write what the translator learned."""
        self._translator.save()

    def _spell(self, committed: Sequence[int]) -> int:
        """Bring the context to what the committed tokens spell; return how much of it stayed."""
        committed = list(committed)
        same = common_prefix(self._committed, committed)
        del self._committed[same:], self._ends[same:]
        unchanged = self._ends[-1] if self._ends else 0
        del self._context[unchanged:]
        for token in committed[same:]:
            self._context += self._map.spelling(token)
            self._committed.append(token)
            self._ends.append(len(self._context))
        return unchanged

    def _draft(self, row: FloatArray, budget: int, choose: Choose) -> Draft:
        """Draft behind `row`, the logits that follow the context. When to stop depends on nothing
        but the tokens so far.
        """
        pieces: list[int] = []
        probs: list[float] = []
        laws: list[npt.NDArray[np.float64]] = []
        rivals: list[tuple[int, float]] = []
        while True:
            chosen = choose(row)
            pieces.append(chosen.piece)
            probs.append(chosen.probability)
            if chosen.law is not None:
                laws.append(chosen.law)
            if chosen.rival is not None:
                rivals.append(chosen.rival)
            if self._is_enough(pieces, probs, budget):
                drawn_from = np.stack(laws) if laws else None
                return Draft(tuple(pieces), tuple(probs), drawn_from, tuple(rivals))
            row = self._forward([chosen.piece])

    def _likeliest(self, row: FloatArray) -> Choice:
        judged = self._judged(row)
        if judged is not None and not self._trees:
            return judged
        row[self._unusable] = -np.inf
        piece = int(row.argmax())
        odds = np.exp(row - row[piece])
        own = 1 / float(odds.sum())
        if not self._trees:
            return Choice(piece, own)
        odds[piece] = 0.0
        rival = int(odds.argmax())
        # What is left over by the head, too, is shared as the drafter shares it.
        probability = judged.probability if judged is not None else own
        share = float(odds[rival]) / max(float(odds.sum()), _LEAST)
        return Choice(piece, probability, rival=(rival, (1 - probability) * share))

    def _judged(self, row: FloatArray) -> Choice | None:
        """Return the row's likeliest piece with what a head says of it; None without a head, and
        where it says nothing of use.
        """
        if (told := self._model.acceptance) is None:
            return None
        piece, acceptance = int(row.argmax()), float(told[-1])
        # It speaks of this piece and of no other; NaN is no probability.
        is_of_use = self._translator.usable[piece] and 0 <= acceptance <= 1
        return Choice(piece, acceptance) if is_of_use else None

    def _is_enough(self, pieces: Sequence[int], probs: Sequence[float], budget: int) -> bool:
        if len(pieces) < budget and self._policy.wants_more(prod(probs), self._step_s):
            return False
        node = 0
        for piece in pieces:
            node = self._translator.follow(node, piece)
        return not self._translator.is_open(node) or len(pieces) >= budget + _OVERTIME

    def _read_context(self, unchanged: int, room: int) -> FloatArray:
        """Bring the model's cache to the context and return the logits behind it.

        The first `unchanged` tokens are known to be those of the last round.
        """
        if self._offset >= len(self._context):
            self._offset = 0
        if len(self._context) - self._offset + room > self._model.context_length:
            # Reading half of it again is cheaper than dropping one token at a time.
            self._offset = len(self._context) - (self._model.context_length - room) // 2
            self._cached = []
        wanted = self._context[self._offset :]
        known = min(max(0, unchanged - self._offset), len(self._cached))
        kept = known + common_prefix(self._cached[known:], wanted[known:])
        kept = min(kept, len(wanted) - 1)
        self._model.rollback(kept)
        del self._cached[kept:]
        started = perf_counter()
        for start in range(kept, len(wanted) - 1, _PREFILL_ROWS):
            part = wanted[start : min(start + _PREFILL_ROWS, len(wanted) - 1)]
            self._model.extend(part)
            self._cached += part
        self._reading_s = 0.0
        if len(wanted) - kept > _ROUND_PIECES:
            self._reading_s = perf_counter() - started
            piece_s = self._reading_s / (len(wanted) - 1 - kept)
            self._read_s = min(piece_s, self._read_s * _SLOWING)
        return self._forward(wanted[-1:])

    def _forward(self, pieces: list[int]) -> FloatArray:
        started = perf_counter()
        rows = self._model.forward(pieces)
        # A step that something interrupted says nothing; one that stays slow does in the end.
        self._step_s = min(perf_counter() - started, self._step_s * _SLOWING)
        self._cached += pieces
        last: FloatArray = rows[-1]
        return last
