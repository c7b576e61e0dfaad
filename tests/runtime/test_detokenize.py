"""Pieces of text put together are the decoded answer, and no piece shows half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from edgedraft.runtime.detokenize import TextStream
from fakes import ByteTokenizer
from graphs import byte_level_tokenizer, sentencepiece_tokenizer

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

TOKENIZERS: dict[str, Tokenizer] = {
    "byte-level": byte_level_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
    "llama-2": sentencepiece_tokenizer(llama2_decoder=True),
}
TEXTS = [
    "the thing and the other",
    "  two  spaces  inside   and around  ",
    "\n\nline\n  indented\ttab \n",
    "it 's odd , is n't it ?  .",
    "naïve café 😀👩‍👩‍👧 漢字 ﷽ end",
    "😀😀😀",
    " 😀 a",
    "",
]
texts = st.text(
    st.one_of(st.sampled_from(" \n\taehint.,▁é😀漢\u200d"), st.characters(codec="utf-8")),
    max_size=40,
)


def stream(tokenizer: object, ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """Return the pieces of an answer, one per token and one for the end."""
    text = TextStream(tokenizer, stop)  # type: ignore[arg-type]
    pieces = []
    for token in ids:
        stopped = text.push(token)
        pieces.append(text.take())
        if stopped:
            break
    return [*pieces, text.finish()]


def content_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_the_decoded_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = content_ids(tokenizer, text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=150)
@given(name=st.sampled_from(sorted(TOKENIZERS)), text=texts)
def test_pieces_of_any_text_are_the_decoded_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = content_ids(tokenizer, text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=150)
@given(ids=st.lists(st.integers(0, 289), max_size=40))
def test_pieces_of_any_byte_level_tokens_are_the_decoded_text(ids: list[int]) -> None:
    """Invalid bytes and special tokens included."""
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(["sentencepiece", "llama-2"]))
def test_pieces_of_any_sentencepiece_tokens_are_the_decoded_text(
    data: st.DataObject, name: str
) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    byte_pieces = {i for i in range(size) if tokenizer.id_to_token(i).startswith("<0x")}
    ids = data.draw(
        st.lists(st.sampled_from([i for i in range(size) if i not in byte_pieces]), max_size=20)
    )
    for text in data.draw(st.lists(st.sampled_from(["é", "😀", "漢", "\t"]), max_size=3)):
        spelled = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in text.encode()]
        at = data.draw(st.integers(0, len(ids)))
        # A run of byte pieces that is no valid text as a whole is all invalid to this decoder.
        assume(not {*ids[at - 1 : at], *ids[at : at + 1]} & byte_pieces)
        ids[at:at] = spelled
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=100)
@given(data=st.data(), name=st.sampled_from(["sentencepiece", "llama-2"]))
def test_wild_byte_pieces_never_break_the_stream(data: st.DataObject, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    assert isinstance("".join(stream(tokenizer, ids)), str)


def test_a_character_that_spans_tokens_is_shown_whole() -> None:
    pieces = stream(ByteTokenizer(), "a😀b".encode())
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_invalid_bytes_do_not_hold_the_text_back_for_ever() -> None:
    ids = [*b"ok ", *[0xFF] * 30, *b" fine"]
    text = TextStream(ByteTokenizer())
    for token in ids[:-2]:
        text.push(token)
    assert len(text.take()) > 20
    assert "".join(stream(ByteTokenizer(), ids)) == bytes(ids).decode(errors="replace")


def test_a_character_after_invalid_bytes_is_not_lost() -> None:
    for count in range(20):
        ids = [*[0xFF] * count, *"😀é".encode(), *b"!"]
        assert "".join(stream(ByteTokenizer(), ids)).endswith("😀é!"), count


def test_a_real_replacement_character_passes() -> None:
    text = "a\ufffdb\ufffd"
    assert "".join(stream(ByteTokenizer(), text.encode())) == text


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    assert "".join(stream(ByteTokenizer(), "a😀".encode()[:-1])) == "a\ufffd"


def test_a_special_token_in_the_middle_keeps_the_space_after_it() -> None:
    for name in ("sentencepiece", "llama-2"):
        tokenizer = TOKENIZERS[name]
        a, the = tokenizer.token_to_id("a"), tokenizer.token_to_id("▁the")
        ids = [a, tokenizer.token_to_id("</s>"), the, tokenizer.token_to_id("<s>"), the]
        assert "".join(stream(tokenizer, ids)) == "a the the"


def test_a_stop_string_ends_the_text_before_it() -> None:
    assert "".join(stream(ByteTokenizer(), b"one two three", ["two"])) == "one "
    assert "".join(stream(ByteTokenizer(), b"one two three", ["three", "wo"])) == "one t"
    assert "".join(stream(ByteTokenizer(), b"stop", ["stop"])) == ""


def test_text_that_may_begin_a_stop_string_is_held_back_and_released() -> None:
    pieces = stream(ByteTokenizer(), b"a</b></s>x", ["</s>"])
    assert pieces == ["a", "", "", "</b", ">", "", "", "", "", ""]
    assert stream(ByteTokenizer(), b"ab<", ["<|"]) == ["a", "b", "", "<"]


def test_a_stop_string_of_repeated_letters_is_found_where_it_begins() -> None:
    assert "".join(stream(ByteTokenizer(), b"aaab", ["aab"])) == "a"
    assert "".join(stream(ByteTokenizer(), b"ababac", ["abac"])) == "ab"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", ["e o", "😀", "\n\n", "t", "é ", "other"])
def test_a_stop_string_across_tokens_ends_where_it_begins_in_the_whole_text(
    name: str, stop: str
) -> None:
    tokenizer = TOKENIZERS[name]
    for text in ("the other the other", "café 😀😀 x", "a\n\n\nb", "nothing of it"):
        ids = content_ids(tokenizer, text)
        whole = tokenizer.decode(ids)
        expected = whole[: whole.index(stop)] if stop in whole else whole
        assert "".join(stream(tokenizer, ids, [stop])) == expected


@settings(max_examples=150)
@given(
    text=st.text("ab\né", max_size=30),
    stops=st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3),
)
def test_the_first_complete_stop_string_wins(text: str, stops: list[str]) -> None:
    shown = "".join(stream(ByteTokenizer(), text.encode(), stops))
    ends = [
        (end, text[:end].index(s))
        for s in stops
        for end in range(len(text) + 1)
        if text[:end].endswith(s)
    ]
    if not ends:
        assert shown == text
        return
    first = min(end for end, _ in ends)
    assert shown == text[: min(first - len(s) for s in stops if text[:first].endswith(s))]


def test_nothing_is_added_after_a_stop_string() -> None:
    text = TextStream(ByteTokenizer(), ["b"])
    assert [text.push(t) for t in b"abc"] == [False, True, True]
    assert text.take() == "a"
    assert text.finish() == ""
    assert text.stopped
