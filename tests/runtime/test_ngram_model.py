"""The n-gram model learns from every committed token, once, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, SpeculativeDecoder, StateError
from edgedraft.runtime.learned_ngrams import LearnedNgrams
from edgedraft.runtime.ngram_model import _CONTEXTS, NgramModel, _tags
from fakes import TableModel, random_table

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SMALL = 600_000
small_texts = st.lists(st.integers(0, 3), max_size=60)


def entries(model: NgramModel) -> dict[int, tuple[int, int, int]]:
    """Return usual token, hits and misses of every context, by its tag."""
    found = {}
    for tag, word, _ in model._table.reshape(-1, 3).tolist():
        if tag:
            assert tag not in found
            found[tag] = (word >> 12, word >> 6 & 63, word & 63)
    return found


def test_a_text_is_predicted_the_second_time() -> None:
    model = NgramModel(max_bytes=SMALL)
    text = list(range(100, 140))
    assert model.propose(text, 8).tokens == ()
    proposal = model.propose(text[:10], 8)
    assert proposal.tokens == tuple(text[10:18])
    assert proposal.is_chain
    assert proposal.origin == "ngram"


@settings(max_examples=100)
@given(text=small_texts, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_a_table_built_piece_by_piece_equals_one_built_at_once(
    text: list[int], cuts: list[int]
) -> None:
    pieces, whole = NgramModel(max_bytes=SMALL), NgramModel(max_bytes=SMALL)
    for cut in sorted(c for c in cuts if 0 < c < len(text)):
        pieces.propose(text[:cut], 0)
    assert pieces.propose(text, 8) == whole.propose(text, 8)
    assert np.array_equal(pieces._table, whole._table)


def test_after_every_token_the_table_equals_a_rebuilt_one() -> None:
    rng = random.Random(5)
    text: list[int] = []
    model = NgramModel(max_bytes=SMALL)
    for _ in range(80):
        text.append(rng.randrange(4))
        model.propose(text, 4)
        rebuilt = NgramModel(max_bytes=SMALL)
        rebuilt.propose(text, 0)
        assert np.array_equal(model._table, rebuilt._table)


def test_every_context_is_counted_as_often_as_it_was_continued() -> None:
    rng = random.Random(6)
    text = [rng.randrange(3) for _ in range(40)]
    model = NgramModel(max_bytes=SMALL)
    model.propose(text, 0)
    contexts = {
        tuple(text[end - length : end]) for length in _CONTEXTS for end in range(length, len(text))
    }
    assert len(entries(model)) == len(contexts)
    for context in contexts:
        followers = [
            text[end]
            for end in range(len(context), len(text))
            if tuple(text[end - len(context) : end]) == context
        ]
        usual, hits, misses = entries(model)[tag_of(context)]
        assert usual in followers
        assert misses <= len(followers) - 1
        if len(set(followers)) == 1:
            assert (hits, misses) == (len(followers), 0)
        if followers.count(usual) * 2 > len(followers) and len(followers) < 60:
            assert hits >= 1


def tag_of(context: Sequence[int]) -> int:
    """Return the tag of a whole context of one of the lengths in use."""
    return _tags(list(context))[_CONTEXTS.index(len(context))]


def test_what_most_texts_say_wins_over_what_one_said_before() -> None:
    model = NgramModel(max_bytes=SMALL)
    for follower in (7, 7, 7, 8):
        model.propose([1, 2, follower], 0)
        model.propose([90], 0)  # so that no beginning is shared
    assert model.propose([1, 2], 1).tokens == (7,)


def test_what_this_text_said_last_wins_over_what_others_say() -> None:
    model = NgramModel(max_bytes=SMALL)
    for _ in range(4):
        model.propose([1, 7], 0)
        model.propose([90], 0)
    assert model.propose([30, 1], 1).tokens == (7,)
    assert model.propose([31, 1, 8, 32, 1], 1).tokens == (8,)
    assert model.propose([40, 1], 1).tokens == (7,)  # and only there


def test_a_continuation_that_is_no_longer_said_is_replaced() -> None:
    model = NgramModel(max_bytes=SMALL)
    for follower in [7] * 5 + [8] * 20:
        model.propose([1, follower], 0)
        model.propose([90], 0)
    assert model.propose([1], 1).tokens == (8,)


@pytest.mark.parametrize("follower", [0, 2, (1 << 20) - 1])
def test_counts_never_spill_into_the_token(follower: int) -> None:
    model = NgramModel(max_bytes=SMALL)
    for i in range(300):
        model.propose([1, follower], 0)
        model.propose([1, 3] if i % 3 == 0 else [90], 0)
    usual, hits, misses = entries(model)[tag_of([1])]
    assert usual == follower
    assert hits > misses > 0


def test_a_conversation_that_goes_on_is_not_counted_twice() -> None:
    text = list(range(200, 230))
    model, once = NgramModel(max_bytes=SMALL), NgramModel(max_bytes=SMALL)
    for end in range(1, 31):
        model.propose(text[:end], 4)
    model.propose([*text[:20], 1, 2, 3], 4)  # edited after twenty tokens
    model.propose([*text[:20], 1, 2, 3, 4], 4)
    model.propose(text[:20], 4)  # taken back
    once.propose(text, 0)
    counted = entries(model)
    parting = tag_of([219]), tag_of(text[18:20]), tag_of(text[16:20]), tag_of(text[14:20])
    for tag, known in entries(once).items():
        if tag not in parting:
            assert counted[tag] == known
            assert known[1:] == (1, 0)


def test_a_shared_beginning_is_recent_again_though_not_counted() -> None:
    model, fresh = NgramModel(max_bytes=SMALL), NgramModel(max_bytes=SMALL)
    beginning = [5, 6, 7, 8, 9]
    model.propose([*beginning, 1], 0)
    model.propose([*beginning, 2], 0)
    fresh.propose([*beginning, 2], 0)
    latest = {int(word) & 0xFFF for word in model._table.reshape(-1, 3)[:, 2] if word}
    assert latest == {model._request}
    assert entries(model)[tag_of([5])] == entries(fresh)[tag_of([5])] == (6, 1, 0)


@settings(max_examples=60)
@given(
    requests=st.lists(small_texts, max_size=6),
    budget=st.integers(0, 8),
)
def test_any_sequence_of_texts_gives_proposals_within_budget(
    requests: list[list[int]], budget: int
) -> None:
    model = NgramModel(max_bytes=SMALL)
    for request in requests:
        proposal = model.propose(request, budget)
        assert len(proposal.tokens) <= budget
        assert len(proposal.confidence) == len(proposal.tokens)
        assert all(0 <= c <= 1 for c in proposal.confidence)
        assert set(proposal.tokens) <= set().union(*requests)


def test_nothing_is_proposed_without_context_or_budget() -> None:
    model = NgramModel(max_bytes=SMALL)
    model.propose([1, 2, 3, 1, 2, 3], 0)
    assert model.propose([1, 2, 3, 1, 2, 3], 0).tokens == ()
    assert model.propose([], 5).tokens == ()
    assert model.propose([77], 5).tokens == ()
    assert model.propose((1, 2), 1).tokens == (3,)  # any kind of sequence


def test_an_id_too_large_for_an_entry_is_passed_over() -> None:
    model = NgramModel(max_bytes=SMALL)
    text = [1, 1 << 20, 2, 3]
    model.propose(text * 2, 0)
    assert model.propose([*text, 1], 1).tokens == ()
    assert model.propose([*text, 1, 1 << 20], 2).tokens == (2, 3)


def test_memory_stays_bounded_under_random_tokens() -> None:
    rng = random.Random(7)
    limit = 550_000
    tracemalloc.start()
    model = NgramModel(max_bytes=limit)
    for _ in range(5):
        model.propose([rng.randrange(1 << 19, 1 << 20) for _ in range(1000)], 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= limit
    assert (model._table.reshape(-1, 3)[:, 0] != 0).mean() > 0.9  # it was full


def test_the_least_used_context_makes_room_for_one_that_is_said_more_often() -> None:
    model = NgramModel(max_bytes=500_000 + 12 * 5)  # one window of four places
    for context in range(1, 5):
        for _ in range(2 + context):
            model.propose([context, 7], 0)
            model.propose([90], 0)
    held = {tag_of([context]) for context in range(1, 5)}
    for _ in range(2):
        model.propose([50, 7], 0)
        model.propose([90], 0)
        assert set(entries(model)) == held
    model.propose([50, 7], 0)
    assert set(entries(model)) == held - {tag_of([1])} | {tag_of([50])}


@pytest.mark.parametrize("right", [0.2, 0.6, 0.95])
def test_confidence_becomes_honest_on_a_stationary_source(right: float) -> None:
    rng = random.Random(9)
    model = NgramModel(max_bytes=SMALL)
    text = [0]
    hits = claims = asked = variance = 0.0
    for step in range(7000):
        proposal = model.propose(text, 2)
        text.append((text[-1] * 7 + 1) % 30 if rng.random() < right else rng.randrange(30))
        if step > 4000 and proposal.tokens:
            asked += 1
            hits += proposal.tokens[0] == text[-1]
            claims += proposal.confidence[0]
            variance += proposal.confidence[0] * (1 - proposal.confidence[0])
    assert asked > 2000
    assert abs(hits - claims) < 5 * variance**0.5


@pytest.mark.parametrize("right", [0, 1, 3, 8])
def test_a_proposal_is_scored_up_to_its_first_error_though_never_submitted(right: int) -> None:
    text = [*range(20)] * 2
    truth = [*text[: 30 + right], 99, *text[31 + right :]] if right < 8 else text
    scored, unscored = NgramModel(max_bytes=SMALL), NgramModel(max_bytes=SMALL)
    scored.propose(text[:30], 8)
    unscored.propose(text[:30], 0)
    scored.propose(truth[:38], 0)
    unscored.propose(truth[:38], 0)
    records = zip(scored._counted, unscored._counted, strict=True)
    count = sum(after - before for after, before in records)
    assert count == pytest.approx(min(right + 1, 8), abs=0.3)
    changes = zip(scored._rates, unscored._rates, strict=True)
    assert any(after < before for after, before in changes) == (right < 8)


def trained(max_bytes: int = 800_000) -> tuple[NgramModel, list[int]]:
    rng = random.Random(10)
    text = [rng.randrange(40) for _ in range(2000)]
    model = NgramModel(max_bytes=max_bytes)
    for end in range(100, 2001, 50):
        model.propose(text[:end], 8)
    return model, text


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    model, text = trained()
    model.save(path, "v")
    loaded = NgramModel(max_bytes=800_000)
    loaded.propose([1, 2, 3], 0)
    loaded.load(path, "v")
    assert entries(loaded) == entries(model)
    assert loaded._rates == pytest.approx(model._rates)
    model.propose([], 0)  # nothing is recent any more
    for end in range(1, 40):
        model.propose([], 0)
        assert loaded.propose(text[:end], 1) == loaded.propose(text[:end], 1)
    assert [p.name for p in tmp_path.iterdir()] == ["ngrams.bin"]


def test_a_table_of_another_size_finds_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    model, _ = trained()
    known = entries(model)
    model.save(path, "v")
    larger, smaller = NgramModel(max_bytes=1_000_000), NgramModel(max_bytes=520_000)
    larger.load(path, "v")
    smaller.load(path, "v")
    assert len(entries(larger)) > 0.99 * len(known)  # a window may be crowded
    assert entries(larger).items() <= known.items()
    # Kept by use, and each where a search finds it.
    kept = entries(smaller)
    assert kept.items() <= known.items()
    uses = [hits + misses for _, hits, misses in kept.values()]
    assert np.mean(uses) > np.mean([hits + misses for _, hits, misses in known.values()])
    for model in (larger, smaller):
        placed = model._table.reshape(-1, 3)[:, 0]
        for place in np.flatnonzero(placed):
            home = int(placed[place]) * model._slots >> 32
            assert 0 <= place - home < 4
            assert placed[home:place].all()


def test_a_seed_holds_the_most_used_contexts_and_no_more_bytes(tmp_path: Path) -> None:
    path = tmp_path / "seed.bin"
    model, _ = trained()
    known = entries(model)
    for limit in (10_000, 20_000, 1_000_000):
        model.save(path, "v", max_bytes=limit)
        assert path.stat().st_size <= limit
        seed = NgramModel(max_bytes=800_000)
        seed.load(path, "v")
        kept = entries(seed)
        assert kept.items() <= known.items()
        left = [h + m for tag, (_, h, m) in known.items() if tag not in kept]
        assert min(h + m for _, h, m in kept.values()) >= max(left, default=0)
    assert kept == known


def test_a_damaged_or_foreign_file_is_refused_without_harm(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    trained()[0].save(path, "v")
    content = path.read_bytes()
    model = NgramModel(max_bytes=SMALL)
    model.propose([1, 2, 3], 0)
    before = model._table.copy()
    rng = random.Random(11)
    spoilt = [b"", content[:7], content[:60], content[:-1]]
    for _ in range(40):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        spoilt.append(bytes(flipped))
    for damaged in spoilt:
        path.write_bytes(damaged)
        with pytest.raises(StateError) as caught:
            model.load(path, "v")
        assert "\n" not in str(caught.value)
    path.write_bytes(content)
    with pytest.raises(StateError, match="for something else"):
        model.load(path, "another")
    with pytest.raises(StateError, match="cannot be read"):
        model.load(tmp_path / "none.bin", "v")
    assert np.array_equal(model._table, before)
    assert model.propose([1, 2], 1).tokens == (3,)


def test_forgetting_leaves_no_token_in_memory_or_file(tmp_path: Path) -> None:
    marker = [701_111, 702_222, 703_333, 704_444, 705_555, 706_666, 707_777]
    model = NgramModel(max_bytes=SMALL)
    model.propose([*marker, *marker], 8)
    model.forget()
    assert not model._table.any()
    held = [model._text, [token for _, token in model._pending], model._rates, model._counted]
    assert not set(marker) & {value for values in held for value in values}
    model.save(tmp_path / "ngrams.bin", "v")
    content = (tmp_path / "ngrams.bin").read_bytes()
    for token in marker:
        assert (token << 12 | 1 << 6).to_bytes(4, "little") not in content
    assert model.propose(marker[:4], 4).tokens == ()
    assert model.propose([*marker, marker[0]], 1).tokens == (marker[1],)


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes must be >= .*, got 0"):
        NgramModel(max_bytes=0)


def test_the_loop_and_the_model_agree_on_what_was_committed() -> None:
    ngrams = LearnedNgrams("any")
    model = ngrams._model
    decoder = SpeculativeDecoder(TableModel(random_table(12, 0)), ngrams)
    for prompt in ([1, 2, 3], [1, 2, 3, 4], [5]):
        text = list(prompt)
        for trace in decoder.rounds(prompt, DecodeConfig(max_tokens=40)):
            assert model._text == text[: len(model._text)]
            assert len(model._text) == len(text) or trace.finish_reason
            text.extend(trace.emitted)
