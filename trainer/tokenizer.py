"""The drafter's own tokenizer: byte-level BPE, digits split one by one.

Every byte string can be written, and decoding gives back exactly what was encoded: there is no
dummy prefix and no clean-up. Two tokens have no bytes: `<|end|>` stands for the end of an answer
and between texts, `<|mark|>` for any special token of a target, such as a chat template's roles.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgedraft.runtime.folder import MARK
from edgedraft.runtime.state import write_atomic

from .errors import TrainError

END = "<|end|>"
END_ID = 0
MARK_ID = 1
FILE = "tokenizer.json"
_FEWEST = 256 + 2  # the bytes and the two tokens without


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of `vocab_size` entries from texts."""
    if vocab_size < _FEWEST:
        raise ValueError(f"vocab_size must be >= {_FEWEST}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END, special=True), AddedToken(MARK, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` to a folder."""
    write_atomic(folder / FILE, tokenizer.to_str().encode())


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a folder; raise `TrainError` unless it is a drafter's."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / FILE))
    except Exception as error:  # tokenizers raises plain `Exception`
        raise TrainError(
            f"{folder}: no readable {FILE} ({error}); make one with: edgedraft-train tokenizer"
        ) from error
    if (tokenizer.token_to_id(END), tokenizer.token_to_id(MARK)) != (END_ID, MARK_ID):
        raise TrainError(
            f"{folder}: the tokenizer must have {END} as id {END_ID} and {MARK} as id {MARK_ID}; "
            "make one with: edgedraft-train tokenizer"
        )
    return tokenizer
