"""Which prompt is found in which row, and what is said about a row that holds none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgedraft.runtime.errors import EdgeDraftError, PromptError
from edgedraft.runtime.prompt_files import BenchPrompt, load_prompts


def write_rows(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


def only_prompt(tmp_path: Path, row: dict[str, Any]) -> BenchPrompt:
    (prompt,) = load_prompts([write_rows(tmp_path / "set.jsonl", row)])
    return prompt


ABSTRACT = "Summarize the following abstract in one sentence.\n\n"
ARTICLE = "Summarize the following article in one sentence.\n\n"


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"question": "How many?", "answer": "#### 3"}, "How many?"),  # GSM8K
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "x"}, "def f():"),
        ({"text": "Write it.", "code": "pass", "task_id": 11}, "Write it."),  # MBPP
        ({"turns": ["First.", "Then."], "category": "rag", "question_id": 1}, "First."),
        ({"source": ["One.", "Two."], "target": ["T."]}, ABSTRACT + "One. Two."),  # SciTLDR
        ({"instruction": "Do it.", "input": "", "output": ""}, "Do it."),  # Alpaca
        ({"instruction": "Do it.", "input": "Here.", "output": ""}, "Do it.\n\nHere."),
        ({"instruction": "Do.", "instances": [{"input": "That."}]}, "Do.\n\nThat."),
        ({"instruction": "Do.", "instances": [{"input": ""}]}, "Do."),  # self-instruct
        ({"document": "Long.", "summary": "S."}, ARTICLE + "Long."),  # XSum
        ({"prompt": "Summarize: x", "completion": "y"}, "Summarize: x"),  # P3
    ],
)
def test_the_prompt_of_every_known_data_set_is_found(
    tmp_path: Path, row: dict[str, Any], content: str
) -> None:
    assert only_prompt(tmp_path, row).content == content


def test_a_conversation_is_asked_without_its_last_answer(tmp_path: Path) -> None:
    question = {"role": "user", "content": "Hi"}
    row = {"messages": [question, {"role": "assistant", "content": "Hello"}]}
    assert only_prompt(tmp_path, row).content == (question,)


def test_class_and_id_come_from_the_row_or_the_file(tmp_path: Path) -> None:
    bench = write_rows(
        tmp_path / "spec.jsonl", {"question_id": 7, "category": "qa", "turns": ["Who?"]}
    )
    plain = write_rows(tmp_path / "own.jsonl", {"prompt": "a", "category": "x"}, {"prompt": "b"})
    found = [(p.id, p.class_name) for p in load_prompts([bench, plain])]
    assert found == [("spec:7", "qa"), ("own:1", "own"), ("own:2", "own")]


def test_the_limit_holds_for_every_class_apart(tmp_path: Path) -> None:
    rows = [{"category": c, "turns": [f"{c}{i}"]} for i in range(3) for c in ("qa", "rag")]
    prompts = load_prompts([write_rows(tmp_path / "spec.jsonl", *rows)], limit=2)
    assert [p.content for p in prompts] == ["qa0", "rag0", "qa1", "rag1"]


def test_only_newlines_end_a_row(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\x0bfour"
    assert only_prompt(tmp_path, {"prompt": text}).content == text


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [(p.id, p.content) for p in load_prompts([str(path)])] == [
        ("set:1", "a"),
        ("set:3", "b"),
    ]


def test_a_text_file_is_one_prompt_and_a_json_list_is_many(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("Two\nlines.")
    (tmp_path / "set.json").write_text('[{"prompt": "a"},\n {"prompt": "b"}]')
    prompts = load_prompts([str(tmp_path / "note.txt"), str(tmp_path / "set.json")])
    assert [p.content for p in prompts] == ["Two\nlines.", "a", "b"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"prompt": "a"}\n{"headline": "b", "body": "c"}\n', "line 2: .*has headline, body;"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"turns": []}\n', "line 1: no known shape"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: no known shape"),
        ('{"question": ""}\n', "line 1: no known shape.*question"),
        ("3\n", "line 1: .*has a int"),
        ("{}\n", "line 1: .*has no fields"),
        ("[" * 100_000 + "\n", "line 1: not JSON"),
        ("\n", "no prompts"),
    ],
)
def test_a_row_without_a_prompt_is_named_with_its_fields(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(PromptError, match=rf"set\.jsonl.*{complaint}"):
        load_prompts([str(path)])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"none\.jsonl: cannot be read"):
        load_prompts([str(tmp_path / "none.jsonl")])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(PromptError, match=r"latin\.txt: cannot be read"):
        load_prompts([str(tmp_path / "latin.txt")])


def test_hub_data_sets_are_loaded_by_name_configuration_and_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"question": "a"}, {"question": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prompts = load_prompts(["hub:openai/gsm8k:main:test"], limit=1)
    load_prompts(["hub:a/b", "hub:a/b:train"])
    assert [(p.id, p.class_name, p.content) for p in prompts] == [("gsm8k:1", "gsm8k", "a")]
    assert asked == [
        ("openai/gsm8k", "main", "test"),
        ("a/b", None, "test"),
        ("a/b", None, "train"),
    ]


def test_a_hub_data_set_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EdgeDraftError, match='hub:openai/gsm8k needs datasets: pip install "data'):
        load_prompts(["hub:openai/gsm8k"])


def test_what_the_hub_refuses_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(PromptError, match="hub:a/b: cannot be loaded .no network."):
        load_prompts(["hub:a/b"])
