"""A model's tokenizer, as the folder holds it."""

from __future__ import annotations

import hashlib
import json
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


def ids_fingerprint(tokenizer: Any) -> str:
    """Return a checksum of which id has which name: equal where ids mean the same tokens."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return hashlib.sha256(json.dumps(ids, sort_keys=True).encode()).hexdigest()
