"""The lookup copies what followed the longest earlier occurrence of the text's ending."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edgedraft.runtime import DecodeConfig, SpeculativeDecoder
from edgedraft.runtime.suffix_lookup import SuffixLookup, _SuffixAutomaton, match_bucket
from fakes import TableModel, random_table

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

small_texts = st.lists(st.integers(0, 2), max_size=60)


def earlier_ends(text: Sequence[int], length: int) -> list[int]:
    """Return where the last `length` tokens also end, earlier in the text."""
    ending = list(text[len(text) - length :])
    return [end for end in range(length, len(text)) if list(text[end - length : end]) == ending]


def longest_by_search(text: Sequence[int]) -> tuple[int, list[int]]:
    """Return the length of the longest ending that occurs earlier, and its earlier ends."""
    for length in range(len(text) - 1, 0, -1):
        if ends := earlier_ends(text, length):
            return length, ends
    return 0, []


@settings(max_examples=150)
@given(text=small_texts)
def test_the_longest_earlier_ending_equals_a_search_after_every_token(text: list[int]) -> None:
    automaton = _SuffixAutomaton()
    for i, token in enumerate(text, 1):
        automaton.append(token)
        expected, ends = longest_by_search(text[:i])
        longest, end = automaton.endings[0] if automaton.endings else (0, 0)
        assert longest == expected
        for length, end in automaton.endings:
            assert end in earlier_ends(text[:i], length)
        lengths = [length for length, _ in automaton.endings]
        assert lengths == sorted(set(lengths), reverse=True)
        # The most recent occurrence, where the index promises it.
        if longest and len(automaton.endings) < 16 and max_depth(text[:i]) <= 16:
            assert automaton.endings[0][1] == max(ends)


def max_depth(text: Sequence[int]) -> int:
    """Return how many endings the index may have had to bring up to date for one token."""
    return max(longest_by_search(text[:i])[0] for i in range(1, len(text) + 1)) + 1


def test_the_most_recent_of_several_occurrences_is_copied() -> None:
    lookup = SuffixLookup()
    proposal = lookup.propose([1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2], 2)
    assert proposal.tokens == (9, 1)
    assert proposal.is_chain
    assert proposal.origin == "lookup"


@settings(max_examples=100)
@given(text=small_texts, cuts=st.lists(st.integers(0, 60), max_size=5))
def test_an_index_built_piece_by_piece_equals_one_built_at_once(
    text: list[int], cuts: list[int]
) -> None:
    whole, pieces = SuffixLookup(), SuffixLookup()
    for cut in sorted(c for c in cuts if c < len(text)):
        pieces.propose(text[:cut], 4)
    assert pieces.propose(text, 4).tokens == whole.propose(text, 4).tokens


@settings(max_examples=100)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60), budget=st.integers(0, 20))
def test_a_copy_is_the_continuation_of_the_match_and_loops_go_on(
    text: list[int], budget: int
) -> None:
    tokens = SuffixLookup().propose(text, budget).tokens
    length, ends = longest_by_search(text)
    if not length:
        assert tokens == ()
        return
    assert len(tokens) == budget
    continuations = []
    for end in ends:
        extended = list(text)
        while len(extended) < end + len(text) + budget:
            extended.append(extended[end + len(extended) - len(text)])
        continuations.append(tuple(extended[len(text) : len(text) + budget]))
    assert tokens in continuations


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_text_in_a_loop_is_copied_beyond_its_end(period: int) -> None:
    text = [i % period for i in range(3 * period + 1)]
    expected = [(len(text) + i) % period for i in range(12)]
    assert list(SuffixLookup().propose(text, 12).tokens) == expected


def test_nothing_is_proposed_for_what_never_occurred() -> None:
    lookup = SuffixLookup()
    assert lookup.propose([], 5).tokens == ()
    assert lookup.propose([1], 5).tokens == ()
    assert lookup.propose([1, 2, 3], 5).tokens == ()
    assert lookup.propose([1, 2, 3, 1], 0).tokens == ()


def test_states_grow_linearly_with_the_text() -> None:
    rng = random.Random(0)
    for alphabet in (1, 2, 50):
        automaton = _SuffixAutomaton()
        for n in range(1, 3001):
            automaton.append(rng.randrange(alphabet))
            assert len(automaton._length) <= max(2 * n, 2)
        transitions = sum(map(len, automaton._next))
        assert transitions <= 3 * 3000
        # Links lead to shorter endings, down to the empty one.
        assert all(
            automaton._length[link] < automaton._length[state]
            for state, link in enumerate(automaton._link)
            if state
        )


def test_an_earlier_request_is_copied_from() -> None:
    lookup = SuffixLookup()
    lookup.propose([10, 11, 12, 13, 14, 15], 4)
    assert lookup.propose([50, 11, 12], 3).tokens == (13, 14, 15)


def test_a_copy_ends_where_the_earlier_request_ended() -> None:
    lookup = SuffixLookup()
    lookup.propose([10, 11, 12, 13], 4)
    assert lookup.propose([50, 11, 12], 8).tokens == (13,)
    assert lookup.propose([60, 13], 8).tokens == ()


def test_no_ending_is_matched_across_requests() -> None:
    lookup = SuffixLookup()
    for _ in range(4):
        lookup.propose([1, 2, 3], 4)
        lookup.propose([7, 8], 4)
    # "3 | 7" and "2 3 | 7 8" happened, but never inside one text.
    assert lookup.match_length == 2
    assert lookup.propose([1], 2).tokens == (2, 3)
    assert lookup.match_length == 1


@settings(max_examples=60)
@given(
    requests=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)
)
def test_over_several_requests_the_longest_ending_inside_one_of_them_wins(
    requests: list[list[int]],
) -> None:
    lookup = SuffixLookup()
    seen: list[list[int]] = []
    for request in requests:
        if seen and request[: len(seen[-1])] == seen[-1]:
            seen.pop()  # it goes on with the last one
        lookup.propose(request, 3)
        seen.append(request)
        longest = longest_by_search(request)[0]
        for earlier in seen[:-1]:
            for length in range(1, len(request) + 1):
                ending = request[len(request) - length :]
                if any(earlier[i : i + length] == ending for i in range(len(earlier))):
                    longest = max(longest, length)
        assert lookup.match_length == longest


@pytest.mark.parametrize("limit", [0, 1, 2, 9, 40, 100])
def test_a_session_holds_no_more_tokens_than_allowed(limit: int) -> None:
    rng = random.Random(1)
    lookup = SuffixLookup(max_session_tokens=limit)
    for _ in range(30):
        request = [rng.randrange(50) for _ in range(rng.randrange(1, 60))]
        proposal = lookup.propose(request, 4)
        assert len(proposal.tokens) <= 4
        # A separator, and one request of which at least the ending is needed.
        assert len(lookup._automaton.tokens) <= limit + 1
        for extra in range(3):
            request.append(extra)
            lookup.propose(request, 4)


def test_the_newest_part_of_a_session_survives_eviction() -> None:
    lookup = SuffixLookup(max_session_tokens=100)
    lookup.propose(list(range(100, 160)), 4)
    lookup.propose(list(range(200, 235)), 4)
    lookup.propose(list(range(300, 310)), 4)
    assert lookup.propose([1, 220, 221], 2).tokens == (222, 223)
    assert lookup.propose([1, 301, 302], 2).tokens == (303, 304)
    assert lookup.propose([1, 101, 102], 2).tokens == ()


def test_an_edited_prompt_begins_anew_and_still_finds_the_old_text() -> None:
    lookup = SuffixLookup()
    lookup.propose([1, 2, 3, 4, 5, 6], 3)
    assert lookup.propose([1, 2, 9, 4, 5], 1).tokens == (6,)
    # Shorter than before: the answer was taken back.
    assert lookup.propose([1, 2], 2).tokens == (9, 4)
    assert lookup.propose([1, 2, 3], 2).tokens == (4, 5)


def test_forgetting_leaves_no_token_behind() -> None:
    lookup = SuffixLookup()
    lookup.propose([41, 42, 43, 44, 41, 42], 3)
    lookup.forget()
    assert lookup._automaton.tokens == []
    assert lookup.propose([41, 42], 3).tokens == ()
    assert lookup.propose([41, 42, 5, 41], 1).tokens == (42,)


@settings(max_examples=60)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=80), budget=st.integers(1, 16))
def test_confidence_is_a_probability_per_token(text: list[int], budget: int) -> None:
    lookup = SuffixLookup()
    for end in range(1, len(text) + 1):
        proposal = lookup.propose(text[:end], budget)
        assert len(proposal.confidence) == len(proposal.tokens)
        assert all(0 <= c <= 1 for c in proposal.confidence)


@pytest.mark.parametrize("right", [0.2, 0.6, 0.95])
def test_confidence_is_calibrated_on_a_source_of_known_predictability(right: float) -> None:
    rng = random.Random(3)
    alphabet = 30
    lookup = SuffixLookup()
    text = [0]
    hits = claims = asked = 0.0
    for step in range(4000):
        guess = lookup.propose(text, 4)
        follows = (text[-1] * 7 + 1) % alphabet
        text.append(follows if rng.random() < right else rng.randrange(alphabet))
        if step > 2000 and guess.tokens:
            asked += 1
            hits += guess.tokens[0] == text[-1]
            claims += guess.confidence[0]
    assert asked > 1500
    assert abs(hits / asked - claims / asked) < 0.03


def test_a_copy_that_was_never_submitted_is_scored_as_well() -> None:
    lookup = SuffixLookup()
    text = [*range(20)] * 3
    first = SuffixLookup().propose(text[:25], 8).confidence
    for end in range(25, 60):
        last = lookup.propose(text[:end], 8)
    assert last.confidence[0] > first[0]


def test_the_loop_and_the_lookup_agree_on_what_was_committed() -> None:
    lookup = SuffixLookup()
    decoder = SpeculativeDecoder(TableModel(random_table(12, 0)), lookup)
    for prompt in ([1, 2, 3], [1, 2, 3, 4], [5]):
        text = list(prompt)
        for trace in decoder.rounds(prompt, DecodeConfig(max_tokens=40)):
            known = lookup._automaton.tokens[lookup._request_start :]
            assert known == text[: len(known)]
            assert len(known) == len(text) or trace.finish_reason  # it is not asked for the last
            text.extend(trace.emitted)


@settings(max_examples=100)
@given(text=small_texts, budget=st.integers(1, 16))
def test_a_tree_holds_different_continuations_of_earlier_endings(
    text: list[int], budget: int
) -> None:
    lookup = SuffixLookup(tree=True)
    tree = lookup.propose(text, budget)
    assert len(tree.tokens) <= budget
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens)  # no twins
    for node, parent in enumerate(tree.parents):
        assert -1 <= parent < node
        assert 0 <= tree.confidence[node] <= 1
    roots = [i for i, parent in enumerate(tree.parents) if parent == -1]
    assert sum(tree.confidence[i] for i in roots) <= 1 + 1e-9
    followers = {
        text[end]
        for length in range(1, len(text))
        for end in earlier_ends(text, length)
        if end < len(text)
    }
    assert {tree.tokens[i] for i in roots} <= followers
    chain = SuffixLookup().propose(text, budget)
    assert bool(chain.tokens) == bool(tree.tokens)
    if chain.tokens and tree.confidence:
        assert chain.tokens[0] in {tree.tokens[i] for i in roots} or len(tree.tokens) == budget


def test_lengths_share_buckets_in_order() -> None:
    buckets = [match_bucket(length) for length in range(1, 100)]
    assert buckets[0] == 0
    assert buckets == sorted(buckets)
    assert buckets[-1] == 7
