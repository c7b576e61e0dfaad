"""A prompt as the token ids that a target reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chat_template import render_chat
from .errors import FolderError, PromptError
from .folder import ModelFolder


def encode_prompt(
    folder: ModelFolder,
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, str]],
    *,
    raw: bool = False,
) -> list[int]:
    """Return the token ids of a text or of messages.

    Text is one user message in the model's chat template, unless `raw` or the model has none; then
    it is text to continue. Raises `FolderError` for messages to a model without a template, and
    `PromptError` for what is not Unicode.
    """
    if isinstance(prompt, str):
        if raw or folder.chat_template is None:
            return _encode(tokenizer, prompt)
        prompt = [{"role": "user", "content": prompt}]
    if folder.chat_template is None:
        raise FolderError(f"{folder.path}: has no chat template, so it takes text, not messages")

    def name_of(token: int | None) -> str:
        return (tokenizer.id_to_token(token) or "") if token is not None else ""

    text = render_chat(
        folder.chat_template,
        prompt,
        bos_token=name_of(folder.bos_token_id),
        eos_token=name_of(next(iter(folder.eos_token_ids), None)),
    )
    # The template writes the special tokens itself.
    return _encode(tokenizer, text, add_special_tokens=False)


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt holds {text[error.start]!a}, which is no character but a byte that is not "
            "UTF-8 or half of a surrogate pair; give the text as UTF-8"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
