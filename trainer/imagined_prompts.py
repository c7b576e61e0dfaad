"""`edgedraft-train prompts`: what a target expects to be asked, as prompts for `corpus`.

A model that was taught to chat has read many requests. Given the opening of its chat template up to
where the user speaks, it writes one (Magpie, Xu et al., arXiv 2406.08464): a mix of tasks that
needs no data and is the target's own. Requests that are cut off, empty or said before are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from edgedraft.runtime.config import SamplingConfig

from .batched_generation import BatchedModel, Choice, Request, answer_all, deadline_after
from .growing_file import GrowingFile
from .options import require_positive
from .target import Target

_log = logging.getLogger(__name__)
_LEAST_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How many requests of which target."""

    target: Path
    out: Path
    count: int = 1000
    max_tokens: int = 160
    temperature: float = 1.0
    top_p: float = 0.98
    seed: int = 0
    batch: int = 32
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        SamplingConfig(temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        if self.temperature == 0:
            raise ValueError("temperature must be > 0, got 0: every request would be the same")
        require_positive(self, "count", "max_tokens", "batch", "max_minutes")


def imagine_prompts(options: PromptOptions) -> None:
    """Write requests until there are enough, or the time is over."""
    deadline = deadline_after(options.max_minutes)
    target = Target(options.target)
    folder = target.folder
    opening = target.user_opening()
    settings = {
        "target": folder.fingerprint,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
    }
    with GrowingFile(options.out, settings, []) as file:
        known = {row["prompt"]: row["draw"] for row in file.rows()}
        if len(known) >= options.count:
            _log.info("%s: holds %d prompts already", options.out, len(known))
            return
        model = BatchedModel(folder, options.batch, len(opening) + options.max_tokens)
        first = 1 + max(known.values(), default=-1)
        requests = _requests(opening, options, first)
        choice = Choice(options.temperature, options.top_p)
        progress = file.progress("prompts", len(known), options.count)
        for passed in answer_all(model, requests, choice, folder.eos_token_ids, deadline):
            before = len(known)
            for reply in passed.completed:
                text = target.decode(reply.token_ids).strip()
                if reply.finished and len(text) >= _LEAST_CHARACTERS and text not in known:
                    known[text] = reply.request.key
                    file.append({"prompt": text, "draw": reply.request.key})
            progress.count(len(known) - before, passed.tokens)
            if len(known) >= options.count:
                break
        progress.log()


def _requests(opening: tuple[int, ...], options: PromptOptions, first: int) -> Iterator[Request]:
    """Yield the same opening again and again, each time with noise of its own."""
    for draw in count(first):
        noise = np.random.Philox(key=options.seed, counter=[0, 0, 0, draw])
        yield Request(draw, opening, options.max_tokens, np.random.Generator(noise))
