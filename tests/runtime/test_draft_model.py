"""A small model with its own vocabulary drafts: same output, one context, a cache rolled back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, Proposal, SamplingConfig
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.policy import DraftPolicy, PassCosts
from fakes import TableModel, random_table, run
from toy_vocabularies import TEXT, byte_level, pair, pieces_text

DRAFT, TARGET = 270, 380
END = 0


def target_model(seed: int = 0, memory: float = 1.0) -> TableModel:
    return TableModel(random_table(TARGET, seed), memory=memory)


class Reader(TableModel):
    """A drafter that knows a text: it continues the longest ending of what it has read."""

    def __init__(self, pieces: Sequence[int], context_length: int = 4096) -> None:
        super().__init__(random_table(DRAFT, 5), context_length=context_length, max_rows=1)
        self._pieces = list(pieces)

    def row(self, prefix: Sequence[int]) -> np.ndarray:
        row = np.zeros(DRAFT, np.float32)
        for length in range(min(len(prefix), 12), 0, -1):
            ending = list(prefix[-length:])
            for at in range(len(self._pieces) - length):
                if self._pieces[at : at + length] == ending:
                    row[self._pieces[at + length]] = 9.0
                    return row
        return row


def spelled(tokens: Sequence[int]) -> list[int]:
    return [piece for token in tokens for piece in pair().spelling(token)]


PROMPT = tuple(byte_level(TARGET).encode("The quick brown fox", add_special_tokens=False).ids)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.9, seed=3)])
@pytest.mark.parametrize("seed", range(4))
def test_output_equals_plain_decoding_whatever_is_drafted(
    seed: int, sampling: SamplingConfig
) -> None:
    config = DecodeConfig(max_tokens=60, sampling=sampling)
    drafter = DraftModel(TableModel(random_table(DRAFT, seed), max_rows=1), pair())
    plain = run(target_model(seed), config, prompt=PROMPT)
    output = run(target_model(seed), config, drafter, prompt=PROMPT)
    assert output.tokens == plain.tokens
    np.testing.assert_array_equal(output.rows, plain.rows)


def test_a_drafter_that_knows_what_comes_has_nearly_all_of_it_accepted() -> None:
    config = DecodeConfig(max_tokens=80)
    truth = run(target_model(), config, prompt=PROMPT).tokens
    drafter = DraftModel(Reader(spelled([*PROMPT, *truth])), pair())
    output = run(target_model(), config, drafter, prompt=PROMPT)
    assert output.tokens == truth
    assert output.rounds < 25
    assert output.accepted > 50


class Watched(DraftModel):
    """Checks before every draft what the model has read."""

    checks = 0

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        proposal = super().propose(committed, budget)
        read = self._model.cache  # type: ignore[attr-defined]
        draft = list(proposal.draft.tokens) if proposal.draft else []
        context = [*spelled(committed), *draft[:-1]]
        assert read == context[-len(read) :], "the cache is what the committed tokens spell"
        assert pieces_text(spelled(committed), DRAFT) == pieces_text(list(committed), TARGET)
        Watched.checks += 1
        return proposal


@pytest.mark.parametrize("context_length", [4096, 64, 40])
def test_the_drafter_reads_the_bytes_of_the_committed_tokens(context_length: int) -> None:
    config = DecodeConfig(max_tokens=120)
    truth = run(target_model(), config, prompt=PROMPT).tokens
    Watched.checks = 0
    for knows in (truth, ()):
        drafter = Watched(Reader(spelled([*PROMPT, *knows]), context_length), pair())
        assert run(target_model(), config, drafter, prompt=PROMPT).tokens == truth
    assert Watched.checks > 40


def test_only_what_changed_is_read_again() -> None:
    model = TableModel(random_table(DRAFT, 1), max_rows=1)
    drafter = DraftModel(model, pair())
    tokens = byte_level(TARGET).encode(TEXT, add_special_tokens=False).ids
    drafter.propose(tokens[:100], 4)
    model.extended.clear()
    model.passes.clear()
    proposal = drafter.propose(tokens[:101], 4)
    assert proposal.draft is not None
    new = len(pair().spelling(tokens[100]))
    assert sum(model.extended) + len(model.passes) <= new + len(proposal.draft.tokens)
    drafter.propose(tokens[:50], 4)
    assert len(model.cache) <= len(spelled(tokens[:50])) + 8


def test_nothing_is_proposed_without_budget_or_context() -> None:
    drafter = DraftModel(TableModel(random_table(DRAFT, 1), max_rows=1), pair())
    assert drafter.propose(PROMPT, 0).tokens == ()
    assert drafter.propose([], 4).tokens == ()


def test_a_context_too_short_to_draft_in_is_no_error() -> None:
    drafter = DraftModel(TableModel(random_table(DRAFT, 1), max_rows=1, context_length=6), pair())
    assert drafter.propose(PROMPT, 4).tokens == ()


def test_unusable_tokens_are_never_drafted() -> None:
    table = np.zeros((DRAFT, DRAFT), np.float32)
    table[:, 1] = 50.0  # the mark, which no target token is
    table[:, 40] = 5.0
    drafter = DraftModel(TableModel(table, memory=0.0, max_rows=1), pair())
    proposal = drafter.propose(PROMPT, 4)
    assert proposal.draft is not None and set(proposal.draft.tokens) == {40}


def test_drafting_stops_when_the_draft_is_unlikely_to_be_reached() -> None:
    flat = np.zeros((DRAFT, DRAFT), np.float32)
    policy = DraftPolicy(PassCosts({2: 0.010, 8: 0.013}))

    def propose() -> Proposal:
        model = TableModel(flat, memory=0.0, max_rows=1)
        return DraftModel(model, pair(), policy=policy).propose(PROMPT, 12)

    unsure = propose()
    assert unsure.draft is not None and len(unsure.draft.tokens) <= 4
    flat[:, 40] = 50.0
    sure = propose()
    assert sure.draft is not None and len(sure.draft.tokens) == 12


def test_forgetting_leaves_nothing_to_read() -> None:
    model = TableModel(random_table(DRAFT, 1), max_rows=1)
    drafter = DraftModel(model, pair())
    before = drafter.propose(PROMPT, 4)
    drafter.forget()
    assert model.cache == []
    after = drafter.propose(PROMPT, 4)
    assert after.draft == before.draft and after.tokens == before.tokens


def test_the_policy_does_not_blame_the_target_for_drafting() -> None:
    """The seconds of a draft are spent whatever is submitted."""
    policy = DraftPolicy(PassCosts({2: 0.010, 8: 0.012}), overhead_s=0.0)
    cheap = Proposal.chain([1, 2], [0.9, 0.2], "test")
    assert policy.nodes_to_submit(cheap) >= 1
    assert policy.value(cheap) > policy.value(
        Proposal((1, 2), (-1, 0), (0.9, 0.2), "test", draft_s=0.005)
    )


def test_what_is_new_of_a_text_is_told_in_seconds_and_apart_from_drafting() -> None:
    model = TableModel(random_table(DRAFT, 1), max_rows=1)
    drafter = DraftModel(model, pair())
    text = [285 + i % 90 for i in range(300)]
    assert drafter.reading_s(text) > drafter.reading_s(text[:100]) > 0
    assert drafter.reading_s(text[:8]) == 0  # no more than a round may add
    first = drafter.propose(text, 4)
    assert first.reading_s > 0 and first.draft_s > 0
    assert drafter.reading_s([*text, 5, 6]) == 0
    assert drafter.propose([*text, 5, 6], 4).reading_s == 0
    spelled = sum(len(pair().spelling(token)) for token in text)
    assert spelled > 1.5 * len(text)
    other = [2, *text]
    whole = (spelled + 1) / (spelled - 1) * first.reading_s
    assert drafter.reading_s(other) == pytest.approx(whole, rel=0.02)
    drafter.use(TableModel(random_table(DRAFT, 1), max_rows=1))
    assert drafter.reading_s(text) == pytest.approx(whole, rel=0.02)  # it has read nothing
    assert drafter.reading_s([290] * 5000) == pytest.approx(
        512 / spelled * first.reading_s, rel=0.02
    )


def test_a_reading_that_something_interrupted_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TableModel(random_table(DRAFT, 1), max_rows=1)
    drafter = DraftModel(model, pair())
    text = [1 + i % 90 for i in range(100)]
    drafter.propose(text, 4)
    expected = drafter.reading_s([2, *text])
    extend = model.extend

    def stalled(tokens: Sequence[int]) -> None:
        time.sleep(0.2)
        extend(tokens)

    monkeypatch.setattr(model, "extend", stalled)
    assert drafter.propose([2, *text], 4).reading_s > 0.2
    assert drafter.reading_s([3, *text]) < 1.1 * expected
