"""A token is the bytes it stands for in any text, whatever its tokenizer prints."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from edgedraft.runtime.errors import VocabularyError
from edgedraft.runtime.vocabulary import Vocabulary
from tokenizers_for_tests import (
    AWKWARD_TEXTS,
    TEXTS,
    byte_level,
    byte_level_of,
    changed,
    permuted,
    sentencepiece,
    special_token,
    unigram,
    with_added,
)

MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "digits": lambda: byte_level(digits=True),
    "with added tokens": lambda: with_added(byte_level(), "été", "   ", "<think>"),
    "sentencepiece": sentencepiece,
    "metaspace": lambda: changed(
        sentencepiece(),
        normalizer=None,
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "first",
            "split": False,
        },
    ),
}


def read(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.pieces[token] for token in tokens)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("text", [*TEXTS, *AWKWARD_TEXTS])
def test_the_tokens_of_a_text_have_its_bytes(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    vocabulary = Vocabulary(tokenizer)
    # Between letters, since SentencePiece treats spaces at the beginning in its own way.
    text = "a" + text.replace("</s>", "").replace("<unk>", "").replace("\u2581", "") + "a"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert read(vocabulary, tokens).removeprefix(b" ") == text.encode()


@pytest.mark.parametrize("make", [*MAKERS.values(), unigram], ids=[*MAKERS, "unigram"])
@pytest.mark.parametrize("text", [*TEXTS, *AWKWARD_TEXTS, *"a\xe9\u2581\ud55c"])
def test_a_segmented_text_has_exactly_its_bytes_or_no_tokens(
    make: Callable[[], Tokenizer], text: str
) -> None:
    vocabulary = Vocabulary(make())
    content = text.encode()
    for part in (content, content[1:], content[:-1]):
        (tokens,) = vocabulary.segment([part])
        writable = {bytes([byte]) for byte in part} <= vocabulary.canonical.keys()
        assert read(vocabulary, list(tokens)) == part or not (tokens or writable)


def test_a_byte_level_piece_is_read_through_the_printable_alphabet() -> None:
    vocabulary = Vocabulary(byte_level_of(["\u0120a", "\u010a", "\xe9", "\u0143", "\u0394"]))
    assert vocabulary.pieces == [b" a", b"\n", b"\xe9", b"\xad", "\u0394".encode()]


def test_an_added_token_of_a_byte_level_vocabulary_is_plain_text() -> None:
    tokenizer = with_added(byte_level(), "\xe9", "  ", "<think>")
    vocabulary = Vocabulary(tokenizer)
    for text in ("\xe9", "  ", "<think>"):
        (token,) = tokenizer.encode(text).ids
        assert vocabulary.pieces[token] == text.encode()
        assert not vocabulary.special[token]


def test_special_unknown_and_padding_tokens_have_no_bytes() -> None:
    tokenizer = sentencepiece()
    tokenizer.enable_padding(pad_id=300, pad_token=tokenizer.id_to_token(300))
    vocabulary = Vocabulary(tokenizer)
    assert set(vocabulary.special.nonzero()[0].tolist()) == {0, 1, 2, 300}
    assert {vocabulary.pieces[token] for token in (0, 1, 2, 300)} == {b""}
    unknown = Vocabulary(unigram())
    assert unknown.special[0] and not unknown.pieces[0]


def test_a_piece_that_only_looks_like_the_unknown_token_is_text() -> None:
    vocabulary = Vocabulary(byte_level_of(["<unk>", "</s>", "<0x0A>"]))
    assert vocabulary.pieces == [b"<unk>", b"</s>", b"<0x0A>"]
    assert not vocabulary.special.any()


def test_a_byte_piece_is_a_byte_only_where_the_model_falls_back_to_bytes() -> None:
    with_bytes, without = (
        Vocabulary(sentencepiece()),
        Vocabulary(sentencepiece(["<0x0A>", "\u2581"], byte_fallback=False)),
    )
    assert with_bytes.pieces[with_bytes.tokenizer.token_to_id("<0x0A>")] == b"\n"
    assert without.pieces[without.tokenizer.token_to_id("<0x0A>")] == b"<0x0A>"


def test_the_marker_is_a_space_wherever_it_stands() -> None:
    vocabulary = Vocabulary(sentencepiece(["\u2581", "\u2581a\u2581b\u2581", "\u2581\u2581"]))
    assert vocabulary.pieces[259:] == [b" ", b" a b ", b"  "]


def test_an_ordinary_piece_is_preferred_to_its_byte_piece_and_else_the_lowest_id() -> None:
    vocabulary = Vocabulary(sentencepiece(["a", "\u2581", " "]))
    assert vocabulary.canonical[b"a"] == vocabulary.tokenizer.token_to_id("a")
    assert vocabulary.canonical[b"b"] == vocabulary.tokenizer.token_to_id("<0x62>")
    assert vocabulary.canonical[b" "] == vocabulary.tokenizer.token_to_id("\u2581")


def test_ids_that_no_token_has_stay_empty() -> None:
    rules = json.loads(byte_level_of(["a", "b", "c"]).to_str())
    rules["model"]["vocab"] = {"a": 0, "b": 4, "c": 9}
    vocabulary = Vocabulary(Tokenizer.from_str(json.dumps(rules)))
    assert len(vocabulary) == 10
    assert [i for i, content in enumerate(vocabulary.pieces) if content] == [0, 4, 9]
    assert not vocabulary.special.any()


def test_fingerprints_tell_vocabularies_apart_by_meaning_only() -> None:
    tokenizer = byte_level()
    same = Tokenizer.from_str(tokenizer.to_str())
    prints = [Vocabulary(t).fingerprint for t in (tokenizer, same, permuted(tokenizer))]
    assert prints[0] == prints[1] != prints[2]
    different = [["a", "b"], ["b", "a"], ["ab", "c"], ["a", "bc"], ["a", "b", "c"]]
    assert len({Vocabulary(byte_level_of(pieces)).fingerprint for pieces in different}) == 5


def test_a_special_token_and_a_missing_one_have_different_fingerprints() -> None:
    rules = json.loads(byte_level_of(["a", "x", "c"]).to_str())
    special = changed(byte_level_of(["a", "x", "c"]), added_tokens=[special_token(1, "x")])
    rules["model"]["vocab"] = {"a": 0, "c": 2}
    with_hole = Tokenizer.from_str(json.dumps(rules))
    assert Vocabulary(special).pieces == Vocabulary(with_hole).pieces
    assert Vocabulary(special).fingerprint != Vocabulary(with_hole).fingerprint


def test_a_segment_knows_no_beginning_of_a_text() -> None:
    """No BOS, no dummy prefix, no special tokens: it stands in the middle of something."""
    llama = Vocabulary(sentencepiece())
    (cat, end, new_line) = llama.segment([b" cat", b"</s>", b"\n"])
    assert [llama.pieces[token] for token in cat] == [b" cat"]
    assert read(llama, list(end)) == b"</s>" and len(end) == 4
    assert new_line == (llama.tokenizer.token_to_id("<0x0A>"),)


# Merged in this order, "abcd" becomes a + bcd, while ab + cd is as short.
_LETTERS = ["a", "b", "c", "d", "bc", "bcd", "ab", "cd", "\u2581", *"</s>"]
_METASPACE = {
    "type": "Metaspace",
    "replacement": "\u2581",
    "prepend_scheme": "always",
    "split": True,
}


@pytest.mark.parametrize("text", [b"abcd", b"</s>abcd"])
@pytest.mark.parametrize(
    "tokenizer",
    [
        sentencepiece(_LETTERS),
        changed(sentencepiece(_LETTERS), normalizer=None, pre_tokenizer=_METASPACE),
        changed(
            sentencepiece(_LETTERS),
            normalizer=None,
            pre_tokenizer=json.loads(
                pre_tokenizers.ByteLevel(add_prefix_space=True).__getstate__()
            ),
        ),
    ],
    ids=["prepend", "metaspace", "byte-level"],
)
def test_a_prefix_or_a_special_token_does_not_keep_a_text_from_the_model(
    tokenizer: Tokenizer, text: bytes
) -> None:
    vocabulary = Vocabulary(tokenizer)
    (tokens,) = vocabulary.segment([text])
    assert [vocabulary.pieces[token] for token in tokens[-2:]] == [b"a", b"bcd"]


def test_a_segment_is_the_tokenizers_own() -> None:
    vocabulary = Vocabulary(byte_level(digits=True))
    for text in TEXTS:
        assert list(vocabulary.segment([text.encode()])[0]) == vocabulary.tokenizer.encode(text).ids


def test_a_normalizer_does_not_reach_a_segment() -> None:
    tokenizer = changed(byte_level(), normalizer={"type": "NFC"})
    decomposed = "e\u0301".encode()
    vocabulary = Vocabulary(tokenizer)
    (tokens,) = vocabulary.segment([decomposed])
    assert read(vocabulary, list(tokens)) == decomposed
    assert read(vocabulary, tokenizer.encode("e\u0301").ids) != decomposed


def test_what_the_model_cannot_cut_is_put_together_where_there_is_any_way() -> None:
    # Greedy from the left would take "ab" and be stuck.
    vocabulary = Vocabulary(byte_level_of(["ab", "a", "bc", "bcd"]))
    assert vocabulary.segment([b"abc", b"abcd", b"abd", b"\xff", b""]) == [
        (1, 2),
        (1, 3),
        (),
        (),
        (),
    ]
    # Of equally many tokens, the longer ones first.
    assert Vocabulary(byte_level_of(["a", "bcd", "ab", "cd"])).segment([b"abcd"]) == [(2, 3)]


def test_bytes_that_the_vocabulary_lacks_cannot_be_segmented() -> None:
    vocabulary = Vocabulary(byte_level(texts=["abc abc"], every_byte=False))
    (known, unknown) = vocabulary.segment([b"cab", b"cabin"])
    assert read(vocabulary, list(known)) == b"cab"
    assert unknown == ()


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))


def with_suffix() -> Tokenizer:
    return Tokenizer(models.BPE({"a": 0, "a</w>": 1}, [], end_of_word_suffix="</w>"))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (word_piece, "WordPiece"),
        (lambda: Tokenizer(models.WordLevel({"a": 0}, "a")), "WordLevel"),
        (with_suffix, "BPE with end_of_word_suffix '</w>'"),
        (lambda: Tokenizer(models.BPE({"a": 0}, [])), "BPE with neither"),
    ],
)
def test_a_tokenizer_whose_tokens_are_not_fixed_bytes_is_refused_in_one_line(
    make: Callable[[], Tokenizer], kind: str
) -> None:
    with pytest.raises(VocabularyError, match=f"^a tokenizer of kind {kind}[^\n]*$"):
        Vocabulary(make())
