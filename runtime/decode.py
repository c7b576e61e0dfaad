"""The decode loop: propose, verify, commit, roll back.

Plain decoding is this loop with nothing proposed. What must stay true:

* The committed token sequence is the only truth; caches and proposers catch up with it.
* Between rounds the target's cache holds every committed token but the last. That token leads the
  next pass, so a round costs one target pass and the bonus token needs none of its own.
* Output is token for token what plain decoding would give, for any proposer (`verify.py`), and for
  chains bit for bit in the logits (`onnx_model.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter

from .config import DecodeConfig
from .datatypes import NOTHING, FinishReason, Proposal, RoundTrace, Timings, Verdict
from .errors import PromptError
from .interfaces import LanguageModel, Proposer
from .policy import DraftPolicy
from .prefix import common_prefix
from .sampling import Sampler
from .verify import verify

_PREFILL_ROWS = 128  # bounds a long prompt's activations, and how long a cancellation waits


class SpeculativeDecoder:
    """Decodes one sequence at a time; the next one reuses the cached prefix it shares with the
    last.
    """

    def __init__(
        self,
        target: LanguageModel,
        proposer: Proposer | None = None,
        policy: DraftPolicy | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._target = target
        self._proposer = proposer
        self._policy = policy or DraftPolicy()
        self._eos = frozenset(eos_token_ids)
        self._cached: list[int] = []  # the tokens behind the target's cache
        self._cancelled = threading.Event()
        self.reused_tokens = 0  # of the present prompt, found in the cache
        self.prefill_s = 0.0

    def cancel(self) -> None:
        """End the present request after its round; may be called from another thread."""
        self._cancelled.set()

    def forget(self) -> None:
        """Do not reuse anything of the cache."""
        self._cached = []

    def rounds(
        self,
        prompt: Sequence[int],
        config: DecodeConfig,
        is_last: Callable[[int], bool] = lambda token: False,
    ) -> Iterator[RoundTrace]:
        """Decode after `prompt`, yielding each round when it is committed.

        `is_last` sees every emitted token once, in order, and ends the request by returning True
        (stop strings). The last trace says why the request ended. Raises `PromptError` for a prompt
        that is empty or leaves no room in the context.
        """
        self._cancelled.clear()
        committed = list(prompt)
        self._check(committed)
        sampler = Sampler(config.sampling, prompt, self._target.vocab_size)
        if self._proposer is not None:
            self._proposer.begin(config.sampling)
        self._prefill(committed)
        remaining = config.max_tokens
        finish: FinishReason | None = "cancelled" if self._cancelled.is_set() else None
        while finish is None:
            started = perf_counter()
            proposal = self._propose(committed, remaining, config.max_draft_tokens)
            drafted = perf_counter()
            base = self._target.length
            assert base == len(committed) - 1, "the cache trails the committed tokens by one"
            parents = None if proposal.is_chain else [-1, *(p + 1 for p in proposal.parents)]
            logits = self._target.forward([committed[-1], *proposal.tokens], parents)
            returned = perf_counter()

            rule = proposal.rule or verify
            verdict = rule(proposal, logits, sampler, len(committed))
            sampler.commit(verdict.next_token)
            emitted, finish = self._emit(proposal, verdict, remaining, config, is_last)
            committed.extend(emitted)
            remaining -= len(emitted)
            rows = [0, *(node + 1 for node in verdict.path)][: len(emitted)]
            self._target.keep(base, rows)
            self._cached = committed[:-1]
            if finish is None and self._cancelled.is_set():
                finish = "cancelled"
            if finish is None and self._target.length >= self._target.context_length:
                finish = "context"

            timings = Timings(drafted - started, returned - drafted, perf_counter() - returned)
            # A slice of a chain is a view; only a tree's path has to be gathered.
            used = logits[: len(rows)] if proposal.is_chain else logits[rows]
            trace = RoundTrace(proposal, verdict, emitted, used, timings, finish)
            self._policy.observe(trace)
            yield trace

    def _check(self, prompt: list[int]) -> None:
        """Raise `PromptError` for a prompt that cannot be served."""
        if not prompt:
            raise PromptError(
                "the prompt holds no tokens: give some text, or a tokenizer that adds BOS"
            )
        vocab_size, context = self._target.vocab_size, self._target.context_length
        if not all(0 <= token < vocab_size for token in prompt):
            raise PromptError(f"a prompt token lies outside the vocabulary of {vocab_size}")
        if len(prompt) > context:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens, the context holds {context}: shorten it"
            )

    def _prefill(self, prompt: list[int]) -> None:
        """Bring the target's cache to every prompt token but the last."""
        target = self._target
        started = perf_counter()
        shared = common_prefix(self._cached, prompt[:-1])
        target.rollback(shared)
        for start in range(shared, len(prompt) - 1, _PREFILL_ROWS):
            self._cached = prompt[:start]
            if self._cancelled.is_set():
                break
            target.extend(prompt[start : min(start + _PREFILL_ROWS, len(prompt) - 1)])
        else:
            self._cached = prompt[:-1]
        self.reused_tokens = shared
        self.prefill_s = perf_counter() - started

    def _propose(self, committed: list[int], remaining: int, max_draft_tokens: int) -> Proposal:
        """Ask for a proposal and keep the part that pays."""
        target = self._target
        budget = min(
            max_draft_tokens,
            target.max_rows - 1,
            remaining - 1,
            target.context_length - target.length - 1,
        )
        if self._policy.most is not None:
            budget = min(budget, self._policy.most)
        if self._proposer is None or budget < 1:
            return NOTHING
        self._policy.begin_round(target.length)
        proposal = self._proposer.propose(committed, budget)
        if not target.supports_trees and not proposal.is_chain:
            proposal = proposal.first_path()
        return proposal.head(min(self._policy.nodes_to_submit(proposal), budget))

    def _emit(
        self,
        proposal: Proposal,
        verdict: Verdict,
        remaining: int,
        config: DecodeConfig,
        is_last: Callable[[int], bool],
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Return the tokens of this round up to the one that ends the request, and why it ends."""
        emitted: list[int] = []
        for token in (*(proposal.tokens[node] for node in verdict.path), verdict.next_token):
            emitted.append(token)
            stop = token in self._eos and not config.ignore_eos
            if is_last(token) or stop:
                return tuple(emitted), "stop"
            if len(emitted) == remaining:
                return tuple(emitted), "length"
        return tuple(emitted), None
