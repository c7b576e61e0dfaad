"""Where two sequences part ways, wherever that is."""

from __future__ import annotations

import pytest

from edgedraft.runtime.prefix import common_prefix

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SEQUENCES = st.lists(st.integers(0, 1), max_size=20)


@given(SEQUENCES, SEQUENCES, SEQUENCES)
def test_it_is_the_first_difference_or_the_end(
    shared: list[int], left: list[int], right: list[int]
) -> None:
    a, b = shared + left, shared + right
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b) == common_prefix(b, a) == expected
