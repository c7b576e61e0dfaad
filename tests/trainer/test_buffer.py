"""The lessons that are kept: how many, which, and what survives."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from damage import MUTATIONS, mutations
from edgedraft.runtime.table_file import write_tables
from edgedraft.trainer.buffer import OLDER, RECENT, Buffer
from edgedraft.trainer.lesson import CONTEXT, LENGTH, Lesson


def new_buffer(path: Path | None = None, target: str = "target", seed: int = 0) -> Buffer:
    return Buffer(path, target, seed)


def lesson(number: int, length: int = 5) -> Lesson:
    """Return a lesson that can be told from all others."""
    return Lesson.certain([number], [number] * length)


def filled(buffer: Buffer, count: int) -> Buffer:
    for number in range(count):
        buffer.add([lesson(number)])
    return buffer


def firsts(lessons: list[Lesson]) -> list[int]:
    return [int(x.tokens[0]) for x in lessons]


def test_the_newest_are_kept_all_and_of_the_older_a_fair_sample() -> None:
    count = 2 * OLDER + RECENT
    times = np.zeros(count)
    for seed in range(30):
        buffer = filled(new_buffer(seed=seed), count)
        assert firsts(buffer.recent) == list(range(count))[-RECENT:]
        assert len(set(firsts(buffer.older))) == OLDER
        times[firsts(buffer.older)] += 1
    early, late, newest = np.split(times, [OLDER, 2 * OLDER])
    assert early.sum() == pytest.approx(late.sum(), rel=0.1)
    assert not newest.any()


def test_lessons_are_numbered_in_the_order_of_arrival() -> None:
    buffer = new_buffer()
    added = [x.number for i in range(6) for x in buffer.add([lesson(i), lesson(i)])]
    assert added == list(range(12))


def test_what_was_saved_is_there_again_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lessons.bin"
    before = filled(new_buffer(path), 300)
    before.save()
    after = new_buffer(path)
    for ours, theirs in (
        (after.recent, before.recent),
        (after.older, before.older),
    ):
        for one, other in zip(ours, theirs, strict=True):
            assert one.number == other.number
            for name in ("context", "tokens", "top_ids", "top_log_probs"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert [x.number for x in after.add([lesson(7)])] == [300]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "lessons.bin"
    buffer = new_buffer(path)
    for number in range(3000):
        buffer.add([Lesson.certain([number] * CONTEXT, [number] * LENGTH)])
    buffer.save()
    assert path.stat().st_size < 8e6


def test_a_file_of_another_target_and_a_damaged_one_are_told_of_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lessons.bin"
    filled(new_buffer(path), 30).save()
    with caplog.at_level(logging.WARNING):
        assert new_buffer(path, "another").recent == []
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
        assert new_buffer(path).recent == []
    assert len(caplog.messages) == 2 and "checksum" in caplog.messages[1]


def test_a_file_of_an_older_format_is_told_of_once_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lessons.bin"
    older = {"format": "edgedraft-lessons", "format_version": 1, "target": "target"}
    write_tables(path, older, {"counts": np.zeros(3, np.int64)})
    buffer = new_buffer(path)
    assert buffer.recent == []
    filled(buffer, 3).save()
    assert firsts(new_buffer(path).recent) == [0, 1, 2]
    assert len(caplog.messages) == 1 and "another version" in caplog.messages[0]


def test_a_file_that_anything_happened_to_opens_whole_or_empty_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lessons.bin"
    filled(new_buffer(path), RECENT + 12).save()
    content = path.read_bytes()
    for mutated in mutations(content, MUTATIONS, random.Random(0)):
        path.write_bytes(mutated)
        caplog.clear()
        buffer = new_buffer(path)
        if mutated == content:
            assert caplog.messages == [] and len(buffer.recent) == RECENT
        else:
            (message,) = caplog.messages
            assert str(path) in message and "\n" not in message
            assert buffer.recent == buffer.older == []
        assert [x.number for x in buffer.add([lesson(0)])] == [60 * (mutated == content)]


def test_nothing_is_written_when_nothing_changed(tmp_path: Path) -> None:
    path = tmp_path / "lessons.bin"
    buffer = new_buffer(path)
    buffer.save()
    assert not path.exists()
    filled(buffer, 3).save()
    path.unlink()
    buffer.save()
    assert not path.exists()


def _save_for_ever(path: Path) -> None:
    buffer = new_buffer(path)
    number = 0
    while True:
        buffer.add([lesson(number, 50)])
        buffer.save()
        number += 1


def test_a_kill_at_any_moment_leaves_a_file_that_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lessons.bin"
    rng = np.random.default_rng(0)
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        process = context.Process(target=_save_for_ever, args=(path,))
        process.start()
        time.sleep(0.05 + 0.05 * rng.random())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if path.exists():
            new_buffer(path)
    assert path.exists() and len(new_buffer(path).recent) > 0
    assert caplog.messages == []
