"""Prompts for a benchmark: files of public data sets, or names of them on the hub.

A row is recognised by its field names; what it asks becomes one user message (or several messages,
where the row holds a conversation). A row of no known shape is an error that names the file, the
line and the fields, because silently skipped rows would change what a result means.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .errors import PromptError
from .extras import need

Row: TypeAlias = Mapping[str, Any]
Message: TypeAlias = Mapping[str, str]

HUB_PREFIX = "hub:"
_ABSTRACT = "Summarize the following abstract in one sentence.\n\n"
_ARTICLE = "Summarize the following article in one sentence.\n\n"
_ID_FIELDS = ("question_id", "task_id", "paper_id", "id")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a benchmark."""

    id: str  # "file stem:id of the row", or its line number
    class_name: str  # the row's category (Spec-Bench, MT-bench), else the file's stem
    content: str | tuple[Message, ...]  # one user message, or a conversation


def load_prompts(sources: Sequence[str], limit: int | None = None) -> list[BenchPrompt]:
    """Read prompt files (.jsonl, .json with a list, .txt with one prompt) and hub data sets
    ("hub:NAME", "hub:NAME:SPLIT" or "hub:NAME:CONFIG:SPLIT"); keep the first `limit` prompts of
    every class.

    Raises `PromptError` for a source that cannot be read or holds a row of no known shape.
    """
    taken: Counter[str] = Counter()
    prompts = []
    for source in sources:
        for prompt in _read(source):
            if limit is None or taken[prompt.class_name] < limit:
                taken[prompt.class_name] += 1
                prompts.append(prompt)
    if not prompts:
        raise PromptError(f"{', '.join(sources)}: no prompts in there")
    return prompts


def _read(source: str) -> Iterator[BenchPrompt]:
    if source.startswith(HUB_PREFIX):
        name, rows = _hub_rows(source.removeprefix(HUB_PREFIX))
        return _prompts(source, name, enumerate(rows, 1))
    path = Path(source)
    try:
        content = path.read_bytes()
        if path.suffix == ".txt":
            return iter([BenchPrompt(path.stem, path.stem, content.decode("utf-8-sig"))])
        return _prompts(source, path.stem, _json_rows(source, content))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{source}: cannot be read ({error})") from error


def _prompts(source: str, stem: str, rows: Iterable[tuple[int, Any]]) -> Iterator[BenchPrompt]:
    for line, row in rows:
        content = _content(row) if isinstance(row, dict) else None
        if not content:
            found = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise PromptError(
                f"{source}, line {line}: no known shape of prompt: it has {found or 'no fields'}; "
                f"expected text in one of {', '.join(_SHAPES)}"
            )
        category = row.get("category")
        class_name = category if isinstance(category, str) and "turns" in row else stem
        given = next((row[f] for f in _ID_FIELDS if isinstance(row.get(f), str | int)), line)
        yield BenchPrompt(f"{stem}:{given}", class_name, content)


def _json_rows(source: str, content: bytes) -> Iterator[tuple[int, Any]]:
    # Only "\n" ends a row: some texts hold other characters that count as line breaks elsewhere.
    lines: Iterable[bytes] = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if Path(source).suffix == ".json":
        lines = [content]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{source}, line {number}: not JSON ({error})") from error
        if isinstance(value, list):
            yield from enumerate(value, 1)
        else:
            yield number, value


def _hub_rows(spec: str) -> tuple[str, Iterable[Any]]:
    name, *rest = spec.split(":")
    split = rest[-1] if rest else "test"
    config = rest[0] if len(rest) > 1 else None
    datasets = need("datasets", f"{HUB_PREFIX}{spec}", "datasets")
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets and its HTTP client raise many unrelated classes
        reason = " ".join(str(error).split())[:300]
        raise PromptError(f"{HUB_PREFIX}{spec}: cannot be loaded ({reason})") from error
    return name.rsplit("/", 1)[-1], rows


def _content(row: Row) -> str | tuple[Message, ...] | None:
    """Return what a row asks, by the first field that is known; None if there is none."""
    return next((_SHAPES[name](row) for name in _SHAPES if name in row), None)


def _messages(row: Row) -> tuple[Message, ...] | None:
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        return None
    # What the assistant said last is the answer, not the question.
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def _first_turn(row: Row) -> str | None:
    turns = row["turns"]
    return _text(turns[0]) if isinstance(turns, list) and turns else None


def _instruction(row: Row) -> str | None:
    """Alpaca's instruction and input, or self-instruct's with the input of its first instance."""
    instances = row.get("instances")
    holder = instances[0] if isinstance(instances, list) and instances else row
    given = holder.get("input") if isinstance(holder, dict) else None
    instruction = _text(row["instruction"])
    return f"{instruction}\n\n{given}" if instruction and _text(given) else instruction


def _abstract(row: Row) -> str | None:
    source = row["source"]
    if isinstance(source, list) and all(isinstance(s, str) for s in source):
        source = " ".join(source)
    return _ABSTRACT + source if _text(source) else None


def _article(row: Row) -> str | None:
    document = _text(row["document"])
    return _ARTICLE + document if document else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


# In this order: a row may hold several of these fields, and the first says what it is.
_SHAPES: dict[str, Callable[[Row], str | tuple[Message, ...] | None]] = {
    "messages": _messages,
    "turns": _first_turn,  # Spec-Bench, MT-bench
    "question": lambda row: _text(row["question"]),  # GSM8K
    "instruction": _instruction,  # Alpaca-style, self-instruct
    "source": _abstract,  # SciTLDR
    "document": _article,  # XSum
    "prompt": lambda row: _text(row["prompt"]),  # HumanEval, P3
    "text": lambda row: _text(row["text"]),  # MBPP
}
