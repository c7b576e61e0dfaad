"""What each loss teaches, on a pair small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgedraft.trainer.lesson import CONTEXT, LENGTH, TOP, Lesson
from edgedraft.trainer.step_graph import Passage
from edgedraft.trainer.teacher import MAX_PIECES, Objective, SpelledLesson, Teacher
from tiny_learner import PIECES, TOKENS, tiny_pair

# Token 60 + i is spelled 3 i, 3 i + 1: 62 is 6, 7. The others are one piece.
NGRAM = 62


def lesson(token: int, **probs: float) -> Lesson:
    """Return a lesson of one token, whose place the target gave these probabilities."""
    given = Lesson.certain([1, 2], [token])
    ids, log_probs = given.top_ids.copy(), np.full_like(given.top_log_probs, -np.inf)
    for i, (name, prob) in enumerate(probs.items()):
        ids[0, i], log_probs[0, i] = int(name[1:]), np.log(prob)
    return replace(given, top_ids=ids, top_log_probs=log_probs)


def spell(lesson: Lesson, objective: Objective) -> SpelledLesson:
    spelled = Teacher(tiny_pair(), objective).spell(lesson)
    assert spelled is not None
    return spelled


def taught(passage: Passage, at: int) -> dict[int, float]:
    """Return what the teacher names at a piece."""
    pairs = zip(passage.teacher_ids[at].tolist(), passage.teacher_probs[at].tolist(), strict=True)
    return {piece: prob for piece, prob in pairs if prob > 0}


def test_the_context_is_the_spellings_of_all_tokens_one_after_the_other() -> None:
    found = spell(Lesson.certain([1, NGRAM], [5, 63]), Objective("cross-entropy"))
    assert found.passage.pieces.tolist() == [1, 6, 7, 5, 9, 10]
    assert found.lengths == (1, 2)
    assert found.passage.nll_weight.tolist() == [1, 1, 1]
    assert not found.passage.teacher_weight.any()


def test_the_marginal_sums_over_the_tokens_that_begin_alike_and_leaves_over_the_rest() -> None:
    # 6 is a token and the first piece of 62, so both ask for it.
    passage = spell(lesson(NGRAM, t62=0.5, t6=0.2, t7=0.1), Objective("marginal")).passage
    assert taught(passage, 0) == pytest.approx({6: 0.7, 7: 0.1}, abs=2e-3)
    assert taught(passage, 1) == pytest.approx({7: 1.0}, abs=2e-3)
    assert passage.teacher_weight.tolist() == [1, 1]
    assert not passage.nll_weight.any()


def test_a_token_that_the_target_hardly_expected_is_taught_all_the_same_inside() -> None:
    passage = spell(lesson(NGRAM, t5=0.9), Objective("marginal")).passage
    assert taught(passage, 0) == pytest.approx({5: 0.9}, abs=2e-3)
    assert taught(passage, 1) == {7: 1.0}


def test_the_hybrid_compares_direct_tokens_and_counts_the_pieces_of_others() -> None:
    probs = {"t6": 0.6, "t7": 0.1, "t62": 0.25}
    direct = spell(lesson(6, **probs), Objective.paper()).passage
    assert taught(direct, 0) == pytest.approx({6: 0.6, 7: 0.1}, abs=2e-3)
    assert (direct.teacher_weight[0], direct.nll_weight[0]) == (1, 0)
    ngram = spell(lesson(NGRAM, **probs), Objective.paper()).passage
    assert not ngram.teacher_weight.any()
    assert ngram.nll_weight.tolist() == pytest.approx([0.2, 0.2])
    dynamic = spell(lesson(NGRAM, **probs), Objective.paper(ngram_weight=None)).passage
    assert dynamic.nll_weight.tolist() == pytest.approx([0.25, 0.25], abs=1e-3)
    without = spell(lesson(NGRAM, **probs), Objective.paper(ngram_weight=0.0)).passage
    assert not without.nll_weight.any()


def test_at_certainty_the_marginal_is_cross_entropy() -> None:
    text = Lesson.certain([1], [5, NGRAM, 7])
    passage = spell(text, Objective("marginal")).passage
    following = passage.pieces[-passage.num_predicted :].tolist()
    assert [taught(passage, i) for i in range(4)] == [{piece: 1.0} for piece in following]


def test_a_lesson_without_context_is_learned_from_its_second_token_on() -> None:
    found = spell(Lesson.certain([], [5, 6, 7]), Objective())
    assert found.passage.pieces.tolist() == [5, 6, 7]
    assert found.lengths == (1, 1)
    assert Teacher(tiny_pair(), Objective()).spell(Lesson.certain([], [5])) is None


def test_the_longest_lesson_fits_and_keeps_whole_tokens() -> None:
    found = spell(Lesson.certain([NGRAM] * CONTEXT, [NGRAM] * LENGTH), Objective())
    assert len(found.passage.pieces) == MAX_PIECES
    assert sum(found.lengths) == found.passage.num_predicted == 2 * LENGTH
    assert found.passage.teacher_ids.shape == (2 * LENGTH, TOP)


@pytest.mark.parametrize("kind", ["marginal", "cross-entropy", "hybrid"])
def test_every_row_is_a_distribution_over_different_pieces(kind: str) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TOKENS, 30)
    text = Lesson.certain([1], tokens.tolist())
    ids = np.stack([rng.choice(TOKENS, TOP, replace=False) for _ in tokens]).astype(np.int32)
    log_probs = np.log(rng.dirichlet(np.ones(TOP + 1), 30)[:, :TOP]).astype(np.float16)
    passage = spell(replace(text, top_ids=ids, top_log_probs=log_probs), Objective(kind)).passage  # type: ignore[arg-type]
    assert (passage.teacher_probs.sum(1) <= 1 + 1e-3).all()
    for at in range(passage.num_predicted):
        named = passage.teacher_ids[at][passage.teacher_probs[at] > 0]
        assert len(set(named.tolist())) == len(named)
        assert (named < PIECES).all()
