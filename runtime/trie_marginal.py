"""A target's next-token distribution as one over the draft token that comes next.

While a target token is being spelled, with the pieces of a trie node behind us, the target's
probabilities p(t) say what the next piece d should be:

    ptilde(d | node) ~ sum of p(t) over the tokens t whose spelling goes on from the node with d

To walk down the trie by these conditionals, stopping at a node with the share its own token has of
what is left, is to draw t from p. So a draft can be verified piece by piece (`rejection.py`), and a
drafter can be compared with its target at every piece.

Tokens are kept in depth-first order of the trie: those whose spelling begins with the pieces of a
node lie beside each other, the one that is complete there first. Tokens that no path of the trie
spells (special ones, those with the bytes of another) come last, and share one symbol.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .vocab_map import IntArray, VocabMap

DoubleArray: TypeAlias = npt.NDArray[np.float64]


class TrieMarginal:
    """Sums a target's probabilities up over the subtrees of a pair's trie."""

    def __init__(self, vocab_map: VocabMap, vocab_size: int) -> None:
        """`vocab_size` is the width of a logits row, at least that of the target's vocabulary."""
        num_tokens = vocab_map.spelling_start.size - 1
        if vocab_size < num_tokens:
            raise ValueError(f"vocab_size must be >= {num_tokens}, got {vocab_size}")
        self.vocab_map = vocab_map
        self.unspelled = vocab_map.direct_token.size  # the symbol, behind the draft tokens
        self._first_child = vocab_map.first_child.astype(np.intp)
        self._start, self._stop = _ranges(self._first_child, vocab_map.node_token >= 0)
        self._num_spelled = int(self._stop[0])

        ends = np.flatnonzero(vocab_map.node_token >= 0)
        spelled = vocab_map.node_token[ends]
        others = np.ones(vocab_size, np.bool_)
        others[spelled] = False
        self.tokens = np.empty(vocab_size, np.intp)  # in depth-first order
        self.tokens[self._start[ends]] = spelled
        self.tokens[self._num_spelled :] = np.flatnonzero(others)

    def arrange(self, probabilities: DoubleArray) -> DoubleArray:
        """Put probabilities, shape (vocab_size,), into the order of `tokens`."""
        return probabilities[self.tokens]

    def next_pieces(self, arranged: DoubleArray, node: int) -> DoubleArray:
        """Return the mass of the tokens that go on from a node with each draft token, and at the
        root that of the unspelled ones behind it, shape (draft + 1,).

        Divided by their sum, the entries of the draft tokens are ptilde.
        """
        masses = np.zeros(self.unspelled + 1)
        first, last = self._first_child[node], self._first_child[node + 1]
        if first < last:
            pieces = self.vocab_map.node_piece[first:last]
            # Children lie side by side: each sum ends where the next begins.
            stop = self._stop[last - 1]
            masses[pieces] = np.add.reduceat(arranged[:stop], self._start[first:last])
        if node == 0:
            masses[self.unspelled] = arranged[self._num_spelled :].sum()
        return masses

    def begun(self, node: int) -> slice:
        """Return where the tokens lie whose spelling begins with the pieces of a node: at the root
        all of them, unspelled ones too.
        """
        return slice(int(self._start[node]), int(self._stop[node]) if node else self.tokens.size)

    def longer(self, node: int) -> slice:
        """Return where those of them lie that are not complete at the node."""
        begun = self.begun(node)
        return slice(begun.start + (self.vocab_map.finished(node) >= 0), begun.stop)

    def begun_with(self, node: int, symbol: int) -> slice:
        """Return where the tokens lie that go on from a node with a symbol of `next_pieces`."""
        if symbol == self.unspelled:
            return slice(self._num_spelled, self.tokens.size)
        return self.begun(self.vocab_map.step(node, symbol))

    def finishing(self, node: int) -> IntArray:
        """Return the pieces that lead from a node to a complete token."""
        children = slice(self._first_child[node], self._first_child[node + 1])
        complete = self.vocab_map.node_token[children] >= 0
        return self.vocab_map.node_piece[children][complete]


def _ranges(
    first_child: npt.NDArray[np.intp], complete: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return where the tokens of each node's subtree start and stop."""
    levels: list[slice] = []
    first, last = 1, int(first_child[1])
    while first < last:
        levels.append(slice(first, last))
        first, last = last, int(first_child[last])
    own = complete.astype(np.intp)
    parent = np.concatenate(([0], np.repeat(np.arange(own.size), np.diff(first_child))))
    size = own.copy()
    for level in reversed(levels):
        np.add.at(size, parent[level], size[level])
    in_front = size.cumsum() - size
    start = np.zeros_like(size)
    start[1:] = in_front[1:] - in_front[first_child[parent[1:]]]  # counted from the first sibling
    for level in levels:
        start[level] += (start + own)[parent[level]]
    return start, start + size
