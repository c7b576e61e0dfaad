"""What a decoder graph wants to be fed and what it returns, read from the graph itself.

Four exporters are understood: EdgeDraft's own, optimum's decoder-with-past, onnx-community's and
onnxruntime-genai's. They differ in names and in how the cache length is told; `GraphContract` says
which is which. A state that cannot be rolled back to a length (convolution or recurrent state) is
refused here, before the first token, and rows that influence each other are found out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import FolderError
from .ort_session import onnxruntime

_log = logging.getLogger(__name__)

_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(bool)": np.dtype(np.bool_),
}
_PAST = re.compile(
    r"past_(?:key_values\.(\d+)\.(key|value)|(key|value)_values?\.(\d+)|(key|value)_(\d+))"
)
_PRESENT = re.compile(r"present(?:_key_values)?(?:\.(\d+)\.(key|value)|_(key|value)[._](\d+))")
# Scalars some exporters add, and the value that means "an ordinary pass with a cache".
_SWITCHES = ("use_cache_branch", "num_logits_to_keep")
# What the rows beside it may change in a row's logits, relative to their range, before no draft is
# verified any more. Roundings of float16 reach 2e-4, one activation scale for all rows 1e-2.
_ROW_TOLERANCE = 3e-4
_NARROW_HEAD, _WIDE_HEAD = 128, 256
_KNOWN = {
    "input_ids",
    "position_ids",
    "attention_mask",
    "seqlens_k",
    "total_sequence_length",
    "attention_bias",
    "logit_rows",
    *_SWITCHES,
}


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One key or value cache: its input, its output and what stays fixed of its shape."""

    past: str
    present: str
    num_heads: int
    head_dim: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class GraphContract:
    """Names and types of a decoder graph's inputs and outputs."""

    dtypes: dict[str, np.dtype[Any]]  # every input except the caches
    cache: tuple[CacheTensor, ...]
    logits_dtype: np.dtype[Any]
    acceptance: bool = False  # an output says how likely each row's likeliest token is accepted
    logits_width: int = 0  # known after `probe`, like all below
    in_place: bool = False  # past and present may share one buffer
    last_row_only: bool = False  # the other rows of a pass get no logits
    row_difference: float = 0.0  # what other rows change in a row's logits, relative to their range
    lone_logits: bool = False  # a row's are the same bits when the row beside it gets none

    @property
    def obstacle(self) -> str | None:
        """Why no draft can be verified in one pass; None where it can."""
        if self.last_row_only:
            return "it returns the logits of its last row only"
        if self.changes_order and self._widest_head != _WIDE_HEAD:
            return (
                f"attention over heads of {self._widest_head} changes its order of summation at "
                "lengths that depend on the CPU"
            )
        if not self.row_difference <= _ROW_TOLERANCE:  # NaN is no agreement either
            return (
                f"the rows of a pass change each other's logits by {self.row_difference:.1%} of "
                "their range, as one activation scale for all rows does"
            )
        return None

    @property
    def changes_order(self) -> bool:
        """Whether attention sums in another order once the cache has grown past certain lengths.

        GroupQueryAttention does so for heads wider than 128 (onnxruntime 1.32), every L2 / (32 *
        width) tokens: a multiple of 32 for heads of 256, whatever the CPU.
        """
        return self.in_place and self._widest_head > _NARROW_HEAD

    @property
    def _widest_head(self) -> int:
        return max(tensor.head_dim for tensor in self.cache)

    @property
    def every_row(self) -> bool:
        """Whether each row of a pass gets the logits it has in any company."""
        return self.obstacle is None

    def has(self, name: str) -> bool:
        """Whether the graph has this input."""
        return name in self.dtypes

    def switches(self) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs that say "an ordinary pass with a cache" in some exporters' graphs."""
        values = {"use_cache_branch": [True], "num_logits_to_keep": 0}
        return {n: np.array(v, self.dtypes[n]) for n, v in values.items() if self.has(n)}


def discover(session: Any, where: str, head_dim: int | None = None) -> GraphContract:
    """Read the contract of an open session.

    `where` names the graph in messages; `head_dim` is used where the graph leaves it symbolic.

    Raises `FolderError` for a graph that is not a decoder with a key/value cache.
    """
    try:
        return _discover(session, where, head_dim)
    except UnicodeDecodeError as error:
        raise FolderError(f"{where}: a name in the graph is not UTF-8; export it again") from error


def _discover(session: Any, where: str, head_dim: int | None) -> GraphContract:
    inputs = {i.name: i for i in session.get_inputs()}
    outputs = {o.name: o for o in session.get_outputs()}
    if "input_ids" not in inputs or "logits" not in outputs:
        raise FolderError(
            f"{where}: expected an input 'input_ids' and an output 'logits', the graph has "
            f"{_some(inputs)} and "
            f"{_some(outputs)}; a decoder graph with a key/value cache is needed"
        )
    past = {_layer_and_kind(m): n for n in inputs if (m := _PAST.fullmatch(n))}
    present = {_layer_and_kind(m): n for n in outputs if (m := _PRESENT.fullmatch(n))}
    strangers = [n for n in inputs if n not in _KNOWN and n not in past.values()]
    if strangers:
        raise FolderError(
            f"{where}: inputs {_some(strangers)} are neither tokens nor a key/value cache; a state "
            "that cannot be rolled "
            "back to an earlier length cannot be used"
        )
    if not past:
        raise FolderError(f"{where}: the graph has no key/value cache; export it with one")
    if past.keys() != present.keys():
        raise FolderError(
            f"{where}: {len(past)} cache inputs, but {len(present)} cache outputs; export it again"
        )
    if (
        "attention_mask" not in inputs
        and not {"seqlens_k", "total_sequence_length"} <= inputs.keys()
    ):
        raise FolderError(
            f"{where}: no input tells the cache length (attention_mask, or seqlens_k with "
            "total_sequence_length)"
        )
    return GraphContract(
        dtypes={n: _dtype(inputs[n], where) for n in inputs if n in _KNOWN},
        cache=tuple(
            _cache_tensor(inputs[past[k]], present[k], where, head_dim) for k in sorted(past)
        ),
        logits_dtype=_dtype(outputs["logits"], where),
        acceptance=_is_acceptance(outputs.get("acceptance")),
    )


def probe(session: Any, contract: GraphContract, where: str) -> GraphContract:
    """Run a few tokens to learn what names and shapes cannot tell; refuse a graph that fails."""

    def empty(capacity: int) -> list[npt.NDArray[Any]]:
        shapes = ((1, t.num_heads, capacity, t.head_dim) for t in contract.cache)
        return [np.zeros(s, t.dtype) for s, t in zip(shapes, contract.cache, strict=True)]

    try:
        logits, _ = _pass(session, contract, [0, 0], 0, empty(0))
    except Exception as error:  # onnxruntime raises a family of unrelated classes
        raise FolderError(
            f"{where}: fails on two tokens ({' '.join(str(error).split())[:200]}); export it again"
        ) from error
    slots = 24
    try:
        # GroupQueryAttention returns as many slots as it got; a graph that concatenates would
        # return more, or fail.
        _, cache = _pass(session, contract, [0, 0], 0, empty(slots))
        in_place = cache[0].shape[2] == slots
    except Exception:
        in_place = False
    contract = replace(
        contract,
        logits_width=logits.shape[-1],
        in_place=in_place,
        last_row_only=logits.shape[1] != 2,
    )
    if contract.last_row_only:
        return contract
    cache = empty(slots if in_place else 0)
    try:
        difference, lone_logits = _compare_rows(session, contract, cache)
        contract = replace(contract, row_difference=difference, lone_logits=lone_logits)
    except Exception as error:
        raise FolderError(
            f"{where}: fails on twenty tokens ({' '.join(str(error).split())[:200]}); export it "
            "again"
        ) from error
    if contract.row_difference and contract.every_row:
        _log.warning(
            "%s: other rows of a pass change a row's logits by %.1e of their range here, so "
            "speculation may, rarely, change a token",
            where,
            contract.row_difference,
        )
    return contract


def _compare_rows(
    session: Any, contract: GraphContract, cache: list[npt.NDArray[Any]]
) -> tuple[float, bool]:
    """Compare rows of a wide pass with the same rows in other company, one after a rollback; return
    how much their logits differ, and whether they are the same when the company gets none.
    """
    start, rows = 4, 16
    tokens = [(7 * i + 1) % contract.logits_width for i in range(start + rows + 1)]

    def cut(arrays: list[npt.NDArray[Any]], length: int) -> list[npt.NDArray[Any]]:
        return arrays if contract.in_place else [a[:, :, :length] for a in arrays]

    _, cache = _pass(session, contract, tokens[:start], 0, cache)
    wide, longer = _pass(session, contract, tokens[start : start + rows], start, cache)
    differences = []
    lone_logits = contract.has("logit_rows")
    for row, past in ((0, cache), (rows // 2, longer)):
        at = start + row
        tokens_of_two, before = [tokens[at], tokens[-1]], cut(past, at)
        pair, _ = _pass(session, contract, tokens_of_two, at, before)
        differences.append(np.abs(pair[0, 0].astype(float) - wide[0, row]).max())
        if lone_logits:
            lone, _ = _pass(session, contract, tokens_of_two, at, before, logit_rows=1)
            lone_logits = np.array_equal(lone[0], pair[0, :1])
    return float(max(differences) / max(np.ptp(wide.astype(float)), 1e-30)), lone_logits


def _pass(
    session: Any,
    contract: GraphContract,
    tokens: Sequence[int],
    start: int,
    cache: Sequence[npt.NDArray[Any]],
    logit_rows: int | None = None,
) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    """Run tokens from position `start` on; return the logits of the first rows, by default of all,
    and the caches after them.
    """
    rows, total = len(tokens), start + len(tokens)
    values: dict[str, Any] = {
        "input_ids": [tokens],
        "position_ids": [range(start, total)],
        "attention_mask": [[1] * total],
        "seqlens_k": [total - 1],
        "total_sequence_length": total,
        "attention_bias": np.zeros((1, 1, rows, total)),
        "logit_rows": range(rows if logit_rows is None else logit_rows),
    }
    feeds = {n: np.array(v, contract.dtypes[n]) for n, v in values.items() if contract.has(n)}
    feeds |= {t.past: array for t, array in zip(contract.cache, cache, strict=True)}
    quiet = onnxruntime().RunOptions()
    quiet.log_severity_level = 4  # a pass may fail: that is what it is tried for
    outputs = ["logits", *(t.present for t in contract.cache)]
    logits, *present = session.run(outputs, {**feeds, **contract.switches()}, quiet)
    return logits, present


def _layer_and_kind(match: re.Match[str]) -> tuple[int, str]:
    groups = [g for g in match.groups() if g is not None]
    layer, kind = groups if groups[0].isdigit() else reversed(groups)
    return int(layer), kind


def _cache_tensor(past: Any, present: str, where: str, head_dim: int | None) -> CacheTensor:
    shape = past.shape
    if len(shape) == 4 and isinstance(shape[3], int):
        head_dim = shape[3]
    if len(shape) != 4 or not isinstance(shape[1], int) or head_dim is None:
        raise FolderError(
            f"{where}: cache {past.name!r} has shape {shape}, expected (batch, heads, length, "
            "head size) with fixed heads and head size"
        )
    return CacheTensor(past.name, present, shape[1], head_dim, _dtype(past, where))


def _is_acceptance(output: Any) -> bool:
    """Whether an output holds one float for every row."""
    return output is not None and output.type == "tensor(float)" and len(output.shape) == 1


def _dtype(arg: Any, where: str) -> np.dtype[Any]:
    if arg.type not in _DTYPES:
        raise FolderError(
            f"{where}: input {arg.name!r} has type {arg.type}, which is not supported"
        )
    return _DTYPES[arg.type]


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + (" ..." if len(listed) > 5 else "")
