"""The drafter's tokenizer loses nothing and keeps its two special tokens in their places."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from edgedraft.runtime.vocabulary import Vocabulary
from edgedraft.trainer.errors import TrainError
from edgedraft.trainer.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from toy_vocabularies import TEXT, byte_level

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

TOKENIZER = train_tokenizer([TEXT] * 3, 320)


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_as_it_was(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.binary(min_size=1))
@settings(max_examples=100, deadline=None)
def test_any_bytes_can_be_written(content: bytes) -> None:
    vocabulary = Vocabulary(TOKENIZER)
    (ids,) = vocabulary.segment([content])
    assert b"".join(vocabulary.pieces[i] for i in ids) == content


def test_digits_stand_alone_and_no_space_is_put_in_front() -> None:
    assert TOKENIZER.encode("2026").tokens == ["2", "0", "2", "6"]
    assert TOKENIZER.encode("The").tokens[0].startswith("T")


def test_the_vocabulary_has_the_size_asked_for_and_the_special_tokens_come_first() -> None:
    assert TOKENIZER.get_vocab_size() == 320
    assert TOKENIZER.token_to_id("<|end|>") == 0
    assert TOKENIZER.token_to_id("<|mark|>") == 1
    with pytest.raises(ValueError, match="vocab_size must be >= 258, got 100"):
        train_tokenizer([TEXT], 100)


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    assert load_tokenizer(tmp_path).to_str() == TOKENIZER.to_str()


@pytest.mark.parametrize("tokenizer", [None, byte_level(300, ("<s>", "</s>"))])
def test_a_folder_without_a_drafters_tokenizer_is_refused(
    tmp_path: Path, tokenizer: Tokenizer | None
) -> None:
    if tokenizer is not None:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TrainError, match="make one with: edgedraft-train tokenizer"):
        load_tokenizer(tmp_path)
