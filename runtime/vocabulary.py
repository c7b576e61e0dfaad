"""What the tokens of a tokenizer mean, in bytes.

Two vocabularies are comparable only byte by byte: one writes a line feed as `<0x0A>`, another as
`Ċ`, and what one prints as `é` is a single byte of it in the other. So every token has exactly the
bytes it stands for wherever it appears in a text, and a token that is no text (special, unknown)
has none. Only vocabularies whose tokens always mean the same bytes can be described like this:
byte-level ones, and SentencePiece's BPE and Unigram with a marker for the space.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import VocabularyError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE_MARKER = "\u2581"
_MARK_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARKER}
_UNMARK_SPACES = {"type": "Replace", "pattern": {"String": _SPACE_MARKER}, "content": " "}
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEXTS_AT_ONCE = 4096  # their encodings take a few megabytes


class Vocabulary:
    """The bytes of every token id, and how bytes are cut into tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read a tokenizer; raise `VocabularyError` for one whose tokens are not fixed bytes."""
        rules = json.loads(tokenizer.to_str())
        self.tokenizer = tokenizer
        self.is_byte_level = _is_byte_level(rules)
        byte_fallback = not self.is_byte_level and bool(rules["model"].get("byte_fallback"))
        added = {entry["id"] for entry in rules["added_tokens"]}
        ids = tokenizer.get_vocab(with_added_tokens=True)
        size = max(ids.values(), default=-1) + 1
        self.pieces: list[bytes] = [b""] * size  # empty: no text, or no such token
        self.special: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.special[list(_textless(rules, ids))] = True
        self._byte_pieces: set[int] = set()
        for string, token in ids.items():
            if self.special[token]:
                continue
            if self.is_byte_level:
                # Added tokens are matched in the text itself, not in its printable form.
                self.pieces[token] = string.encode() if token in added else _printed_bytes(string)
            elif byte_fallback and (match := _BYTE_PIECE.fullmatch(string)):
                self.pieces[token] = bytes.fromhex(match[1])
                self._byte_pieces.add(token)
            else:
                self.pieces[token] = string.replace(_SPACE_MARKER, " ").encode()

    def __len__(self) -> int:
        """Return one more than the highest id."""
        return len(self.pieces)

    @cached_property
    def canonical(self) -> dict[bytes, int]:
        """The token that writes a byte string: an ordinary piece rather than a byte piece, then the
        lowest id.
        """
        tokens: dict[bytes, int] = {}
        for token in sorted(range(len(self)), key=lambda token: token in self._byte_pieces):
            if self.pieces[token]:
                tokens.setdefault(self.pieces[token], token)
        return tokens

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over ids, bytes and kinds: equal for vocabularies that mean the same."""
        digest = hashlib.sha256(np.array([len(piece) for piece in self.pieces], "<u4").tobytes())
        digest.update(b"".join(self.pieces))
        digest.update(self.special.tobytes())
        return digest.hexdigest()

    def segment(self, texts: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Cut each text into tokens as the tokenizer does in the middle of a longer text.

        Where it would lose a byte (half a character, a text that it normalises) the fewest tokens
        that give exactly these bytes are taken; `()` where none do.
        """
        cuts: list[tuple[int, ...]] = [()] * len(texts)
        whole = [(i, text) for i, text in enumerate(map(_as_text, texts)) if text is not None]
        segmenter = _segmenter(self.tokenizer)
        for first in range(0, len(whole), _TEXTS_AT_ONCE):
            batch = whole[first : first + _TEXTS_AT_ONCE]
            encodings = segmenter.encode_batch_fast(
                [text for _, text in batch], add_special_tokens=False
            )
            for (i, _), encoding in zip(batch, encodings, strict=True):
                ids = tuple(encoding.ids)
                if b"".join([self.pieces[token] for token in ids]) == texts[i]:
                    cuts[i] = ids
        return [cut or self._fewest_tokens(text) for cut, text in zip(cuts, texts, strict=True)]

    @cached_property
    def _longest_piece(self) -> int:
        return max(map(len, self.pieces), default=0)

    def _fewest_tokens(self, text: bytes) -> tuple[int, ...]:
        """Return the shortest way to write `text`; of several, one with longer tokens first."""
        # For each place in the text: how many tokens it takes from there, and where the next ends.
        best: list[tuple[int, int] | None] = [None] * len(text) + [(0, 0)]
        for start in range(len(text) - 1, -1, -1):
            for end in range(min(len(text), start + self._longest_piece), start, -1):
                rest, known = best[end], best[start]
                if rest is None or (known is not None and known[0] <= rest[0] + 1):
                    continue
                if text[start:end] in self.canonical:
                    best[start] = (rest[0] + 1, end)
        tokens: list[int] = []
        start = 0
        while start < len(text) and (step := best[start]) is not None:
            tokens.append(self.canonical[text[start : step[1]]])
            start = step[1]
        return tuple(tokens)


def _is_byte_level(rules: Mapping[str, Any]) -> bool:
    """Tell byte-level from SentencePiece; raise `VocabularyError` for anything else."""
    model = rules["model"]
    steps = [*_members(rules["pre_tokenizer"]), *_members(rules["decoder"])]
    if model["type"] not in ("BPE", "Unigram"):
        raise _refusal(model["type"])
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise _refusal(f"{model['type']} with {affix} {model[affix]!r}")
    if any(step["type"] == "ByteLevel" for step in steps):
        return True
    has_marker = (
        any(step.get("replacement") == _SPACE_MARKER for step in steps)
        or _UNMARK_SPACES in steps
        or _MARK_SPACES in _members(rules["normalizer"])
    )
    if not has_marker:
        raise _refusal(f"{model['type']} with neither a byte alphabet nor a marker for spaces")
    return False


def _refusal(kind: str) -> VocabularyError:
    return VocabularyError(
        f"a tokenizer of kind {kind}, expected byte-level, or SentencePiece BPE or Unigram: the "
        "bytes of its tokens are not fixed; use a model with another tokenizer"
    )


def _textless(rules: Mapping[str, Any], ids: Mapping[str, int]) -> Iterator[int]:
    """Yield the tokens that are no text: special ones, unknown, padding."""
    yield from (entry["id"] for entry in rules["added_tokens"] if entry["special"])
    for component, name in (("model", "unk_token"), ("padding", "pad_token")):
        string = (rules[component] or {}).get(name)
        if string is not None and string in ids:
            yield ids[string]
    if (unknown := rules["model"].get("unk_id")) is not None:
        yield unknown


def _segmenter(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer without what depends on where a text begins or ends."""
    from tokenizers import Tokenizer

    rules = json.loads(tokenizer.to_str())
    marks = _MARK_SPACES in _members(rules["normalizer"])
    rules["normalizer"] = _MARK_SPACES if marks else None
    for step in _members(rules["pre_tokenizer"]):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        elif step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
    rules.update(post_processor=None, truncation=None, padding=None)
    segmenter = Tokenizer.from_str(json.dumps(rules))
    segmenter.encode_special_tokens = True  # `</s>` in a text is four characters
    return segmenter


def _members(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder, sequences unfolded."""
    if component is None:
        return []
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in component:
            return [step for member in component[key] for step in _members(member)]
    return [component]


def _alphabet() -> dict[int, int]:
    """Return GPT-2's printable alphabet, from character to byte; others go to no byte at all."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {byte: byte for byte in printable} | {byte: 0x100 for byte in hidden}
    return table | {0x100 + i: byte for i, byte in enumerate(hidden)}


_ALPHABET = _alphabet()


def _printed_bytes(string: str) -> bytes:
    """Read a byte-level token; one outside the alphabet is decoded as its own text."""
    try:
        return string.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return string.encode()


def _as_text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
