"""A target answers many prompts at once: one token of every running answer in each pass.

The KV cache holds all tokens of an answer but the last, which the next pass appends. A prompt is
read alone, into its slot; a slot whose answer ended takes the next prompt at once. When there is
none left the last slot moves there, so that the running answers are always the first slots and a
pass computes nothing else.

A row of a pass does not depend on the rows beside it, so an answer is the same in any company, and
the one that `OnnxModel` gives with `single_rows`. Passes of several rows of one sequence, which
verify drafts, take another attention kernel with other roundings. In fp32 that changes nothing
worth mentioning. An int8 graph makes more of a rounding: on SmolLM2-135M 8 of 337 tokens were
another near-tie (5 of 20 short answers; the two logits were less than 0.2 apart).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.errors import FolderError
from edgedraft.runtime.folder import ModelFolder
from edgedraft.runtime.graph_contract import GraphContract, discover, probe
from edgedraft.runtime.ort_session import SessionConfig, onnxruntime, open_session

from .errors import TrainError

_log = logging.getLogger(__name__)
_PROMPT_ROWS = 512  # of one pass: attention's scores grow with rows times tokens
_NEEDED = ("position_ids", "seqlens_k", "total_sequence_length", "logit_rows")


@dataclass(frozen=True, slots=True, eq=False)  # holds a generator
class Request:
    """One prompt to answer."""

    key: Any  # whatever the caller knows it by
    prompt_ids: tuple[int, ...]
    max_tokens: int
    dice: np.random.Generator  # its own, so that a draw depends on no other answer


@dataclass(slots=True, eq=False)
class Reply:
    """The answer to a request, as far as it has come."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False  # by a stop token, which is the last one, rather than cut
    top_ids: list[npt.NDArray[np.int64]] = field(default_factory=list)  # (K,) for every token
    top_logits: list[FloatArray] = field(default_factory=list)  # best first, like their ids

    @property
    def last_token(self) -> int:
        """The token that the next pass appends."""
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def is_complete(self) -> bool:
        """Whether no token follows."""
        return self.finished or len(self.token_ids) == self.request.max_tokens


class BatchedModel:
    """A target's graph with one slot of KV cache for every answer that runs."""

    def __init__(self, folder: ModelFolder, slots: int, capacity: int) -> None:
        """Open the graph of `folder`; a sequence may hold `capacity` tokens.

        Raises `TrainError` for a graph that cannot take several sequences.
        """
        session = _open_session(folder.graph)
        where = str(folder.graph)
        contract = probe(session, discover(session, where, folder.head_dim), where)
        _check(contract, where)
        self._session, self._contract = session, contract
        self._vocab_size = folder.vocab_size or contract.logits_width
        # Zeros take memory only where they are written.
        self._cache = [
            np.zeros((slots, t.num_heads, capacity, t.head_dim), t.dtype) for t in contract.cache
        ]
        self._logits_buffer = np.empty((slots, 1, contract.logits_width), contract.logits_dtype)
        self._bindings: dict[tuple[int, int], Any] = {}
        self._lengths = np.zeros(slots, np.int64)

    @property
    def slots(self) -> int:
        """Most answers that can run at once."""
        return len(self._lengths)

    def fill(self, slot: int, tokens: Sequence[int]) -> None:
        """Let a slot hold these tokens and nothing else."""
        self._lengths[slot] = 0
        for start in range(0, len(tokens), _PROMPT_ROWS):
            self._run(slot, np.array([tokens[start : start + _PROMPT_ROWS]], np.int64))

    def step(self, tokens: Sequence[int]) -> FloatArray:
        """Append one token to each of the first slots; return the logits behind it, shape
        (tokens, vocab), valid until the next call.
        """
        self._run(0, np.array(tokens, np.int64)[:, None])
        logits = self._logits_buffer[: len(tokens), 0, : self._vocab_size]
        return logits.astype(np.float32, copy=False)

    def move(self, source: int, slot: int) -> None:
        """Let a slot hold what another one holds."""
        length = self._lengths[slot] = self._lengths[source]
        for array in self._cache:
            array[slot, :, :length] = array[source, :, :length]

    def _run(self, first: int, tokens: npt.NDArray[np.int64]) -> None:
        """Append tokens, shape (sequences, rows), to the slots from `first` on."""
        sequences, rows = tokens.shape
        lengths = self._lengths[first : first + sequences]
        total = lengths + rows
        values = {
            "input_ids": tokens,
            "position_ids": lengths[:, None] + np.arange(rows),
            "seqlens_k": total - 1,
            "total_sequence_length": total.max(),
            "logit_rows": [rows - 1],
        }
        if self._contract.has("attention_bias"):
            values["attention_bias"] = np.zeros((sequences, 1, rows, total.max()))
        feeds = {n: np.asarray(v, self._contract.dtypes[n]) for n, v in values.items()}
        binding = self._binding(first, sequences)
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        self._session.run_with_iobinding(binding)
        lengths += rows

    def _binding(self, first: int, sequences: int) -> Any:
        """Return the binding of these slots; only the tokens and their places change in it."""
        if (first, sequences) not in self._bindings:
            from_numpy = onnxruntime().OrtValue.ortvalue_from_numpy
            binding = self._session.io_binding()
            for tensor, array in zip(self._contract.cache, self._cache, strict=True):
                value = from_numpy(array[first : first + sequences])
                binding.bind_ortvalue_input(tensor.past, value)
                binding.bind_ortvalue_output(tensor.present, value)
            binding.bind_ortvalue_output("logits", from_numpy(self._logits_buffer[:sequences]))
            self._bindings[first, sequences] = binding
        return self._bindings[first, sequences]


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are chosen, and how many of the best are told with each."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k_logits: int = 0

    def token(self, logits: FloatArray, dice: np.random.Generator) -> int:
        """Choose a token from its logits row, shape (vocab,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        return draw(logits, self.temperature, self.top_p, dice)


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What one pass brought."""

    tokens: int  # one for every answer that ran
    completed: list[Reply]


def answer_all(
    model: BatchedModel,
    requests: Iterable[Request],
    choice: Choice,
    stop_ids: Sequence[int],
    deadline: float = math.inf,
) -> Iterator[Pass]:
    """Answer the requests; yield after every pass. None begins once the deadline has passed."""
    waiting = iter(requests)
    running = [_begin(model, i, request) for i, request in enumerate(islice(waiting, model.slots))]
    while running:
        logits = model.step([reply.last_token for reply in running])
        for reply, row in zip(running, logits, strict=True):
            _append(reply, row, choice, stop_ids)
        done = Pass(len(running), [reply for reply in running if reply.is_complete])
        # From the last slot on, so that what moves into a freed slot is an answer that runs.
        for slot in reversed(range(len(running))):
            if not running[slot].is_complete:
                continue
            if (request := next(waiting, None)) is not None:
                running[slot] = _begin(model, slot, request)
                continue
            last = running.pop()
            if slot < len(running):
                running[slot] = last
                model.move(len(running), slot)
        yield done
        if time.monotonic() > deadline:
            _log.info("the time is over: the same command goes on")
            return


def deadline_after(minutes: float | None) -> float:
    """Return when a run has to end that may take so long, None for as long as it takes."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def draw(logits: FloatArray, temperature: float, top_p: float, dice: np.random.Generator) -> int:
    """Draw a token from the smallest set of likeliest tokens with mass `top_p`, shape (vocab,).

    Drawn from all tokens until one is in that set: sorting a vocabulary would take longer than the
    target takes for the row. Among equally likely tokens those with lower ids come first.
    """
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    cumulative = weights.cumsum(dtype=np.float64)
    total = cumulative[-1]
    while True:
        token = int(cumulative.searchsorted(dice.random() * total, side="right"))
        if top_p == 1:
            return token
        weight = weights[token]
        before = weights[weights > weight].sum(dtype=np.float64)
        before += np.count_nonzero(weights[:token] == weight) * np.float64(weight)
        if before < top_p * total:
            return token


def _begin(model: BatchedModel, slot: int, request: Request) -> Reply:
    model.fill(slot, request.prompt_ids[:-1])
    return Reply(request)


def _append(reply: Reply, logits: FloatArray, choice: Choice, stop_ids: Sequence[int]) -> None:
    token = choice.token(logits, reply.request.dice)
    reply.token_ids.append(token)
    reply.finished = token in stop_ids
    if count := choice.top_k_logits:
        best = np.argpartition(logits, -count)[-count:]
        best = best[np.lexsort((best, -logits[best]))]
        reply.top_ids.append(best)
        reply.top_logits.append(logits[best])


def _open_session(graph: Path) -> Any:
    """Open a graph with the batch dimension left free, which the exporter fixes at 1."""
    model = onnx.load(graph, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        shape = value.type.tensor_type.shape.dim
        if shape and shape[0].dim_value == 1:
            shape[0].dim_param = "batch"
    del model.graph.value_info[:]  # says 1 as well
    try:
        return open_session(model.SerializeToString(), SessionConfig(), weights=graph.parent)
    except FolderError as error:
        raise TrainError(f"{graph}: cannot be loaded for several prompts ({error})") from error


def _check(contract: GraphContract, where: str) -> None:
    """Raise `TrainError` for a graph whose sequences would have to run one by one."""
    missing = [name for name in _NEEDED if not contract.has(name)]
    reason = contract.obstacle or (f"it has no input {missing[0]!r}" if missing else None)
    if reason or not contract.in_place:
        raise TrainError(
            f"{where}: cannot answer several prompts at once "
            f"({reason or 'its cache does not stay in place'}); use a folder that edgedraft-export "
            "made"
        )
