"""Loads a model's tokenizer."""

from __future__ import annotations

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
