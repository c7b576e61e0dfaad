"""From token ids to text that can be shown at once.

A token may end in the middle of a character, and SentencePiece-like decoders treat the first token
of a text differently from the others. So text is always decoded together with the piece before it,
and what may still change is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no character yet
_LONGEST_CHARACTER = 8  # tokens; byte tokens need at most 4, then the bytes really are invalid
_MAY_GROW = 3  # signs at the end that may still become a character of 4 bytes
_LONGEST_WINDOW = 64  # ids decoded at once; only endless broken bytes or special tokens reach it


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that decoding needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some ids."""
        ...


class TextStream:
    """Turns one request's tokens into pieces of text, and finds stop strings in it.

    The pieces put together are the answer: the decoded tokens up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._window = 0  # ids from here on are decoded together, the first ones as context
        self._settled = 0  # ids before this one gave text that no later id changes
        self._given = 0  # characters of the window's text that were released
        self._held = ""  # text that may be the beginning of a stop string
        self._pieces: list[str] = []
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; return whether a stop string is complete, after which nothing is added any
        more.
        """
        if self.stopped:
            return True
        self._ids.append(token)
        fresh = self._fresh_text(final=False)
        if fresh:
            self._release(fresh)
        return self.stopped

    def take(self) -> str:
        """Return the text that became certain since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def finish(self) -> str:
        """Return what was still held back; the text is complete now."""
        if not self.stopped:
            self._release(self._fresh_text(final=True))
            if not self.stopped:
                self._pieces.append(self._held)
                self._held = ""
        return self.take()

    def _fresh_text(self, final: bool) -> str:
        text = self._tokenizer.decode(self._ids[self._window :])
        open_end = 0 if final else min(len(text) - len(text.rstrip(_UNFINISHED)), _MAY_GROW)
        if open_end and len(self._ids) - self._settled < _LONGEST_CHARACTER:
            return ""
        fresh = text[self._given : len(text) - open_end]
        self._given += len(fresh)
        if fresh and not open_end:
            # The next piece is decoded behind these ids; keeping them makes spaces between pieces
            # come out right. Ids that gave no text would not do: a decoder skips special tokens.
            self._move_window(self._settled, open_end)
            self._settled = len(self._ids)
        elif len(self._ids) - self._window > _LONGEST_WINDOW:
            self._settled = len(self._ids) - _LONGEST_WINDOW // 4
            self._move_window(self._settled, open_end)
        return fresh

    def _move_window(self, start: int, open_end: int) -> None:
        self._window = start
        self._given = len(self._tokenizer.decode(self._ids[start:])) - open_end

    def _release(self, fresh: str) -> None:
        self._held += fresh
        hits = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            self._pieces.append(self._held[: min(hits)])
            self._held = ""
            self.stopped = True
            return
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        self._pieces.append(self._held[:cut])
        self._held = self._held[cut:]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
