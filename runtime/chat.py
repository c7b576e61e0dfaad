"""A conversation in the terminal, or over pipes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from .config import DecodeConfig
from .engine import Engine, Message
from .errors import FolderError, PromptError
from .stats import RunStats

HELP = """\
/help   shows this
/reset  begins a new conversation; what was learned stays (edgedraft state forget erases it)
/stats  shows the statistics of the session
/quit   leaves, as Ctrl-D does; Ctrl-C stops an answer"""


class Chat:
    """One session: the conversation so far, and what its answers cost."""

    def __init__(
        self,
        engine: Engine,
        config: DecodeConfig,
        system: str | None,
        out: TextIO,
        notes: TextIO,
    ) -> None:
        """Answers go to `out`, everything else to `notes`.

        Raises `FolderError` for a model without a chat template.
        """
        if engine.target.folder.chat_template is None:
            raise FolderError(
                f"{engine.target.folder.path}: has no chat template, so it cannot hold a "
                "conversation; try edgedraft generate"
            )
        self._engine = engine
        self._config = config
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []  # user and assistant in turn
        self._total = RunStats()
        self._out = out
        self._notes = notes

    def run(self, read: Callable[[], str]) -> None:
        """Answer every line that `read` returns, until it raises `EOFError` or a line says so."""
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("\n(/quit or Ctrl-D leaves)")
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        if line == "/help":
            self._note(HELP)
        elif line == "/reset":
            self._turns.clear()
            self._note("(the conversation starts anew)")
        elif line == "/stats":
            self._note(self._summary(self._total))
        else:
            self._note(f"(no command {line}; /help lists them)")

    def _answer(self, text: str) -> None:
        turns: list[Message] = [*self._turns, {"role": "user", "content": text}]
        try:
            turns, ids = self._fit(turns)
            answer, reason = "", None
            with _interrupt_cancels(self._engine):
                for piece in self._engine.stream(ids, self._config):
                    answer += piece.text
                    reason = piece.finish_reason
                    self._out.write(piece.text)
                    self._out.flush()
        except PromptError as error:
            self._note(f"({error}; the message was left out)")
            return
        self._out.write("\n")
        self._out.flush()
        self._turns = [*turns, {"role": "assistant", "content": answer}]
        self._total += self._engine.stats
        if reason == "context":
            self._note("(the context is full: the answer ends here)")
        elif reason == "length":
            self._note(f"(cut after {self._config.max_tokens} tokens: see --max-tokens)")
        elif reason == "cancelled":
            self._note("(stopped)")
        self._note(f"[{self._summary(self._engine.stats)}]")

    def _fit(self, turns: list[Message]) -> tuple[list[Message], list[int]]:
        """Drop the oldest turns until the conversation leaves room for an answer."""
        context = self._engine.target.context_length
        room = context - min(self._config.max_tokens, context // 4)
        kept = turns
        while len(ids := self._engine.encode([*self._system, *kept])) > room and len(kept) > 1:
            kept = kept[2:]
        if len(kept) < len(turns):
            self._note(
                f"(the context holds {context} tokens: the oldest {len(turns) - len(kept)} messages"
                " are forgotten; /reset starts anew)"
            )
        return kept, ids

    def _summary(self, stats: RunStats) -> str:
        plan = self._engine.plan
        return stats.summary(plan.plain_s if plan else None)

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


@contextmanager
def _interrupt_cancels(engine: Engine) -> Iterator[None]:
    """Let the first Ctrl-C end the answer; a second one interrupts the program."""

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        engine.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
