"""Lessons hold what the target said and thought."""

from __future__ import annotations

import numpy as np
import pytest

from edgedraft.runtime.datatypes import NOTHING, FloatArray, RoundTrace, Timings, Verdict
from edgedraft.trainer.lesson import CONTEXT, LENGTH, TOP, Lesson, Recorder, likeliest


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
    for row in rows(20, vocab=20_000):
        ids, log_probs = likeliest(row, int(row.argmax()))
        exact = row - np.log(np.exp(row.astype(np.float64)).sum())
        best = np.argsort(-row)[: len(ids)]
        assert 1 <= len(ids) <= TOP
        assert ids.tolist() == best.tolist()
        np.testing.assert_allclose(log_probs, exact[best], atol=0.05)


def test_a_request_becomes_a_lesson_of_its_rounds_even_if_the_rows_are_overwritten() -> None:
    logits = rows(5)
    expected = [likeliest(row.copy(), token) for token, row in enumerate(logits)]
    recorder = Recorder([1, 2, 3])
    for start, stop in ((0, 2), (2, 5)):
        part = logits[start:stop].copy()
        recorder.observe(trace(list(range(start, stop)), part))
        part[:] = np.nan
    (lesson,) = recorder.lessons()
    assert lesson.context.tolist() == [1, 2, 3]
    assert lesson.tokens.tolist() == [0, 1, 2, 3, 4]
    for i, (ids, log_probs) in enumerate(expected):
        known = np.isfinite(lesson.top_log_probs[i])
        assert lesson.top_ids[i][known].tolist() == ids.tolist()
        np.testing.assert_allclose(lesson.top_log_probs[i][known], log_probs, atol=1e-2)


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
