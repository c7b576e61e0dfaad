"""The other ways to translate say what they would propose, and no less."""

from __future__ import annotations

from edgedraft.runtime import DecodeConfig
from edgedraft.runtime.datatypes import Draft
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.translation_modes import IntersectionTranslator, ReencodeTranslator
from edgedraft.runtime.vocabulary import Vocabulary
from fakes import TableModel, random_table, run
from toy_vocabularies import byte_level, pair, pieces_text

DRAFT, TARGET = 270, 380
TEXT = "The shells she sells are sea shells"


def target_ids(text: str) -> list[int]:
    ids: list[int] = byte_level(TARGET).encode(text, add_special_tokens=False).ids
    return ids


def draft(text: str) -> Draft:
    ids = byte_level(DRAFT).encode(text, add_special_tokens=False).ids
    return Draft(tuple(ids), (0.5,) * len(ids))


def reencode() -> ReencodeTranslator:
    vocabularies = (Vocabulary(byte_level(size)) for size in (DRAFT, TARGET))
    return ReencodeTranslator(pair(), *vocabularies)


def test_the_intersection_maps_token_to_token() -> None:
    translator = IntersectionTranslator(pair())
    proposal = translator.translate(draft(TEXT), 100)
    assert len(proposal.tokens) == len(draft(TEXT).tokens)
    assert pieces_text(list(proposal.tokens), TARGET) == TEXT.encode()
    assert {span.length for span in proposal.spans} == {1}
    assert translator.translate(Draft((0,), (0.5,)), 4).tokens == (0,), "the end is shared"


def test_only_shared_tokens_are_usable_in_the_intersection() -> None:
    usable = IntersectionTranslator(pair()).usable
    assert not usable[1], "the mark"
    assert all(usable[piece] for piece in draft(TEXT).tokens)
    swapped = IntersectionTranslator(pair(TARGET, DRAFT)).usable
    assert not all(swapped[token] for token in target_ids(TEXT))


def test_reencoding_gives_the_targets_own_tokens() -> None:
    tokens = target_ids(TEXT)
    first, rest = TEXT[: len("The shells")], TEXT[len("The shells") :]
    assert target_ids(first) + target_ids(rest) == tokens
    assert list(reencode().translate(draft(rest), 100, target_ids(first)).tokens) == target_ids(
        rest
    )
    assert (
        list(reencode().translate(draft(rest), 2, target_ids(first)).tokens) == target_ids(rest)[:2]
    )


def test_reencoding_leaves_half_a_character_out() -> None:
    whole = draft("fox 🙂")
    cut = Draft(whole.tokens[:-1], whole.probs[:-1])
    assert pieces_text(list(reencode().translate(cut, 100).tokens), TARGET) == b"fox "


def test_reencoding_goes_on_behind_a_special_token() -> None:
    assert list(reencode().translate(draft("The fox"), 100, [1]).tokens) == target_ids("The fox")


def test_output_stays_that_of_plain_decoding() -> None:
    config = DecodeConfig(max_tokens=40)
    prompt = tuple(target_ids("The quick brown fox"))
    plain = run(TableModel(random_table(TARGET, 3)), config, prompt=prompt)
    for translator in (IntersectionTranslator(pair()), reencode()):
        drafter = DraftModel(TableModel(random_table(DRAFT, 2), max_rows=1), pair(), translator)
        output = run(TableModel(random_table(TARGET, 3)), config, drafter, prompt=prompt)
        assert output.tokens == plain.tokens
