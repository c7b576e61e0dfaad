"""`edgedraft-train corpus`: a target's answers to many prompts, as the file `answers.py` reads.

The file grows by one line per complete answer (`growing_file.py`): a run that was stopped goes on
where it was. Held-out rows are answered, too, since evaluation needs them; test files are refused.

An answer's draws come from noise of its own, made of the seed, the data set, the row and the number
of the sample: how answers were batched or interrupted does not matter to them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from edgedraft.runtime.config import DecodeConfig, SamplingConfig
from edgedraft.runtime.folder import ModelFolder, file_sha256

from .batched_generation import (
    BatchedModel,
    Choice,
    Reply,
    Request,
    answer_all,
    deadline_after,
)
from .data_sets import BY_FILE, TEST_FILES
from .errors import TrainError
from .growing_file import GrowingFile
from .options import require_positive
from .target import Target
from .texts import read_jsonl

_log = logging.getLogger(__name__)
_DECIMALS = 3  # of a logit in the file

Key: TypeAlias = tuple[str, int, int]  # data set, row, sample


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """What to ask which target, and how it answers."""

    target: Path
    prompts: tuple[Path, ...]
    out: Path
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: int = 1
    top_k_logits: int = 0
    batch: int = 32
    limit: int | None = None
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        sampling = SamplingConfig(temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        DecodeConfig(max_tokens=self.max_tokens, sampling=sampling)
        require_positive(self, "samples", "batch", "limit", "max_minutes")
        if self.top_k_logits < 0:
            raise ValueError(f"top_k_logits must be >= 0 (0 is none), got {self.top_k_logits}")
        if self.temperature == 0 and (self.samples > 1 or self.top_p < 1):
            raise ValueError("samples and top_p need a temperature > 0: greedy answers are equal")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a file."""

    data_set: str
    row: int
    text: str


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Yield the prompts of a known data set, or the "prompt" of every row of another file."""
    if path.stem in TEST_FILES:
        raise TrainError(f"{path}: holds test rows, which no drafter may know; leave it out")
    if data_set := BY_FILE.get(path.stem):
        for number, row in data_set.rows(read_jsonl(path)):
            yield Prompt(data_set.name, number, data_set.prompt(row))
        return
    for number, row in enumerate(read_jsonl(path)):
        if not isinstance(row.get("prompt"), str):
            raise TrainError(
                f"{path}:{number + 1}: has no 'prompt', and the file is no data set known by name"
            )
        yield Prompt(path.stem, number, row["prompt"])


def make_corpus(options: CorpusOptions) -> None:
    """Answer the prompts that have no answer yet, until all are answered or the time is over."""
    deadline = deadline_after(options.max_minutes)
    prompts = _all_prompts(options)
    target = Target(options.target)
    folder = target.folder
    with GrowingFile(options.out, _settings(options, folder), options.prompts) as file:
        done = {(row["set"], row["row"], row.get("sample", 0)) for row in file.rows()}
        requests = _requests(options, target, prompts, done)
        total = len(prompts) * options.samples
        if not requests:
            _log.info("%s: nothing left to answer", options.out)
            return
        needed = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        model = BatchedModel(folder, min(options.batch, len(requests)), needed)
        choice = Choice(options.temperature, options.top_p, options.top_k_logits)
        progress = file.progress("answers", total - len(requests), total)
        for passed in answer_all(model, requests, choice, folder.eos_token_ids, deadline):
            for reply in passed.completed:
                file.append(_row(reply, options, target))
            progress.count(len(passed.completed), passed.tokens)
        progress.log()


def _all_prompts(options: CorpusOptions) -> list[Prompt]:
    prompts: dict[tuple[str, int], Prompt] = {}
    for path in options.prompts:
        for prompt in list(read_prompts(path))[: options.limit]:
            if (prompt.data_set, prompt.row) in prompts:
                raise TrainError(f"{path}: another file has the same name; rename one of them")
            prompts[prompt.data_set, prompt.row] = prompt
    return list(prompts.values())


def _requests(
    options: CorpusOptions, target: Target, prompts: list[Prompt], done: Collection[Key]
) -> list[Request]:
    requests = []
    too_long = 0
    for prompt in prompts:
        ids = target.encode(prompt.text)
        if not 0 < len(ids) <= target.folder.context_length - options.max_tokens:
            too_long += 1
            continue
        for sample in range(options.samples):
            key = (prompt.data_set, prompt.row, sample)
            if key not in done:
                dice = _dice(options.seed, key)
                requests.append(Request((prompt, sample), ids, options.max_tokens, dice))
    if too_long:
        _log.warning(
            "%d prompts are left out: empty, or longer than the context of %d allows",
            too_long,
            target.folder.context_length,
        )
    return requests


def _dice(seed: int, key: Key) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def _settings(options: CorpusOptions, folder: ModelFolder) -> dict[str, Any]:
    """Return what the answers depend on."""
    return {
        "target": folder.fingerprint,
        "prompts": {file.name: file_sha256(file) for file in options.prompts},
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "samples": options.samples,
        "top_k_logits": options.top_k_logits,
    }


def _row(reply: Reply, options: CorpusOptions, target: Target) -> dict[str, Any]:
    prompt, sample = reply.request.key
    row = {"set": prompt.data_set, "row": prompt.row}
    if options.temperature > 0:
        row |= {"temperature": options.temperature, "sample": sample}
    row |= {
        "finished": reply.finished,
        "prompt": prompt.text,
        "response_ids": reply.token_ids,
        "response": target.decode(reply.token_ids),
    }
    if options.top_k_logits:
        row["top_k_ids"] = [ids.tolist() for ids in reply.top_ids]
        row["top_k_logits"] = [
            x.astype(np.float64).round(_DECIMALS).tolist() for x in reply.top_logits
        ]
    return row
