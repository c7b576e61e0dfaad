"""The cache of draft n-grams: the longest one wins, the least used one makes room."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import StateError
from edgedraft.runtime.ngram_cache import NgramCache

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pieces = st.lists(st.integers(0, 2), max_size=6)
lessons = st.lists(st.tuples(pieces, st.integers(0, 99)), max_size=40)


@settings(max_examples=200)
@given(lessons=lessons, text=st.lists(st.integers(0, 2), max_size=12))
def test_a_match_is_the_longest_ngram_that_was_learned(
    lessons: list[tuple[list[int], int]], text: list[int]
) -> None:
    cache, model = NgramCache(), dict[tuple[int, ...], int]()
    for key, token in lessons:
        cache.learn(key, token)
        if len(key) >= 2:
            model[tuple(key)] = token
    assert len(cache) == len(model)
    for start in range(len(text) + 1):
        expected = None
        for length in range(2, len(text) - start + 1):
            if (token := model.get(tuple(text[start : start + length]))) is not None:  # type: ignore[assignment]
                expected = token, length
        assert cache.match(text, start) == expected


def test_a_single_piece_is_left_to_the_direct_map() -> None:
    cache = NgramCache()
    cache.learn([], 1)
    cache.learn([5], 2)
    assert len(cache) == 0
    assert cache.match([5], 0) is None


@settings(max_examples=100)
@given(lessons=lessons, limit=st.integers(1, 8), text=pieces)
def test_entries_and_prefixes_stay_bounded_and_agree(
    lessons: list[tuple[list[int], int]], limit: int, text: list[int]
) -> None:
    cache = NgramCache(max_entries=limit)
    for key, token in lessons:
        cache.learn(key, token)
        assert len(cache) <= limit
        if len(key) >= 2:
            assert cache.match(key, 0) == (token, len(key))
    needed = [key[:end] for key in cache._entries for end in range(2, len(key))]
    assert dict(cache._prefixes) == dict(Counter(needed))


class Watched(list[int]):
    """A list that knows how far it was read."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        self.read = max(self.read, key.stop if isinstance(key, slice) else key)
        return super().__getitem__(key)


def test_the_scan_stops_where_no_ngram_goes_on() -> None:
    cache = NgramCache()
    cache.learn((1, 2, 3, 4), 9)
    for text, read in (([1, 2, 7, *range(100)], 3), ([1, 2, 3, 4, 5, 6], 4), ([7, 8, 9], 2)):
        watched = Watched(text)
        cache.match(watched, 0)
        assert watched.read == read


def test_the_least_used_ngram_makes_room() -> None:
    cache = NgramCache(max_entries=4)
    for uses, key in enumerate([(1, 1), (2, 2), (3, 3), (4, 4)], 1):
        for _ in range(uses):
            cache.learn(key, 9)
    cache.begin_request()
    cache.learn((5, 5), 9)
    assert cache.match((1, 1), 0) is None
    for key in [(2, 2), (3, 3), (4, 4), (5, 5)]:
        assert cache.match(key, 0) == (9, 2)


def test_what_this_request_used_outlives_what_others_used_more() -> None:
    cache = NgramCache(max_entries=3)
    for key in [(1, 1), (2, 2), (3, 3)]:
        for _ in range(5):
            cache.learn(key, 9)
    for key in [(1, 1), (2, 2)] * 5:
        cache.learn(key, 9)
    cache.begin_request()
    cache.learn((3, 3), 9)
    for i in range(4, 6):
        cache.learn((i, i), 9)
    assert {key for key in cache._entries} == {(3, 3), (4, 4), (5, 5)}
    cache.learn((6, 6), 9)  # now only its own are left
    assert len(cache) == 3
    assert cache.match((6, 6), 0) == (9, 2)


def test_the_latest_target_token_counts() -> None:
    cache = NgramCache()
    cache.learn((1, 2), 7)
    cache.learn((1, 2), 8)
    assert cache.match((0, 1, 2), 1) == (8, 2)


def test_an_entry_takes_as_much_memory_as_promised() -> None:
    rng = random.Random(0)
    tracemalloc.start()
    cache = NgramCache(max_entries=10_000)
    for i in range(10_000):
        cache.learn([rng.randrange(1000, 16_000) for _ in range(rng.choice((2, 2, 2, 3, 3, 4)))], i)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(cache) < 400


def random_cache() -> NgramCache:
    rng = random.Random(1)
    cache = NgramCache()
    for i in range(300):
        key = [rng.randrange(5) for _ in range(rng.randrange(2, 5))]
        for _ in range(rng.randrange(1, 9)):
            cache.learn(key, 40_000 + i)
    return cache


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    for cache in (random_cache(), NgramCache()):
        cache.save(path, "draft", "target")
        loaded = NgramCache()
        loaded.learn((1, 2), 3)
        loaded.load(path, "draft", "target")
        assert {k: (e.token, e.used) for k, e in loaded._entries.items()} == {
            k: (e.token, e.used) for k, e in cache._entries.items()
        }
        assert loaded._prefixes == cache._prefixes
    assert [p.name for p in tmp_path.iterdir()] == ["ngrams.bin"]


def test_the_most_used_are_loaded_where_there_is_less_room(tmp_path: Path) -> None:
    cache = random_cache()
    cache.save(tmp_path / "ngrams.bin", "draft", "target")
    small = NgramCache(max_entries=10)
    small.load(tmp_path / "ngrams.bin", "draft", "target")
    uses = sorted((entry.used for entry in cache._entries.values()), reverse=True)
    assert sorted((e.used for e in small._entries.values()), reverse=True) == uses[:10]


def test_a_damaged_or_foreign_file_is_refused_without_harm(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    random_cache().save(path, "draft", "target")
    content = path.read_bytes()
    cache = NgramCache()
    cache.learn((1, 2), 3)
    rng = random.Random(2)
    spoilt = [b"", content[:7], content[:60], content[:-1]]
    for _ in range(40):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        spoilt.append(bytes(flipped))
    for damaged in spoilt:
        path.write_bytes(damaged)
        with pytest.raises(StateError) as caught:
            cache.load(path, "draft", "target")
        assert "\n" not in str(caught.value)
    path.write_bytes(content)
    for pair in (("other", "target"), ("draft", "other"), ("target", "draft")):
        with pytest.raises(StateError, match="for something else"):
            cache.load(path, *pair)
    with pytest.raises(StateError, match="cannot be read"):
        cache.load(tmp_path / "none.bin", "draft", "target")
    assert cache.match((1, 2), 0) == (3, 2)
    assert len(cache) == 1


def test_forgetting_leaves_nothing_in_memory_or_file(tmp_path: Path) -> None:
    cache = NgramCache()
    cache.learn((11111, 22222, 33333), 44444)
    cache.forget()
    assert not cache._entries
    assert not cache._prefixes
    cache.save(tmp_path / "ngrams.bin", "draft", "target")
    content = (tmp_path / "ngrams.bin").read_bytes()
    for token in (11111, 22222, 33333, 44444):
        assert token.to_bytes(4, "little") not in content


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_entries must be >= 1, got 0"):
        NgramCache(max_entries=0)
