"""From messages to a prompt, with the model's own template in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from .errors import FolderError, PromptError


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """Return the prompt that asks for the next assistant message.

    Raises `PromptError` when the template refuses the messages, and `FolderError` when it is
    broken.
    """
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise PromptError(f"the model's chat template refuses the messages: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=[dict(m) for m in messages],
            add_generation_prompt=True,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except PromptError:
        raise
    except Exception as error:  # a template is a program, and may fail like one
        raise FolderError(f"the model's chat template cannot be rendered ({error})") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=False, indent=indent)
