"""`OnnxModel`: a decoder graph and its cache behind the `LanguageModel` protocol.

A pass never carries a single row, because a single row takes other kernels and so other roundings:
rows of one pass are bit-identical for every row count from 2 to `VERIFY_ROWS`, whatever the other
rows hold (docs/decisions.md). A lone token gets a dummy companion, whose cache slot the next pass
overwrites and whose logits are left out where that changes no bit of the token's. So does the last
token of a prefill that would be alone in its tile of the attention kernel: then a prompt has the
same bits in the cache whatever pieces it was computed in.

Where heads are wide (`GraphContract.changes_order`), a pass ends where a lone token's would change
its order of summation, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .concat_runner import ConcatRunner
from .datatypes import FloatArray
from .errors import FolderError
from .folder import ModelFolder
from .graph_contract import discover, probe
from .huge_pages import use_huge_pages
from .in_place_runner import InPlaceRunner
from .ort_session import SessionConfig, open_session

VERIFY_ROWS = 16
_FILLER = 0  # token of a dummy row
# GroupQueryAttention works on tiles of 32 or more rows (onnxruntime 1.32; 1.26 has none).
_TILE_ROWS = 32


class OnnxModel:
    """A target on onnxruntime."""

    def __init__(
        self,
        folder: ModelFolder,
        config: SessionConfig | None = None,
        *,
        tokenizer_size: int | None = None,
        initializers: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        """Open the graph of `folder`; `tokenizer_size` is used where the folder does not give its
        vocabulary. `initializers` replace weights of the graph (`open_session`).

        Raises `FolderError` for a graph that is no decoder, or whose logits are narrower than the
        vocabulary.
        """
        self.folder = folder
        self.config = config or SessionConfig()
        self._initializers = initializers  # the session looks into them
        session = open_session(folder.graph, self.config, initializers)
        where = str(folder.graph)
        contract = probe(session, discover(session, where, folder.head_dim), where)
        self._vocab_size = folder.vocab_size or tokenizer_size or contract.logits_width
        needed = max(self._vocab_size, tokenizer_size or 0)
        room = min(contract.logits_width, folder.vocab_size or contract.logits_width)
        if needed > room:
            raise FolderError(
                f"{folder.graph}: logits have {room} columns, the tokenizer has {needed} tokens; "
                "the graph and the tokenizer do not belong together"
            )
        use_huge_pages()
        self._runner: InPlaceRunner | ConcatRunner = (
            InPlaceRunner(session, contract, folder.context_length)
            if contract.in_place
            else ConcatRunner(session, contract)
        )
        self.obstacle = contract.obstacle  # why no draft can be verified; None where it can
        self._max_rows = VERIFY_ROWS if contract.every_row else 1
        self._changes_order = contract.changes_order
        self._lone_logits = contract.lone_logits
        self._supports_trees = contract.in_place and contract.has("attention_bias")
        self._length = 0
        self._acceptance: FloatArray | None = None
        # Lets a lone token run alone: a few per cent faster, but not bit-identical to verification.
        # Benchmarks use it as the plain loop to beat.
        self.single_rows = not contract.every_row

    @property
    def vocab_size(self) -> int:
        """Number of real tokens; further columns of the graph's logits are padding and never
        returned.
        """
        return self._vocab_size

    @property
    def context_length(self) -> int:
        """Most tokens the cache can hold; one slot of the context is kept for a dummy row."""
        return self.folder.context_length - 1

    @property
    def max_rows(self) -> int:
        """Most rows of the next verify pass; always 1 where the graph returns only its last row's
        logits.
        """
        return min(self._max_rows, self._room()) if self._changes_order else self._max_rows

    @property
    def supports_trees(self) -> bool:
        """Whether the graph takes an attention bias."""
        return self._supports_trees

    @property
    def acceptance(self) -> FloatArray | None:
        """What the graph's acceptance head says of each row of the last `forward`, shape (rows,),
        valid until the next call; None where it has none.
        """
        return self._acceptance

    @property
    def length(self) -> int:
        """Number of tokens held in the cache."""
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the cache; no more logits are computed than the graph insists on."""
        while tokens:
            count = min(len(tokens), self._room()) if self._changes_order else len(tokens)
            self._append(tokens[:count], None, want_logits=False)
            tokens = tokens[count:]

    def forward(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Append tokens and return their logits, shape (rows, vocab_size), valid until the next
        call.
        """
        return self._append(tokens, parents, want_logits=True)

    def rollback(self, length: int) -> None:
        """Forget every cached token from position `length` on."""
        if not 0 <= length <= self._length:
            raise ValueError(f"length must be in [0, {self._length}], got {length}")
        self._length = length

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep only these rows (ascending) of the last pass, which began at position `start`."""
        if list(rows) != list(range(len(rows))):
            source = [start + row for row in rows]
            for array in self._runner.arrays:
                array[:, :, start : start + len(source)] = array[:, :, source]
        self.rollback(start + len(rows))

    def _room(self) -> int:
        """Return how many rows can follow before the order of summation may change."""
        # A lone token and its companion fill two more slots: they meet a bound one token earlier.
        return _TILE_ROWS - (self._length + 1) % _TILE_ROWS

    def _append(
        self, tokens: Sequence[int], parents: Sequence[int] | None, want_logits: bool
    ) -> FloatArray:
        count, start = len(tokens), self._length
        if start + count > self.context_length:
            raise ValueError(
                f"{start + count} tokens do not fit into a context of {self.context_length}"
            )
        lonely = count % _TILE_ROWS == 1 and not self.single_rows
        rows = count + 1 if lonely else count
        total = start + rows
        positions = list(range(start, total))
        bias = None
        if parents is not None and list(parents) != list(range(-1, count - 1)):
            if not self._supports_trees:
                raise ValueError("this graph takes no attention bias, so it verifies chains only")
            if not start:
                return self._begin_with_tree(tokens, parents)
            depths, bias = _tree_mask(parents, start, rows)
            positions[:count] = [start + d for d in depths]
        padded = [*tokens, *[_FILLER] * (rows - count)]
        wanted = range(rows - 1, rows)
        if want_logits:
            wanted = range(count if count > 1 or self._lone_logits else rows)
        logits = self._runner.run(padded, positions, total, bias, wanted)
        self._length = start + count
        told = self._runner.acceptance if want_logits else None
        self._acceptance = None if told is None else told[:count]
        return logits[:count, : self._vocab_size]

    def _begin_with_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        """Run the root before the rest, since GroupQueryAttention ignores position ids while the
        cache is empty (onnxruntime 1.26 to 1.32).
        """
        if min(parents[1:]) < 0:
            raise ValueError("a tree at the start of the sequence must have a single root")
        root = self._append(tokens[:1], None, want_logits=True).copy()
        rest = self._append(tokens[1:], [p - 1 for p in parents[1:]], want_logits=True)
        self._acceptance = None  # of the whole tree; whoever reads it drafts row by row
        return np.concatenate([root, rest])


def _tree_mask(parents: Sequence[int], start: int, rows: int) -> tuple[list[int], FloatArray]:
    """Return the depth of every row, and the bias (1, 1, rows, start + rows) that hides all but its
    ancestors.
    """
    bias = np.zeros((1, 1, rows, start + rows), np.float32)
    among = bias[0, 0, :, start:]
    among[:] = -np.inf
    depths: list[int] = []
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise ValueError(f"the parent of row {row} must come before it, got {parent}")
        if parent >= 0:
            among[row] = among[parent]
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        among[row, row] = 0
    for row in range(len(parents), rows):
        among[row, row] = 0
    return depths, bias
