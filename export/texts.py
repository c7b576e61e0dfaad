"""From texts to the token sequences that a model is calibrated and measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgedraft.runtime.chat_template import render_chat

from .errors import ExportError
from .sample_texts import Text
from .sources import Source

_LONGEST = 512  # tokens of one text that are used
_LIMIT = 32  # texts of one file that are used
# What public data sets call a question and its answer.
_PAIRS = (
    *(("question", "answer"), ("prompt", "canonical_solution"), ("prompt", "completion")),
    *(("instruction", "output"), ("instruction", "response"), ("text", "code")),
    *(("source", "target"), ("document", "summary")),
)


def read_texts(path: Path) -> tuple[Text, ...]:
    """Read the first texts of a .txt file (one text) or a .jsonl file (one a line).

    A line holds `text`, or a question and its answer under the names public data sets use. Raises
    ExportError for anything else.
    """
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return (content,)
        rows = [json.loads(x) for x in content.split("\n") if x.strip()][:_LIMIT]
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read ({error})") from error
    texts = [_text_of(row) for row in rows if isinstance(row, dict)]
    known = tuple(x for x in texts if x is not None)
    if not known or len(known) < len(rows):
        raise ExportError(f"{path}: every line needs a field `text`, or a question and its answer")
    return known


def _text_of(row: dict[str, Any]) -> Text | None:
    for names in (*_PAIRS, ("text",)):
        values = [row.get(name) for name in names]
        parts = [" ".join(x) if isinstance(x, list) else x for x in values]
        known = tuple(x for x in parts if isinstance(x, str))
        if len(known) == len(names):
            return known if len(known) > 1 else known[0]
    return None


def tokenize(source: Source, texts: tuple[Text, ...]) -> list[list[int]]:
    """Return the token ids of every text, dialogues through the model's template if it has one."""
    sequences = [_tokenize(source, text)[:_LONGEST] for text in texts]
    longest = min(_LONGEST, source.context_length - 1)
    return [x[:longest] for x in sequences if len(x) > 1]


def _tokenize(source: Source, text: Text) -> list[int]:
    tokenizer = source.tokenizer
    if isinstance(text, str):
        ids: list[int] = tokenizer.encode(text).ids
    elif source.chat_template is None:
        ids = tokenizer.encode("\n\n".join(text)).ids
    else:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": x} for i, x in enumerate(text)]
        prompt = render_chat(
            source.chat_template,
            turns[:-1],
            bos_token=_spelling(tokenizer, source.bos_token_id),
            eos_token=_spelling(
                tokenizer, source.eos_token_ids[0] if source.eos_token_ids else None
            ),
        )
        ids = tokenizer.encode(prompt + text[-1], add_special_tokens=False).ids
    return [x for x in ids if x < source.vocab_size]


def _spelling(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.id_to_token(token) or ""
