"""Runs graphs whose past and present share one buffer (GroupQueryAttention): EdgeDraft's,
onnxruntime-genai's, onnx-community's.

The graph reads only the first `total` slots, so a rollback is no work at all, and what it leaves
behind is overwritten. Buffers are reserved for a long text from the start and take memory page by
page as they fill: growing by copying would hold two caches for a moment, and what it leaves behind
is seldom given back.
Everything a pass touches is bound once per row count and reused: binding sixty cache tensors anew
would cost more than the rest of a round's bookkeeping.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .datatypes import FloatArray
from .graph_contract import GraphContract
from .ort_session import onnxruntime

_RESERVED = 8192  # slots; beyond, buffers grow by this many, since a model may allow a million
_REUSED_ROWS = 16  # prefill shapes vary: keeping their buffers would hold megabytes for nothing


@dataclass(slots=True)
class _Binding:
    """The buffers of passes with as many rows, of which the same have logits."""

    io: Any
    inputs: dict[str, npt.NDArray[Any]]  # written in place before a pass
    logits: npt.NDArray[Any]  # (logit rows, width)
    acceptance: FloatArray | None  # (logit rows,)


class InPlaceRunner:
    """A session and the key/value buffers it updates in place."""

    def __init__(self, session: Any, contract: GraphContract, context_length: int) -> None:
        self._session = session
        self._contract = contract
        self._block = min(context_length, _RESERVED)
        self._capacity = 0
        self.arrays: list[npt.NDArray[Any]] = []  # (1, heads, capacity, head size) each
        self._values: list[Any] = []  # OrtValues over the same memory
        self._bindings: dict[tuple[int, range], _Binding] = {}
        # One buffer for all row counts: it is as long as sixteen vocabularies.
        shape = (1, _REUSED_ROWS, contract.logits_width)
        self._logits = np.empty(shape, contract.logits_dtype)
        self.acceptance: FloatArray | None = None  # of the last pass's logit rows, where told
        self._reserve(1)

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        total: int,
        bias: FloatArray | None,
        wanted: range,
    ) -> FloatArray:
        """Append the tokens so that the cache holds `total`; return the logits of the rows that are
        wanted, of all where the graph allows no choice, shape (rows, width).
        """
        self._reserve(total)
        rows = len(tokens)
        if self._contract.last_row_only:
            wanted = range(rows - 1, rows)
        elif not self._contract.has("logit_rows"):
            wanted = range(rows)
        binding = self._bindings.get((rows, wanted)) or self._bind(rows, wanted)
        inputs = binding.inputs
        inputs["input_ids"][0] = tokens
        if "position_ids" in inputs:
            inputs["position_ids"][0] = positions
        if "seqlens_k" in inputs:
            inputs["seqlens_k"][...] = total - 1
            inputs["total_sequence_length"][...] = total
        # The shapes of these two follow the cache length.
        if self._contract.has("attention_mask"):
            mask = np.ones((1, total), self._contract.dtypes["attention_mask"])
            binding.io.bind_cpu_input("attention_mask", mask)
        if self._contract.has("attention_bias"):
            if bias is None:
                bias = np.zeros((1, 1, rows, total), np.float32)
            binding.io.bind_cpu_input("attention_bias", bias)
        self._session.run_with_iobinding(binding.io)
        self.acceptance = binding.acceptance
        return binding.logits.astype(np.float32, copy=False)

    def _reserve(self, length: int) -> None:
        """Make room for `length` tokens."""
        if length <= self._capacity:
            return
        old, self._capacity = self._capacity, -(-length // self._block) * self._block
        self._bindings.clear()
        from_numpy = onnxruntime().OrtValue.ortvalue_from_numpy
        for i, t in enumerate(self._contract.cache):
            array = _reserved_zeros((1, t.num_heads, self._capacity, t.head_dim), t.dtype)
            if old:  # one tensor at a time, so that growing never holds two whole caches
                array[:, :, :old] = self.arrays[i]
                self.arrays[i], self._values[i] = array, from_numpy(array)
            else:
                self.arrays.append(array)
                self._values.append(from_numpy(array))

    def _bind(self, rows: int, wanted: range) -> _Binding:
        logit_rows = len(wanted)
        contract, from_numpy = self._contract, onnxruntime().OrtValue.ortvalue_from_numpy
        io = self._session.io_binding()
        inputs: dict[str, npt.NDArray[Any]] = {}
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": (1, rows),
            "position_ids": (1, rows),
            "seqlens_k": (1,),
            "total_sequence_length": (),
            "logit_rows": (logit_rows,),
        }
        for name, shape in shapes.items():
            if contract.has(name):
                inputs[name] = np.zeros(shape, contract.dtypes[name])
                io.bind_ortvalue_input(name, from_numpy(inputs[name]))
        if "logit_rows" in inputs:
            inputs["logit_rows"][:] = wanted
        for name, value in contract.switches().items():
            io.bind_cpu_input(name, value)
        logits = self._logits[:, :logit_rows]
        if logit_rows > _REUSED_ROWS:
            logits = np.empty((1, logit_rows, contract.logits_width), contract.logits_dtype)
        io.bind_ortvalue_output("logits", from_numpy(logits))
        acceptance = np.empty(logit_rows, np.float32) if contract.acceptance else None
        if acceptance is not None:
            io.bind_ortvalue_output("acceptance", from_numpy(acceptance))
        for tensor, value in zip(contract.cache, self._values, strict=True):
            io.bind_ortvalue_input(tensor.past, value)
            io.bind_ortvalue_output(tensor.present, value)
        binding = _Binding(io, inputs, logits[0], acceptance)
        if rows <= _REUSED_ROWS:
            self._bindings[rows, wanted] = binding
        return binding


def _reserved_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros that take memory only where they are written.

    numpy's own may come from memory used before, which has to be cleared and so becomes resident.
    """
    size = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    pages = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # one written slot would make 2 MiB resident
    return np.frombuffer(pages, dtype).reshape(shape)
