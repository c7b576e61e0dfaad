"""Small tokenizers of different families that spell the same texts differently."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.runtime.vocabulary import Vocabulary

TEXT = """The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.
def add(a, b):\n    return a + b\n\n\tprint(add(12, 345))\r\n
Therefore the counter counts: 1, 2, 3, 10, 100 and 1000. Ünïcödé, 한국어, émoji 🙂🚀.
She sells sea shells by the sea shore, and the shells she sells are sea shells for sure.
"""
END, MARK = "<|end|>", "<|mark|>"


@cache
def byte_level(vocab_size: int, specials: tuple[str, ...] = (END, MARK)) -> Tokenizer:
    """Return a byte-level BPE tokenizer with all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True) for name in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@cache
def pair(draft_size: int = 270, target_size: int = 380) -> VocabMap:
    """Return the map from a small vocabulary to a larger one; token 0 of both ends a text."""
    draft, target = Vocabulary(byte_level(draft_size)), Vocabulary(byte_level(target_size))
    return VocabMap.build(draft, target, draft_end=0, draft_mark=1, target_stop_ids=[0])


def pieces_text(ids: list[int], size: int) -> bytes:
    """Return the bytes of tokens of the byte-level tokenizer with that many entries."""
    vocabulary = Vocabulary(byte_level(size))
    return b"".join(vocabulary.pieces[token] for token in ids)
