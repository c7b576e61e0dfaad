"""Examples read as the runtime will read, and every one is seen once per epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.trainer.answers import Answer, TopK
from edgedraft.trainer.batches import collate, group, plan_batches
from edgedraft.trainer.examples import (
    answer_example,
    answer_examples,
    text_examples,
    worth_learning,
)


def test_an_answer_reads_as_its_spellings_and_ends_with_the_end_token(
    answers: list[Answer], vocab_map: VocabMap
) -> None:
    for answer in answers:
        example = answer_example(answer, vocab_map)
        committed = [*answer.prompt_ids, *answer.response_ids]
        assert example.tokens.tolist() == [p for t in committed for p in vocab_map.spelling(t)]
        assert (example.tokens[-1] == 0) == answer.finished
        assert (example.tokens == 1).sum() == 2, "the roles of user and assistant are marks"


def test_the_whole_answer_counts_and_a_tenth_of_the_prompt(
    answers: list[Answer], vocab_map: VocabMap
) -> None:
    for answer in answers:
        prompt = sum(len(vocab_map.spelling(token)) for token in answer.prompt_ids)
        weights = answer_example(answer, vocab_map).weights
        assert (weights[prompt:] == 1).all()
        assert abs(weights[:prompt].sum() - prompt / 10) <= 1


def test_an_unfinished_answer_is_cut_where_it_begins_to_loop(answers: list[Answer]) -> None:
    loop = tuple(range(10, 30))
    answer = replace(answers[1], response_ids=(5, 6, *loop, *loop, *loop), finished=False)
    assert worth_learning(answer) == (5, 6, *loop, *loop[:16])
    assert worth_learning(replace(answer, finished=True)) == answer.response_ids
    assert worth_learning(answers[1]) == answers[1].response_ids


def test_small_data_sets_come_more_than_once_per_epoch(
    answers: list[Answer], vocab_map: VocabMap
) -> None:
    learned = next(answer for answer in answers if not answer.is_held_out)
    assert len(answer_examples([learned], vocab_map)) == 1
    rare = [replace(learned, data_set="mbpp", row=row) for row in range(40)]
    rare = [answer for answer in rare if not answer.is_held_out]
    assert len(answer_examples(rare, vocab_map)) == 3 * len(rare)


def test_texts_are_joined_by_the_end_token_and_lose_nothing(draft_tokenizer: Tokenizer) -> None:
    texts = ["The quick brown fox. " * 60, "The dog sleeps."]
    examples = text_examples(texts, draft_tokenizer)
    stream = [int(token) for example in examples for token in example.tokens]
    assert stream == [
        0,
        *draft_tokenizer.encode(texts[0]).ids,
        0,
        *draft_tokenizer.encode(texts[1]).ids,
    ]
    assert all(len(example.tokens) <= 512 for example in examples)


def test_every_example_is_in_one_group_and_groups_are_not_too_large(
    answers: list[Answer], vocab_map: VocabMap
) -> None:
    examples = answer_examples(answers, vocab_map)
    groups = group(examples, np.random.default_rng(0), max_tokens=400)
    assert sorted(id(e) for g in groups for e in g) == sorted(map(id, examples))
    for members in groups:
        batch = collate(members)
        assert batch.tokens.size <= 400
        for row, example in enumerate(members):
            length = len(example.tokens)
            assert (batch.tokens[row, :length] == example.tokens).all()
            assert batch.weights[row].sum() == example.weights.sum()
            assert not batch.weights[row, length:].any()


def test_a_plan_follows_from_its_seed(answers: list[Answer], vocab_map: VocabMap) -> None:
    examples = answer_examples(answers, vocab_map)

    def order(seed: int) -> list[list[int]]:
        plan = plan_batches(examples[:9], examples, epochs=2, seed=seed)
        return [[id(example) for example in members] for members in plan]

    assert order(3) == order(3)
    assert order(3) != order(4)
    assert sum(map(len, order(3))) == 9 + 2 * len(examples)


def test_a_teacher_is_a_distribution_at_every_position_of_the_answer(
    answers: list[Answer], vocab_map: VocabMap
) -> None:
    rng = np.random.default_rng(0)
    answer = next(a for a in answers if not a.is_held_out)
    count = len(answer.response_ids)
    ids = rng.integers(3, 380, (count, 4))
    ids[:, 1] = answer.response_ids
    top_k = TopK(ids, rng.normal(size=(count, 4)).astype(np.float32))
    example = answer_example(replace(answer, top_k=top_k), vocab_map, teach=True)
    assert example.teacher is not None
    assert example.teacher.probs.sum(-1) == pytest.approx(1.0)
    # The true token is among the likely ones, so its pieces are among the teacher's.
    assert (example.teacher.ids == example.tokens[:, None]).any(-1).all()
    plain = answer_example(answer, vocab_map)
    batch = collate([example, plain])
    assert batch.teacher is not None
    assert batch.teacher.probs.sum(-1) == pytest.approx(1.0)
    assert (batch.teacher.ids[1, : len(plain.tokens), 0] == plain.tokens).all()
    assert collate([plain]).teacher is None
