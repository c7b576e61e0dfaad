"""Every target token has a spelling of exactly its bytes, and the trie reads spellings back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgedraft.runtime import vocab_map
from edgedraft.runtime.errors import DrafterError, StateError
from edgedraft.runtime.vocab_map import PairKey, VocabMap, _trie
from edgedraft.runtime.vocabulary import Vocabulary
from tokenizers_for_tests import (
    AWKWARD_TEXTS,
    TEXTS,
    byte_level,
    byte_level_of,
    permuted,
    sentencepiece,
    unigram,
    with_added,
    with_special,
)

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "digits": lambda: byte_level(330, digits=True),
    "lacking bytes": lambda: byte_level(120, every_byte=False),
    "with added tokens": lambda: with_added(byte_level(300), "été", "   ", "<think>"),
    "sentencepiece": sentencepiece,
    "sentencepiece without bytes": lambda: sentencepiece(byte_fallback=False),
    "unigram": unigram,
}
COMPLETE = ("byte-level", "digits", "with added tokens", "sentencepiece")  # have every byte
PAIRS = [(draft, target) for draft in MAKERS for target in MAKERS]


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(MAKERS[name]())


@cache
def pair(draft: str, target: str) -> VocabMap:
    return VocabMap.build(vocabulary(draft), vocabulary(target))


def read(names: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(names.pieces[token] for token in tokens)


def walk(pair: VocabMap, pieces: list[int]) -> int:
    node = 0
    for piece in pieces:
        node = pair.step(node, piece)
        assert node > 0
    return node


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_every_spelling_gives_the_bytes_of_its_token(draft: str, target: str) -> None:
    ours, theirs, table = vocabulary(draft), vocabulary(target), pair(draft, target)
    writable = {content[0] for content in ours.canonical if len(content) == 1}
    for token, content in enumerate(theirs.pieces):
        spelling = table.spelling(token)
        assert read(ours, spelling) == (content if spelling else b"")
        assert spelling or not content or not set(content) <= writable
        if content in ours.canonical:
            assert spelling == [ours.canonical[content]]


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_the_trie_finishes_every_spelling_at_a_token_of_the_same_bytes(
    draft: str, target: str
) -> None:
    theirs, table = vocabulary(target), pair(draft, target)
    for token, content in enumerate(theirs.pieces):
        if content and (spelling := table.spelling(token)):
            assert table.finished(walk(table, spelling)) == theirs.canonical[content]


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_what_may_be_drafted_is_what_the_trie_and_the_covers_know(draft: str, target: str) -> None:
    ours, theirs, table = vocabulary(draft), vocabulary(target), pair(draft, target)
    in_spellings = {p for t in theirs.canonical.values() for p in table.spelling(t)}
    covering = {piece for piece in range(len(ours)) if table.covers(piece)}
    assert set(np.flatnonzero(table.usable).tolist()) == in_spellings | covering
    for piece in covering:
        tokens = table.covers(piece)
        assert len(tokens) > 1
        assert read(theirs, tokens) == ours.pieces[piece]
        assert table.step(0, piece) < 0
        assert table.direct(piece) < 0
    for piece, content in enumerate(ours.pieces):
        direct = table.direct(piece)
        if content in theirs.canonical:
            assert direct == theirs.canonical[content]
            assert ours.canonical[content] != piece or direct == table.finished(
                table.step(0, piece)
            )
        else:
            assert direct == -1


@pytest.mark.parametrize(("draft", "target"), [pair for pair in PAIRS if pair[0] in COMPLETE])
def test_a_spelled_text_reads_like_the_target_tokens(draft: str, target: str) -> None:
    ours, theirs, table = vocabulary(draft), vocabulary(target), pair(draft, target)
    for text in (*TEXTS, *AWKWARD_TEXTS):
        tokens = theirs.tokenizer.encode(text).ids
        spelled = [piece for token in tokens for piece in table.spelling(token)]
        assert read(ours, spelled) == read(theirs, tokens)


@settings(max_examples=60)
@given(content=st.binary(max_size=40))
@pytest.mark.parametrize(
    ("draft", "target"), [("sentencepiece", "byte-level"), ("digits", "sentencepiece")]
)
def test_random_bytes_survive(draft: str, target: str, content: bytes) -> None:
    ours, theirs, table = vocabulary(draft), vocabulary(target), pair(draft, target)
    (tokens,) = theirs.segment([content])
    spelled = [piece for token in tokens for piece in table.spelling(token)]
    assert read(ours, spelled) == content


@settings(max_examples=200)
@given(
    spellings=st.sets(st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple), max_size=40),
    path=st.lists(st.integers(0, 6), max_size=7),
)
def test_the_trie_equals_a_dictionary_of_spellings(
    spellings: set[tuple[int, ...]], path: list[int]
) -> None:
    tokens = {spelling: token for token, spelling in enumerate(spellings)}
    first_child, node_piece, node_token = _trie({t: s for s, t in tokens.items()}, 6)
    unused = [np.zeros(1, np.int32)] * 6
    key = PairKey("", "", None, None, ())
    texts = np.zeros(1, np.uint32), np.zeros(0, np.uint8)
    table = VocabMap(key, *unused, first_child, node_piece, node_token, *texts)
    for pieces in [path, *map(list, tokens)]:
        node = 0
        for depth, piece in enumerate(pieces, 1):
            prefix = tuple(pieces[:depth])
            node = table.step(node, piece)
            if not any(spelling[:depth] == prefix for spelling in tokens):
                assert node == -1
                break
            assert table.finished(node) == tokens.get(prefix, -1)


@pytest.mark.parametrize("draft", MAKERS)
def test_the_bytes_of_every_draft_token_are_in_the_table(draft: str) -> None:
    ours, table = vocabulary(draft), pair(draft, "byte-level")
    assert [table.text(piece) for piece in range(len(ours))] == ours.pieces


def test_permuted_ids_are_translated_not_trusted() -> None:
    names = vocabulary("byte-level")
    other = Vocabulary(permuted(names.tokenizer))
    table = VocabMap.build(names, other)
    assert len(names) == len(other) and names.fingerprint != other.fingerprint
    moved = [t for t in range(len(names)) if names.pieces[t] and table.direct(t) != t]
    assert len(moved) > len(names) // 2
    for token in range(len(names)):
        assert table.direct(token) == other.canonical.get(names.pieces[token], -1)


def test_tokens_of_equal_bytes_share_a_spelling_and_one_of_them_is_proposed() -> None:
    target = Vocabulary(with_added(byte_level_of(["\u0120", "a", "\u0120a"]), " a"))
    table = VocabMap.build(Vocabulary(byte_level_of(["a", "\u0120"])), target)
    assert target.pieces[2] == target.pieces[3] == b" a"
    assert table.spelling(2) == table.spelling(3) == [1, 0]
    assert table.finished(walk(table, [1, 0])) == 2


def test_the_end_stands_for_every_stop_token_and_proposes_the_first() -> None:
    draft, target = vocabulary("byte-level"), vocabulary("sentencepiece")
    # A stop token may also be an ordinary one by its tokenizer's word.
    word = target.canonical[b" cat"]
    table = VocabMap.build(draft, target, draft_end=0, draft_mark=1, target_stop_ids=(2, word))
    assert table.spelling(2) == table.spelling(word) == [0]
    assert table.finished(table.step(0, 0)) == table.direct(0) == 2
    assert word not in table.node_token.tolist()
    assert word not in table.direct_token.tolist()
    assert table.usable[0]


def test_the_mark_stands_for_what_is_no_text_and_is_never_drafted() -> None:
    draft, target = vocabulary("byte-level"), vocabulary("sentencepiece")
    table = VocabMap.build(draft, target, draft_mark=1, target_stop_ids=(2,))
    assert [table.spelling(token) for token in (0, 1, 2)] == [[1], [1], [1]]
    assert table.step(0, 1) == -1
    assert not table.usable[1]
    assert [pair("byte-level", "sentencepiece").spelling(token) for token in (0, 1)] == [[], []]


def test_what_cannot_be_written_has_no_spelling_and_is_never_proposed() -> None:
    table = VocabMap.build(
        Vocabulary(byte_level_of(["a", "b"])), Vocabulary(byte_level_of(["a", "ab", "ac", "c"]))
    )
    assert [table.spelling(token) for token in range(4)] == [[0], [0, 1], [], []]
    assert sorted(table.node_token.tolist()) == [-1, 0, 1]


def test_a_draft_token_longer_than_the_targets_covers_several() -> None:
    draft = Vocabulary(byte_level_of(["abcab", "a", "b", "abx", "c"]))
    target = Vocabulary(byte_level_of(["ab", "c", "a", "b"]))
    table = VocabMap.build(draft, target)
    assert read(target, table.covers(0)) == b"abcab"
    assert table.covers(1) == table.covers(3) == []
    assert table.usable.tolist() == [True, True, True, False, True]


def test_a_draft_token_covers_nothing_that_is_a_stop_or_cannot_be_written() -> None:
    draft, target = (Vocabulary(byte_level_of(names)) for names in (["xyx", "x"], ["x", "y"]))
    table = VocabMap.build(draft, target)
    assert table.spelling(1) == table.covers(0) == []
    draft = Vocabulary(byte_level_of(["xyx", "x", "y"]))
    assert VocabMap.build(draft, target).covers(0) == [0, 1, 0]
    marked = Vocabulary(with_special(byte_level_of(["xyx", "x", "y", "<end>"]), "<end>"))
    assert VocabMap.build(marked, target, draft_end=3).covers(0) == [0, 1, 0]
    assert VocabMap.build(marked, target, draft_end=3, target_stop_ids=[1]).covers(0) == []


@pytest.mark.parametrize("wrong", [-1, 9, 5])
def test_an_end_or_a_mark_that_is_text_or_no_token_is_refused(wrong: int) -> None:
    names = Vocabulary(byte_level_of(list("abcdefg")))
    with pytest.raises(DrafterError, match=f"end token must be .* no text, got {wrong};"):
        VocabMap.build(names, names, draft_end=wrong)
    with pytest.raises(DrafterError, match=f"mark token must be .* no text, got {wrong};"):
        VocabMap.build(names, names, draft_mark=wrong)
    with pytest.raises(DrafterError, match=r"end tokens must be in \[0, 7\) .* got \[7\];"):
        VocabMap.build(names, names, target_stop_ids=[7])


def test_a_saved_table_equals_the_built_one(tmp_path: Path) -> None:
    for draft, target in PAIRS[::5]:
        table = pair(draft, target)
        table.save(tmp_path / "pair.bin")
        loaded = VocabMap.load(tmp_path / "pair.bin", table.key)
        assert loaded.key == table.key
        for name, value in vars(table).items():
            if isinstance(value, np.ndarray):
                assert np.array_equal(getattr(loaded, name), value)
                assert getattr(loaded, name).dtype == value.dtype
        assert [loaded.spelling(t) for t in range(20)] == [table.spelling(t) for t in range(20)]


def test_a_large_draft_vocabulary_takes_wider_pieces() -> None:
    many = [chr(0x4E00 + i // 256) + chr(0x3400 + i % 256) for i in range(66_000)]
    draft = Vocabulary(byte_level_of(["a", *many]))
    target = Vocabulary(byte_level_of([many[-1], "a"]))
    table = VocabMap.build(draft, target)
    assert table.spelling(0) == [66_000]
    assert table.finished(walk(table, [66_000])) == 0
    assert table.spelling_piece.dtype == np.uint32
    assert pair("byte-level", "digits").spelling_piece.dtype == np.uint16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PairKey]:
    path = tmp_path_factory.mktemp("pair") / "pair.bin"
    table = pair("lacking bytes", "digits")
    table.save(path)
    return path, table.key


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(
    share: float, saved: tuple[Path, PairKey], tmp_path: Path
) -> None:
    content = saved[0].read_bytes()
    path = tmp_path / "cut.bin"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(StateError, match="cut.bin: .*delete it"):
        VocabMap.load(path, saved[1])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_file_with_one_flipped_bit_is_refused(
    share: float, saved: tuple[Path, PairKey], tmp_path: Path
) -> None:
    content = bytearray(saved[0].read_bytes())
    content[int(len(content) * share)] ^= 4
    path = tmp_path / "flipped.bin"
    path.write_bytes(content)
    with pytest.raises(StateError, match="flipped.bin: .*delete it"):
        VocabMap.load(path, saved[1])


def test_a_foreign_or_missing_file_is_refused(saved: tuple[Path, PairKey], tmp_path: Path) -> None:
    path = tmp_path / "foreign.bin"
    path.write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(StateError, match="not a file of tables"):
        VocabMap.load(path, saved[1])
    with pytest.raises(StateError, match="cannot be read"):
        VocabMap.load(tmp_path / "none.bin", saved[1])


def test_a_file_of_another_pair_or_for_other_special_tokens_is_refused(
    saved: tuple[Path, PairKey],
) -> None:
    path, key = saved
    others = (
        replace(key, draft=key.target, target=key.draft),
        replace(key, draft="another"),
        replace(key, target="another"),
        replace(key, draft_end=0),
        replace(key, draft_mark=1),
        replace(key, target_stop_ids=(1,)),
    )
    assert len({key.file_name(), *(other.file_name() for other in others)}) == 7
    for other in others:
        with pytest.raises(StateError, match="for something else"):
            VocabMap.load(path, other)


KEY = PairKey("draft file", "target file", None, None, ())


def test_kept_tables_need_no_vocabulary(tmp_path: Path) -> None:
    draft, target = vocabulary("sentencepiece"), vocabulary("digits")
    made = VocabMap.load_or_build(KEY, lambda: (draft, target), tmp_path)
    again = VocabMap.load_or_build(KEY, lambda: pytest.fail("asked for them"), tmp_path)
    assert again.key == made.key == KEY
    assert np.array_equal(again.spelling_piece, made.spelling_piece)
    with pytest.raises(pytest.fail.Exception):
        other = replace(KEY, target="another file")
        VocabMap.load_or_build(other, lambda: pytest.fail("asked for them"), tmp_path)


@pytest.mark.parametrize("change", ["damage", "format", "tokenizers"])
def test_tables_that_cannot_be_trusted_any_more_are_replaced(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def vocabularies() -> tuple[Vocabulary, Vocabulary]:
        return vocabulary("sentencepiece"), vocabulary("digits")

    with monkeypatch.context() as before:
        if change == "format":
            before.setitem(vocab_map._FORMAT, "format_version", 1)
        elif change == "tokenizers":
            before.setattr("tokenizers.__version__", "0.0.0")
        VocabMap.load_or_build(KEY, vocabularies, tmp_path)
    (path,) = tmp_path.iterdir()
    if change == "damage":
        path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        VocabMap.load_or_build(KEY, vocabularies, tmp_path)
    assert "damaged" in caplog.text or "another version" in caplog.text
    assert list(tmp_path.iterdir()) == [path]
    VocabMap.load(path, KEY)


def test_roles_that_tokens_cannot_play_leave_no_file(tmp_path: Path) -> None:
    names = vocabulary("byte-level")
    with pytest.raises(DrafterError, match="end token must be"):
        VocabMap.load_or_build(replace(KEY, draft_end=-1), lambda: (names, names), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_a_warning_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    names = vocabulary("byte-level")
    with caplog.at_level(logging.WARNING):
        table = VocabMap.load_or_build(KEY, lambda: (names, names), blocked / "folder")
    assert "cannot be written" in caplog.text
    assert table.spelling(300) == [300]
