"""Memory that is moved into huge pages keeps its content."""

import mmap
import sys

import numpy as np
import pytest

from edgedraft.runtime import huge_pages


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_moving_keeps_content_and_takes_only_what_is_resident() -> None:
    full = np.arange(4 * 1024 * 1024)  # 32 MiB, all touched
    touched = np.empty(4 * 1024 * 1024)
    touched[::1024] = 1  # every fourth small page
    before, resident = full.copy(), _resident_bytes()
    moved = huge_pages.use_huge_pages()
    assert moved % (2 * 1024 * 1024) == 0
    assert np.array_equal(full, before)
    assert (touched[::1024] == 1).all()
    assert _resident_bytes() < resident + 8 * 1024 * 1024  # a touched quarter stayed a quarter


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * mmap.PAGESIZE


def test_a_machine_that_forbids_huge_pages_is_left_alone(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "_SETTING", setting)
    assert huge_pages.use_huge_pages() == 0


def test_a_machine_without_the_setting_is_left_alone(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "missing")
    assert huge_pages.use_huge_pages() == 0
