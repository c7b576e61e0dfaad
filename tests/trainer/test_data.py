"""Held-out and test rows never reach training; the rest reads as the target read it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.trainer.answers import Answer, read_answers
from edgedraft.trainer.data_sets import BY_NAME, TEST_FILES, is_held_out
from edgedraft.trainer.errors import TrainError
from edgedraft.trainer.examples import answer_example, answer_examples
from edgedraft.trainer.target import Target
from edgedraft.trainer.texts import read_texts

Rows = Callable[..., Path]


def gsm8k_rows(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i}?", "answer": f"It is <<{i}={i}>>{i}."} for i in range(count)]


def test_one_row_in_ten_is_held_out_and_always_the_same_one() -> None:
    held = [row for row in range(2000) if is_held_out("gsm8k_train", row)]
    assert 150 < len(held) < 250
    assert held == [
        row for row in range(2000) if hashlib.sha256(f"gsm8k_train:{row}".encode()).digest()[0] < 26
    ]


def test_held_out_rows_of_a_data_set_are_not_text(write_rows: Rows) -> None:
    path = write_rows("gsm8k_train.jsonl", *gsm8k_rows(300))
    texts = set(read_texts([path]))
    for row in range(300):
        assert (f"What is {row}?\n\nIt is {row}." in texts) != is_held_out("gsm8k_train", row)


def test_held_out_answers_are_neither_text_nor_examples(
    write_rows: Rows, answers: list[Answer], vocab_map: VocabMap
) -> None:
    rows = [{"set": "toy", "row": i, "response": f"answer {i}"} for i in range(300)]
    texts = set(read_texts([write_rows("responses.jsonl", *rows)]))
    for row in range(300):
        assert (f"answer {row}" in texts) != is_held_out("toy", row)

    held_out = {bytes(answer_example(a, vocab_map).tokens) for a in answers if a.is_held_out}
    assert held_out
    examples = answer_examples(answers, vocab_map)
    assert len(examples) == len(answers) - len(held_out)
    assert not held_out & {bytes(example.tokens) for example in examples}


@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_test_rows_are_refused(
    write_rows: Rows, answer_row: Callable[[int], dict[str, Any]], target: Target, name: str
) -> None:
    with pytest.raises(TrainError, match="test rows"):
        list(read_texts([write_rows(f"{name}.jsonl", {"text": "a"})]))
    with pytest.raises(TrainError, match="test rows"):
        read_answers(write_rows("a.jsonl", answer_row(1) | {"set": name}), target)


def test_test_tasks_in_the_file_of_a_data_set_are_skipped(write_rows: Rows) -> None:
    tasks = [{"task_id": i, "text": f"task {i}", "code": f"return {i}"} for i in range(1, 600)]
    texts = list(read_texts([write_rows("mbpp.jsonl", *tasks)]))
    used = {int(text.rsplit(" ", 1)[1]) for text in texts}
    assert used
    assert not used & set(range(11, 511))


def test_a_prompt_is_found_in_the_data_set_beside_the_answers(
    write_rows: Rows, answer_row: Callable[[int], dict[str, Any]], target: Target
) -> None:
    write_rows("gsm8k_train.jsonl", *gsm8k_rows(5))
    row = answer_row(3) | {"set": "gsm8k_train"}
    del row["prompt"]
    (answer,) = read_answers(write_rows("answers.jsonl", row), target)
    assert answer.prompt_ids == target.encode("What is 3?")


def test_a_prompt_carries_the_chat_template(target: Target, answers: list[Answer]) -> None:
    start, end = 1, 2  # <|im_start|> and <|im_end|>
    ids = answers[0].prompt_ids
    assert ids[0] == start
    assert ids.count(start) == 2
    assert ids.count(end) == 1


def test_every_data_set_reads_a_row_of_its_own() -> None:
    rows: dict[str, dict[str, Any]] = {
        "gsm8k_train": {"question": "q", "answer": "a"},
        "mbpp": {"task_id": 600, "text": "q", "code": "a"},
        "scitldr": {"source": ["q"], "target": ["a"]},
        "scitldr_dev": {"source": ["q"], "target": ["a"]},
        "llms_from_scratch": {"instruction": "q", "input": "", "output": "a"},
        "self_instruct": {"instruction": "q", "instances": [{"input": "", "output": "a"}]},
    }
    assert rows.keys() == BY_NAME.keys()
    for name, row in rows.items():
        assert BY_NAME[name].text(row) == "q\n\na"
        assert BY_NAME[name].prompt(row).endswith("q")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"set": "toy"}', "not an answer"),
        ('{"set": "toy", "row": 1, "finished": true, "response_ids": []}', "empty"),
        ('{"set": "new", "row": 1, "finished": true, "response_ids": [5]}', "give its answers"),
        (
            '{"set": "toy", "row": 1, "prompt": "a", "finished": true, "response_ids": [5], '
            '"top_k_ids": [[1], [2]], "top_k_logits": [[1], [2]]}',
            "one row per response token",
        ),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(
    tmp_path: Path, target: Target, line: str, message: str
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(TrainError, match=message):
        read_answers(path, target)
