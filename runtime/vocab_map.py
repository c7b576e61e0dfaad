"""What the target's tokens are called in the drafter's vocabulary.

Every token of the target has one fixed spelling in draft tokens, whatever stands around it, and the
spellings of a text's tokens put together give the text byte for byte. So the drafter's context is a
pure function of the committed target tokens, and reading a draft back is a walk through a trie of
spellings (beyond OmniDraft, arXiv 2507.02659, section 3.1, which maps strings and learns the rest).

The tables of a pair follow from both tokenizer files, so whoever kept them needs neither vocabulary
to find and trust them again.

All tables are flat arrays, read where they lie in the file. Node n > 0 of the trie is reached by
the piece `node_piece[n]`. Nodes are numbered level by level, so that the children of n lie beside
each other, by ascending piece, from `first_child[n]` up to `first_child[n + 1]`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import DrafterError, StateError
from .table_file import read_tables, write_tables
from .vocabulary import Vocabulary

_log = logging.getLogger(__name__)
# A new version, too, for every change of what `vocabulary.py` makes of a tokenizer.
_FORMAT = {"format": "edgedraft-pair", "format_version": 2}

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
Spelling: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairKey:
    """What the tables of a pair depend on."""

    draft: str  # checksum of the tokenizer file, or the fingerprint of a vocabulary without one
    target: str
    draft_end: int | None  # ends an answer
    draft_mark: int | None  # stands for every target token that is no text
    target_stop_ids: tuple[int, ...]  # a drafted end proposes the first

    def facts(self) -> dict[str, Any]:
        """Return what a file of this pair says about itself. Another release of tokenizers may cut
        texts another way.
        """
        import tokenizers

        return _FORMAT | {"tokenizers": tokenizers.__version__} | asdict(self)

    def file_name(self) -> str:
        """Return a name that no other pair has, the same for every version."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return f"pair-{digest[:32]}.bin"


@dataclass(eq=False)
class VocabMap:
    """Translation between the vocabularies of a drafter and a target. Nobody writes to its tables:
    they may lie in a file.
    """

    key: PairKey
    direct_token: IntArray  # (draft,) the target token of the same bytes, or -1
    usable: npt.NDArray[np.bool_]  # (draft,) whether target tokens can come of a draft with it
    spelling_start: IntArray  # (target + 1,)
    spelling_piece: IntArray
    cover_start: IntArray  # (draft + 1,)
    cover_token: IntArray
    first_child: IntArray  # (nodes + 1,)
    node_piece: IntArray  # (nodes,) 0 for the root
    node_token: IntArray  # (nodes,) the target token that is complete here, or -1
    text_start: IntArray  # (draft + 1,)
    text_byte: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        # Single elements come out of a memoryview as plain integers, and faster.
        self._direct_token = self.direct_token.data
        self._spelling_start = self.spelling_start.data
        self._spelling_piece = self.spelling_piece.data
        self._cover_start = self.cover_start.data
        self._cover_token = self.cover_token.data
        self._first_child = self.first_child.data
        self._node_piece = self.node_piece.data
        self._node_token = self.node_token.data
        self._text_start = self.text_start.data
        self._text_byte = self.text_byte.data

    @classmethod
    def build(
        cls,
        draft: Vocabulary,
        target: Vocabulary,
        *,
        draft_end: int | None = None,
        draft_mark: int | None = None,
        target_stop_ids: Iterable[int] = (),
    ) -> VocabMap:
        """Work the tables out, which takes seconds; raise `DrafterError` for ids that cannot play
        their part.
        """
        stops = tuple(target_stop_ids)
        key = PairKey(draft.fingerprint, target.fingerprint, draft_end, draft_mark, stops)
        return _build(key, draft, target)

    @classmethod
    def load_or_build(
        cls, key: PairKey, vocabularies: Callable[[], tuple[Vocabulary, Vocabulary]], folder: Path
    ) -> VocabMap:
        """Map the pair's file in `folder`. Where there is none that can be used, make it: only then
        `vocabularies` is asked for the drafter's and the target's. Raises `DrafterError` as
        `build` does.
        """
        path = folder / key.file_name()
        try:
            if path.exists():
                return cls.load(path, key)
        except StateError as error:
            _log.warning("%s", error)
        pair = _build(key, *vocabularies())
        try:
            pair.save(path)
        except StateError as error:
            _log.warning("%s", error)
        return pair

    def spelling(self, token: int) -> list[int]:
        """Return the draft tokens of a target token; empty where the drafter cannot write it, and
        for an id that the target's tokenizer does not have.
        """
        start = self._spelling_start
        if token >= len(start) - 1:
            return []
        return self._spelling_piece[start[token] : start[token + 1]].tolist()

    def direct(self, piece: int) -> int:
        """Return the target token with the bytes of a draft token, or -1."""
        token: int = self._direct_token[piece]
        return token

    def step(self, node: int, piece: int) -> int:
        """Return the child of a trie node (0 is the root) that a draft token leads to, or -1."""
        end = self._first_child[node + 1]
        child = bisect_left(self._node_piece, piece, self._first_child[node], end)
        return child if child < end and self._node_piece[child] == piece else -1

    def finished(self, node: int) -> int:
        """Return the target token that the path to a node spells, or -1."""
        token: int = self._node_token[node]
        return token

    def covers(self, piece: int) -> list[int]:
        """Return the target tokens that a draft token stands for by itself, where it begins no
        spelling.
        """
        start = self._cover_start
        return self._cover_token[start[piece] : start[piece + 1]].tolist()

    def text(self, piece: int) -> bytes:
        """Return the bytes of a draft token."""
        start = self._text_start
        return bytes(self._text_byte[start[piece] : start[piece + 1]])

    def save(self, path: Path) -> None:
        """Write everything into one file; raise `StateError` when that fails."""
        tables = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        write_tables(path, self.key.facts(), tables)

    @classmethod
    def load(cls, path: Path, key: PairKey) -> VocabMap:
        """Map a file into memory; raise `StateError` unless it is whole and made for `key`."""
        return cls(key, **read_tables(path, key.facts()))


def _build(key: PairKey, draft: Vocabulary, target: Vocabulary) -> VocabMap:
    _check(key, draft, target)
    spellings = _spell(key, draft, target)
    stops = set(key.target_stop_ids)
    ordinary = {
        token: spellings[token]
        for token in target.canonical.values()
        if spellings[token] and token not in stops
    }
    direct = np.full(len(draft), -1, np.int32)
    for piece, content in enumerate(draft.pieces):
        if (token := target.canonical.get(content, -1)) in ordinary:
            direct[piece] = token
    end: dict[int, Spelling] = {}
    if key.draft_end is not None and key.target_stop_ids:
        direct[key.draft_end] = key.target_stop_ids[0]
        end = {key.target_stop_ids[0]: (key.draft_end,)}
    first_child, node_piece, node_token = _trie(ordinary | end, len(draft))

    begins = set(node_piece[1 : first_child[1]].tolist())
    left = [p for p, text in enumerate(draft.pieces) if text and p not in begins and direct[p] < 0]
    covers: list[Spelling] = [()] * len(draft)
    for piece, tokens in zip(left, target.segment([draft.pieces[p] for p in left]), strict=True):
        if all(spellings[token] and token not in stops for token in tokens):
            covers[piece] = tokens
    cover_start, cover_token = _flatten(covers, len(target))
    usable = np.diff(cover_start) > 0
    usable[node_piece[1:]] = True
    return VocabMap(
        key,
        direct,
        usable,
        *_flatten(spellings, len(draft)),
        cover_start,
        cover_token,
        first_child,
        node_piece,
        node_token,
        np.cumsum([0, *map(len, draft.pieces)], dtype=np.uint32),
        np.frombuffer(b"".join(draft.pieces), np.uint8),
    )


def _check(key: PairKey, draft: Vocabulary, target: Vocabulary) -> None:
    for name, token in (("end", key.draft_end), ("mark", key.draft_mark)):
        if token is not None and not (0 <= token < len(draft) and not draft.pieces[token]):
            raise DrafterError(
                f"the drafter's {name} token must be one of its {len(draft)} and no text, got "
                f"{token}; correct it in the drafter's folder, or export that again"
            )
    stops = key.target_stop_ids
    if not all(0 <= token < len(target) for token in stops):
        raise DrafterError(
            f"the target's end tokens must be in [0, {len(target)}) to draft for it, got "
            f"{list(stops)}; correct them in the target's folder, or export that again"
        )


def _spell(key: PairKey, draft: Vocabulary, target: Vocabulary) -> list[Spelling]:
    """Return the spelling of every target token."""
    other: Spelling = () if key.draft_mark is None else (key.draft_mark,)
    spellings = [other] * len(target)
    long: list[int] = []
    for token, content in enumerate(target.pieces):
        if content in draft.canonical:
            spellings[token] = (draft.canonical[content],)
        elif content:
            long.append(token)
    cuts = draft.segment([target.pieces[token] for token in long])
    for token, cut in zip(long, cuts, strict=True):
        spellings[token] = cut
    for token in key.target_stop_ids:
        spellings[token] = other if key.draft_end is None else (key.draft_end,)
    return spellings


def _trie(spellings: Mapping[int, Spelling], num_pieces: int) -> tuple[IntArray, ...]:
    """Return first children, pieces and finished tokens of the nodes, level by level."""
    tokens = np.fromiter(spellings, np.int32, len(spellings))
    start, pieces = _flatten(list(spellings.values()), num_pieces)
    lengths = np.diff(start.astype(np.int64))
    at = np.zeros(len(tokens), np.int64)  # the node that each spelling has come to
    parents, node_pieces, num_nodes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)], 1
    for depth in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > depth)
        edges = at[longer] * num_pieces + pieces[start[longer] + depth]
        nodes, which = np.unique(edges, return_inverse=True)
        at[longer] = num_nodes + which
        parents.append(nodes // num_pieces)
        node_pieces.append(nodes % num_pieces)
        num_nodes += len(nodes)
    first_child = 1 + np.searchsorted(np.concatenate(parents), np.arange(num_nodes + 1))
    finished = np.full(num_nodes, -1, np.int32)
    finished[at] = tokens
    return (
        first_child.astype(np.uint32),
        np.concatenate(node_pieces).astype(pieces.dtype),
        finished,
    )


def _flatten(sequences: Sequence[Spelling], num_values: int) -> tuple[IntArray, IntArray]:
    """Return where each sequence starts, with the end behind the last, and all values in a row."""
    start = np.zeros(len(sequences) + 1, np.uint32)
    np.cumsum([len(sequence) for sequence in sequences], out=start[1:])
    dtype = np.uint16 if num_values <= 1 << 16 else np.uint32
    return start, np.fromiter(chain.from_iterable(sequences), dtype, int(start[-1]))
