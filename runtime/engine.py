"""`Engine`: a target folder, text in, text out.

    with Engine.open("models/smollm2") as engine:
        for piece in engine.stream("Explain tides to a child."):
            print(piece.text, end="", flush=True)
        print(engine.stats.summary())

One request runs at a time; the next reuses the part of the cache that both prompts begin with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from time import monotonic
from typing import Any

from .config import DecodeConfig
from .datatypes import FinishReason, RoundTrace
from .decode import SpeculativeDecoder
from .detokenize import TextStream
from .drafting import DEFAULT, open_policy, open_proposer
from .errors import EdgeDraftError, FolderError, StateError
from .folder import ModelFolder, open_target_folder
from .interfaces import Proposer
from .learning import Learn, Learning, open_learning
from .onnx_model import OnnxModel
from .ort_session import SessionConfig
from .plan import Plan, load_or_measure_plan, measure_plan
from .policy import DraftPolicy
from .prompt_encoding import encode_prompt
from .state import DeviceState, default_state_dir
from .stats import RunStats
from .tokenizer_file import TokenIds, load_tokenizer

_log = logging.getLogger(__name__)
_SAVE_INTERVAL_S = 60.0
Message = Mapping[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain with one round."""

    text: str
    trace: RoundTrace | None  # None: text that was held back until the end
    finish_reason: FinishReason | None = None  # set on the last piece


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: RunStats


class Engine:
    """A target ready to answer."""

    def __init__(
        self,
        target: OnnxModel,
        tokenizer: Any,
        proposer: Proposer | None,
        plan: Plan | None = None,
        policy: DraftPolicy | None = None,
        learning: Learning | None = None,
    ) -> None:
        """Put the parts together; `open` does it from a folder. `tokenizer` is a
        `tokenizers.Tokenizer`; `policy` by default follows from the plan.
        """
        self.target = target
        self.tokenizer = tokenizer
        self.plan = plan
        self.proposer = proposer
        self.decoder = SpeculativeDecoder(
            target,
            proposer,
            policy or DraftPolicy(plan.costs if plan else None),
            target.folder.eos_token_ids,
        )
        self.learning = learning
        self.stats = RunStats()  # of the last request
        self._saved = monotonic()
        self._busy = threading.Lock()
        self._cancelled = threading.Event()

    @classmethod
    def open(
        cls,
        folder: str | Path | ModelFolder,
        *,
        drafters: Sequence[str | Path] | None = None,
        tree: bool = False,
        session: SessionConfig | None = None,
        state_dir: str | Path | None = None,
        keep: bool = True,
        learn: Learn = "off",
    ) -> Engine:
        """Open a target folder.

        `drafters` are "lookup", "ngram" and at most one drafter folder, in any combination, or
        "none" alone (`drafting.py`); by default "ngram", with `tree` "lookup". "k=4" or "gamma=0.4"
        among them sets how long drafts are, in place of what this device tells. `tree` lets lookup
        and models propose several continuations at once: exact over an fp32 graph with an
        attention bias, up to the last bit of a logit. The costs of
        this device are measured at the first opening and remembered in `state_dir`. So is what is
        learned of the texts, unless `keep` is False: then every opening is like the first. `learn`
        says when a drafter with a folder goes on learning (`learning.py`). Raises
        `FolderError` for a folder that cannot be used, `ProviderError` for an unknown execution
        provider.
        """
        target_folder = folder if isinstance(folder, ModelFolder) else open_target_folder(folder)
        tokenizer = load_tokenizer(target_folder.tokenizer)
        ids = TokenIds(tokenizer)
        target = OnnxModel(target_folder, session, tokenizer_size=ids.size)
        if tree and not (target.supports_trees and target_folder.precision == "fp32"):
            raise FolderError(
                f"{target_folder.graph}: trees need an fp32 graph with an attention bias, this one "
                f"is {target_folder.precision}, where one bit of rounding can change a token; "
                "export with --precision fp32 --tree"
            )
        default = ("lookup",) if tree else DEFAULT
        drafters = default if drafters is None else drafters
        if list(drafters) == ["none"]:
            open_learning(learn, None, ids, None)
            return cls(target, tokenizer, None)
        if target.max_rows == 1:
            open_learning(learn, None, ids, None)
            _log.warning(
                "%s: nothing can be verified, since %s: decoding plainly",
                target_folder.graph,
                target.obstacle,
            )
            return cls(target, tokenizer, None)
        state = None
        try:
            directory = Path(state_dir) if state_dir else default_state_dir()
            state = DeviceState(directory, target_folder.fingerprint)
            plan = load_or_measure_plan(target, state)
        except StateError as error:
            _log.warning("%s", error)
            plan = measure_plan(target)
        names, policy = open_policy(drafters, plan.costs, default)
        kept = state.folder if state and keep else None
        proposer = open_proposer(
            names,
            target,
            ids,
            policy,
            tree=tree,
            pairs=state.shared / "pairs" if state else None,
            kept=kept,
        )
        learning = open_learning(learn, proposer, ids, kept)
        return cls(target, tokenizer, proposer, plan, policy, learning)

    def with_drafters(self, drafters: Sequence[str | Path]) -> Engine:
        """Return an engine over the same target that drafts differently and keeps nothing.

        Both use one cache: whoever turns from one to the other calls `forget` first.
        """
        names, policy = open_policy(drafters, self.plan.costs if self.plan else None)
        proposer = open_proposer(names, self.target, TokenIds(self.tokenizer), policy)
        return Engine(self.target, self.tokenizer, proposer, self.plan, policy)

    def encode(self, prompt: str | Sequence[Message], *, raw: bool = False) -> list[int]:
        """Return the prompt's token ids.

        Text is one user message in the model's chat template, unless `raw` or the model has none;
        then it is text to continue.
        """
        return encode_prompt(self.target.folder, self.tokenizer, prompt, raw=raw)

    def stream(
        self, prompt: str | Sequence[Message] | Sequence[int], config: DecodeConfig | None = None
    ) -> Iterator[Piece]:
        """Answer a prompt piece by piece; `stats` is up to date after every piece.

        The prompt is text, messages or token ids. Raises `PromptError` when it cannot be served,
        and `EdgeDraftError` when another request is running.
        """
        if not self._busy.acquire(blocking=False):
            raise EdgeDraftError(
                "this engine is answering another request: wait, or open a second engine"
            )
        try:
            self._cancelled.clear()
            yield from self._stream(self._ids(prompt), config or DecodeConfig())
            if monotonic() - self._saved > _SAVE_INTERVAL_S:
                self.save()
        finally:
            try:
                if self.learning is not None:
                    self.learning.end()
            finally:
                self._busy.release()
        if self.learning is not None:
            self.learning.work_at_once()

    def generate(
        self, prompt: str | Sequence[Message] | Sequence[int], config: DecodeConfig | None = None
    ) -> Answer:
        """Answer a prompt at once; see `stream`."""
        token_ids: list[int] = []
        text: list[str] = []
        finish: FinishReason = "cancelled"
        for piece in self.stream(prompt, config):  # a kept piece would keep its logits
            token_ids += piece.trace.emitted if piece.trace else ()
            text.append(piece.text)
            finish = piece.finish_reason or finish
        return Answer(tuple(token_ids), "".join(text), finish, self.stats)

    def cancel(self) -> None:
        """End the running request after its present round; may be called from another thread."""
        self._cancelled.set()
        self.decoder.cancel()

    def forget(self) -> None:
        """Forget every text seen so far: the cache, what lookup copies from, and the n-grams, which
        begin again from their seed; the next `save` makes that last.
        """
        self.decoder.forget()
        if self.proposer is not None:
            self.proposer.forget()

    def save(self) -> None:
        """Write what was learned, as also happens now and then between requests; a device that
        refuses is warned of, once.
        """
        saved = monotonic()
        for part in (self.proposer, self.learning):
            try:
                if part is not None:
                    part.save()
            except StateError as error:
                if self._saved < float("inf"):
                    _log.warning("%s", error)
                saved = float("inf")
        self._saved = saved

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what was learned, and learn no more; leaving a `with` block does so."""
        self.save()
        if self.learning is not None:
            self.learning.close()

    def _ids(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(t, Integral) for t in prompt):
            return [int(t) for t in prompt]  # type: ignore[arg-type]
        return self.encode(prompt)  # type: ignore[arg-type]

    def _stream(self, ids: list[int], config: DecodeConfig) -> Iterator[Piece]:
        text = TextStream(self.tokenizer, config.stop)
        self.stats = stats = RunStats(prompt_tokens=len(ids))
        finish: FinishReason = "cancelled"
        if self.learning is not None:
            self.learning.begin(ids)
        for trace in self.decoder.rounds(ids, config, text.push):
            stats.reused_tokens, stats.prefill_s = (
                self.decoder.reused_tokens,
                self.decoder.prefill_s,
            )
            stats.add_round(trace)
            if self.learning is not None:
                self.learning.observe(trace)
            finish = trace.finish_reason or finish
            if self._cancelled.is_set():  # it may have come before the decoder had begun
                self.decoder.cancel()
            yield Piece(text.take(), trace)
        yield Piece(text.finish(), None, finish)
