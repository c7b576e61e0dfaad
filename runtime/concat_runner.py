"""Runs graphs that return past + new rows as fresh tensors (optimum's decoder-with-past).

A rollback copies what is kept, since the graph takes the length of the cache from the shape of its
inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .datatypes import FloatArray
from .graph_contract import GraphContract


class ConcatRunner:
    """A session and the key/value tensors that its last pass returned."""

    acceptance: FloatArray | None = None  # such graphs have no acceptance head

    def __init__(self, session: Any, contract: GraphContract) -> None:
        self._session = session
        self._contract = contract
        self._outputs = ["logits", *(t.present for t in contract.cache)]
        self.arrays: list[npt.NDArray[Any]] = [
            np.zeros((1, t.num_heads, 0, t.head_dim), t.dtype) for t in contract.cache
        ]

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
        assert bias is None, "a tree needs a graph with an attention bias"
        dtypes = self._contract.dtypes
        self._trim(total - len(tokens))
        feeds = {t.past: a for t, a in zip(self._contract.cache, self.arrays, strict=True)}
        feeds["input_ids"] = np.array([tokens], dtypes["input_ids"])
        feeds["attention_mask"] = np.ones((1, total), dtypes["attention_mask"])
        if self._contract.has("position_ids"):
            feeds["position_ids"] = np.array([positions], dtypes["position_ids"])
        if self._contract.has("logit_rows"):
            feeds["logit_rows"] = np.array(wanted, dtypes["logit_rows"])
        feeds.update(self._contract.switches())
        logits, *self.arrays = self._session.run(self._outputs, feeds)
        return np.asarray(logits[0], dtype=np.float32)

    def _trim(self, length: int) -> None:
        """Forget the slots from `length` on."""
        if self.arrays[0].shape[2] > length:
            self.arrays = [np.ascontiguousarray(a[:, :, :length]) for a in self.arrays]
