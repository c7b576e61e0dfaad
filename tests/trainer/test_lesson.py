"""Lessons hold what the target said and thought."""

from __future__ import annotations

import numpy as np
import pytest

from edgedraft.runtime.datatypes import NOTHING, FloatArray, RoundTrace, Timings, Verdict
from edgedraft.trainer.lesson import CONTEXT, LENGTH, TOP, Lesson, Recorder, glimpse, likeliest


def trace(tokens: list[int], logits: FloatArray) -> RoundTrace:
    verdict = Verdict((), tokens[-1])
    return RoundTrace(NOTHING, verdict, tuple(tokens), logits, Timings(0, 0, 0), None)


def rows(count: int, vocab: int = 500, seed: int = 0) -> FloatArray:
    """Return logits in which one token is far ahead, as a rule."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((count, vocab), np.float32)
    logits[np.arange(count), rng.integers(0, vocab, count)] += 17
    return logits


def test_the_likeliest_tokens_come_with_their_log_probabilities_best_first() -> None:
    logits = rows(20, vocab=20_000)
    rng = np.random.default_rng(1)
    for row in logits[::2]:  # where some others come close
        near = rng.choice(len(row), 2 * TOP, replace=False)
        row[near] = row.max() - rng.uniform(0.5, 5, len(near))
    ids, log_probs = likeliest([glimpse(row, int(row.argmax())) for row in logits])
    assert ids.shape == log_probs.shape == (20, TOP)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    known = np.isfinite(log_probs)
    assert known[:, 0].all()
    assert known.any(axis=0).all()
    for i in range(20):
        count = known[i].sum()
        assert known[i, :count].all()
        assert ids[i, :count].tolist() == np.argsort(-logits[i])[:count].tolist()
        np.testing.assert_allclose(log_probs[i, :count], exact[i, ids[i, :count]], atol=0.05)


def test_the_likeliest_tokens_of_a_row_do_not_depend_on_its_company() -> None:
    logits = rows(9)
    glimpses = [glimpse(row, i) for i, row in enumerate(logits)]  # some chosen far from the best
    together = likeliest(glimpses)
    for i, alone in enumerate(glimpses):
        for x, y in zip(likeliest([alone]), together, strict=True):
            np.testing.assert_array_equal(x[0], y[i])


def test_a_row_of_nothing_that_is_a_number_does_no_harm_to_the_others() -> None:
    logits = rows(3)
    expected = likeliest([glimpse(row, 0) for row in logits[::2]])
    logits[1] = np.nan
    ids, log_probs = likeliest([glimpse(row, 0) for row in logits])
    assert not np.isfinite(log_probs[1]).any()
    np.testing.assert_array_equal(ids[::2], expected[0])
    np.testing.assert_array_equal(log_probs[::2], expected[1])


@pytest.mark.parametrize("count", [5, LENGTH + 40])
def test_a_request_becomes_lessons_of_its_rounds_even_if_the_rows_are_overwritten(
    count: int,
) -> None:
    logits = rows(count)
    ids, log_probs = likeliest([glimpse(row, token) for token, row in enumerate(logits)])
    recorder = Recorder([1, 2, 3])
    for start, stop in ((0, 2), *((i, min(i + 3, count)) for i in range(2, count, 3))):
        part = logits[start:stop].copy()
        recorder.observe(trace(list(range(start, stop)), part))
        part[:] = np.nan
        assert len(recorder._glimpses) < LENGTH  # or a long answer would fill the memory
    lessons = recorder.lessons()
    assert lessons[0].context.tolist() == [1, 2, 3]
    assert [x for lesson in lessons for x in lesson.tokens.tolist()] == list(range(count))
    np.testing.assert_array_equal(np.concatenate([x.top_ids for x in lessons]), ids)
    np.testing.assert_array_equal(np.concatenate([x.top_log_probs for x in lessons]), log_probs)


def test_distributions_in_which_every_token_is_near_do_not_pile_up() -> None:
    logits = np.zeros((40, 20_000), np.float32)
    recorder = Recorder([1, 2, 3])
    for i, row in enumerate(logits):
        recorder.observe(trace([i], row[None]))
        assert sum(len(x.near) for x in recorder._glimpses) < 120_000
    (lesson,) = recorder.lessons()
    assert lesson.tokens.tolist() == list(range(40))
    np.testing.assert_allclose(lesson.top_log_probs, -np.log(20_000), atol=0.01)


def test_a_request_that_said_nothing_teaches_nothing() -> None:
    assert Recorder([1, 2, 3]).lessons() == []


def test_a_long_answer_is_several_lessons_each_behind_the_text_before_it() -> None:
    text = list(range(1000, 1000 + 50 + 2 * LENGTH + 9))
    parts = list(Lesson.certain(text[:50], text[50:]).parts())
    assert [len(part.tokens) for part in parts] == [LENGTH, LENGTH, 9]
    assert [token for part in parts for token in part.tokens.tolist()] == text[50:]
    for part in parts:
        behind = text.index(int(part.tokens[0]))
        assert part.context.tolist() == text[max(0, behind - CONTEXT) : behind]


@pytest.mark.parametrize("count", [1, LENGTH, LENGTH + 1])
def test_lessons_are_of_bounded_size(count: int) -> None:
    for part in Lesson.certain(range(3000), range(count)).parts():
        arrays = (part.context, part.tokens, part.top_ids, part.top_log_probs)
        assert sum(x.nbytes for x in arrays) <= 4 * CONTEXT + LENGTH * (4 + 6 * TOP)
