"""Small tokenizers of the kinds that models use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = (
    "the cat sat on the mat, then the other cat sat on the other mat",
    "def total(values):\n    return sum(values)\n\tif values else 0\r\n",
    "größer, schöner, weiter; été, déjà, là-bas; 한국어 한글 🙂🙂",
    "1234 + 5678 = 6912, 12 * 34 = 408",
)
# What tokenizers have been known to lose.
AWKWARD_TEXTS = (
    "",
    " ",
    "  two  spaces  ",
    "line\r\nline\r\n\n\n",
    "\tif x:\n\t\treturn",
    " " * 33 + "deep",
    "한국어 안녕하세요",
    "👩‍👩‍👧‍👦 🙂 é",
    "it 's a . \u2581 test </s> <unk> <0x0A>",
    "\x00\x7f\xad\ufffd",
)


def byte_level(
    size: int = 400,
    *,
    texts: Iterable[str] = TEXTS,
    digits: bool = False,
    every_byte: bool = True,
    special: Sequence[str] = ("<|end|>", "<|mark|>"),
) -> Tokenizer:
    """Train byte-level BPE; without `every_byte` it knows only those of the texts."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if every_byte else []
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level_of(pieces: Sequence[str]) -> Tokenizer:
    """Make byte-level BPE of these printed pieces, ids in order, without merges."""
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(
    pieces: Sequence[str] | None = None, *, byte_fallback: bool = True, bos: bool = True
) -> Tokenizer:
    """Make SentencePiece BPE as Llama has it: a space before the text, byte pieces, BOS."""
    if pieces is None:
        words = (
            "\u2581the",
            "\u2581cat",
            "at",
            "\u2581s",
            "\u2581\u2581",
            "\u2581def",
            "ret",
            "한국",
        )
        pieces = ["\u2581", *_letters(TEXTS), *_prefixes(words)]
    vocab = ["<unk>", "<s>", "</s>"]
    if byte_fallback:
        vocab += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab += [piece for piece in dict.fromkeys(pieces) if piece not in vocab]
    known = set(vocab)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(vocab)},
            merges,
            unk_token="<unk>",
            byte_fallback=byte_fallback,
            fuse_unk=True,
        )
    )
    return changed(
        tokenizer,
        added_tokens=[special_token(i, vocab[i]) for i in range(3)],
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        post_processor=_BOS_FIRST if bos else None,
    )


def unigram() -> Tokenizer:
    """Make Unigram with Metaspace, which lacks most characters."""
    words = ("\u2581the", "\u2581cat", "\u2581sat", "\u2581on", "at", "th", "\u2581")
    letters = _letters(TEXTS[:2])
    pieces = [("<unk>", 0.0), *((w, -2.0) for w in words), *((x, -6.0) for x in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def permuted(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy in which the pieces that are no added tokens have each other's ids."""
    rules = json.loads(tokenizer.to_str())
    fixed = {entry["id"] for entry in rules["added_tokens"]}
    vocab = rules["model"]["vocab"]
    ids = [token for token in vocab.values() if token not in fixed]
    moved = dict(zip(ids, [*ids[1:], *ids[:1]], strict=True))
    rules["model"]["vocab"] = {piece: moved.get(token, token) for piece, token in vocab.items()}
    return Tokenizer.from_str(json.dumps(rules))


def changed(tokenizer: Tokenizer, **rules: Any) -> Tokenizer:
    """Return a copy with some parts of its `tokenizer.json` replaced."""
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | rules))


def with_added(tokenizer: Tokenizer, *texts: str) -> Tokenizer:
    """Return a copy with added tokens that are not special."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return copy


def with_special(tokenizer: Tokenizer, *texts: str) -> Tokenizer:
    """Return a copy in which some tokens are special."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens(list(texts))
    return copy


def special_token(token: int, content: str) -> dict[str, Any]:
    """Return the entry of a special token in `added_tokens`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True, **flags}


_BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}


def _letters(texts: Iterable[str]) -> list[str]:
    return sorted({letter for text in texts for letter in text} - set(" \n\t\r🙂"))


def _prefixes(words: Iterable[str]) -> list[str]:
    return [word[:length] for word in words for length in range(2, len(word) + 1)]
