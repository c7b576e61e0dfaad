"""N-grams of draft tokens are learned from what was committed, and used at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgedraft.runtime import DecodeConfig
from edgedraft.runtime.datatypes import NOTHING, Draft, Proposal
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.learning_translator import LearningTranslator
from edgedraft.runtime.vocabulary import Vocabulary
from fakes import TableModel, random_table, run
from toy_vocabularies import byte_level, pair, pieces_text

DRAFT, TARGET = 270, 380
TEXTS = Vocabulary(byte_level(DRAFT)).pieces
SHELLS = next(
    t
    for t in byte_level(TARGET).encode(" the sea shells", add_special_tokens=False).ids
    if len(pair().spelling(t)) > 2
)


def translator(static: bool = False, kept: Path | None = None) -> LearningTranslator:
    return LearningTranslator(pair(), static=static, kept=kept)


def draft(pieces: list[int]) -> Draft:
    return Draft(tuple(pieces), (0.5,) * len(pieces))


def byte_pieces(text: bytes) -> list[int]:
    """Write a text byte by byte."""
    return [TEXTS.index(bytes([byte])) for byte in text]


def test_the_papers_cache_knows_direct_tokens_first_and_longer_ones_once_they_occurred() -> None:
    cold = translator()
    pieces = pair().spelling(SHELLS)
    before = cold.translate(draft(pieces), 8)
    assert SHELLS not in before.tokens
    assert pieces_text(list(before.tokens), TARGET) == pieces_text(pieces, DRAFT)
    cold.learn(NOTHING, [SHELLS])
    after = cold.translate(draft(pieces), 8)
    assert after.tokens == (SHELLS,)
    assert after.spans[0].length == len(pieces)


def test_a_cut_of_the_drafters_own_is_learned_where_the_target_said_the_same() -> None:
    """With the whole table, this is what learning adds."""
    warm = translator(static=True)
    pieces = byte_pieces(pieces_text([SHELLS], TARGET))
    before = warm.translate(draft(pieces), 16)
    assert before.tokens[0] != SHELLS
    warm.learn(before, [SHELLS])
    assert warm.translate(draft(pieces), 16).tokens == (SHELLS,)


def test_nothing_is_learned_from_other_text_or_from_what_was_not_compared() -> None:
    warm = translator(static=True)
    other = byte_pieces(b" sh")
    proposal = warm.translate(draft(other), 16)
    warm.learn(proposal, [SHELLS])
    assert tuple(other) not in warm.cache._entries
    count = len(warm.cache)
    warm.learn(Proposal.chain([5], [0.5], "test"), [5])
    assert len(warm.cache) == count, "single pieces are the direct map's"


def test_what_was_learned_is_kept_for_the_next_process_and_can_be_forgotten(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cache.bin"
    first = translator(kept=path)
    first.learn(NOTHING, [SHELLS])
    first.save()
    pieces = draft(pair().spelling(SHELLS))
    assert translator(kept=path).translate(pieces, 8).tokens == (SHELLS,)
    first.forget()
    first.save()
    assert translator(kept=path).translate(pieces, 8).tokens != (SHELLS,)
    path.write_bytes(b"damaged")
    assert len(translator(kept=path).cache) == 0
    translator().save()


@pytest.mark.parametrize("static", [False, True])
def test_output_is_that_of_plain_decoding_and_the_cache_learns_it(static: bool) -> None:
    config = DecodeConfig(max_tokens=60)
    prompt = tuple(byte_level(TARGET).encode("The quick", add_special_tokens=False).ids)
    plain = run(TableModel(random_table(TARGET, 3)), config, prompt=prompt)
    learning = translator(static)
    drafter = DraftModel(TableModel(random_table(DRAFT, 2), max_rows=1), pair(), learning)
    output = run(TableModel(random_table(TARGET, 3)), config, drafter, prompt=prompt)
    assert output.tokens == plain.tokens
    several = {t for t in plain.tokens[:-20] if len(pair().spelling(t)) > 1}
    assert several and all(learning.cache.match(pair().spelling(t), 0) is not None for t in several)
