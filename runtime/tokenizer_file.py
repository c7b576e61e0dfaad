"""A model's tokenizer, as the folder holds it."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import FolderError


def load_tokenizer(path: Path) -> Any:
    """Load a `tokenizers.Tokenizer`; raise `FolderError` for a file that is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise FolderError(
            f"{path}: not a tokenizer file ({error}); export the folder again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TokenIds:
    """Which id has which name, copied out of a tokenizer once: that alone takes time."""

    def __init__(self, tokenizer: Any) -> None:
        self._ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)

    @property
    def size(self) -> int:
        """One more than the highest id, which is not the number of tokens: some tokenizers leave
        ids out.
        """
        return max(self._ids.values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A checksum: equal where ids mean the same tokens."""
        names = [""] * self.size
        for name, token in self._ids.items():
            names[token] = name
        return hashlib.sha256("\0".join(names).encode()).hexdigest()
