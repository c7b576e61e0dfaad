"""What is remembered on the device: whole after a kill, set aside when damaged, never fatal."""

from __future__ import annotations

import logging
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgedraft.runtime import StateError
from edgedraft.runtime.state import DeviceState, default_state_dir, write_atomic
from edgedraft.runtime.table_file import write_tables


def only_file(state_dir: Path) -> Path:
    (path,) = state_dir.rglob("*.json")
    return path


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    state = DeviceState(tmp_path, "a" * 64)
    assert state.load("plans") is None
    for value in ({"x": [1, 2.5, None, "é"]}, [], "text", 7, {"2": 0.01}):
        state.save("plans", value)
        assert state.load("plans") == value
        assert DeviceState(tmp_path, "a" * 64).load("plans") == value
    assert DeviceState(tmp_path, "b" * 64).load("plans") is None
    assert [p.name for p in only_file(tmp_path).parent.iterdir()] == ["plans.json"]


def damages(content: bytes) -> list[bytes]:
    rng = random.Random(0)
    spoilt = [b"", b"{", b"null", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, content[:-1]]
    spoilt += [content.replace(b'"version": 1', b'"version": 2')]
    spoilt += [content.replace(b"0.5", b"0.6")]
    for _ in range(40):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        spoilt.append(bytes(flipped))
    return spoilt


def test_a_damaged_file_is_set_aside_with_a_message_and_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = DeviceState(tmp_path, "a" * 64)
    value = {"plan": {"2": 0.5, "16": 0.75}}
    state.save("plans", value)
    path = only_file(tmp_path)
    content = path.read_bytes()
    for spoilt in damages(content):
        path.write_bytes(spoilt)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded = state.load("plans")
        if loaded is not None:  # a flipped bit in white space or in the case of a hex digit
            assert loaded == value
            continue
        assert path.with_suffix(".damaged").read_bytes() == spoilt
        assert not path.exists()
        assert "is damaged; set aside as plans.damaged" in caplog.text
        assert state.load("plans") is None  # and now there is none
        state.save("plans", value)
        assert state.load("plans") == value


def test_a_state_that_cannot_be_read_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = DeviceState(tmp_path, "a" * 64)
    state.save("plans", 1)
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    assert state.load("plans") is None
    assert "cannot be read" in caplog.text


def test_a_state_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match="point EDGEDRAFT_STATE at a folder that can") as caught:
        DeviceState(tmp_path / "file", "a" * 64).save("plans", 1)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_what_tells_of_texts_is_for_its_user_alone_and_results_are_for_others_too(
    tmp_path: Path,
) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "result.json", b"{}")
        DeviceState(tmp_path, "a" * 64).save("plans", 1)
        write_tables(tmp_path / "lessons.bin", {"format": "x"}, {"tokens": np.zeros(3)})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*.*")}
    assert modes == {"result.json": 0o640, "plans.json": 0o600, "lessons.bin": 0o600}


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


_KILLER = """
import itertools, json, os, random, signal, sys, time
from pathlib import Path
from edgedraft.runtime.state import DeviceState

state, rng = DeviceState(Path(sys.argv[1]), "a" * 64), random.Random(4)
state.save("plans", {"number": 0, "filler": "0" * 20_000})
last, progress = 0, 0
for _ in range(20):
    writer = os.fork()
    if not writer:
        for i in itertools.count(last + 1):
            state.save("plans", {"number": i, "filler": str(i) * 20_000})
    time.sleep(rng.random() * 0.03)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    value = state.load("plans")  # None, had it been set aside
    assert value["filler"] == str(value["number"]) * 20_000
    progress += value["number"] > last
    last = value["number"]
print(progress)
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLER, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5  # most writers got somewhere
    assert not list(tmp_path.rglob("*.damaged"))


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEDRAFT_STATE", "/x/y")
    assert default_state_dir() == Path("/x/y")
    monkeypatch.delenv("EDGEDRAFT_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert default_state_dir() == Path("/s/edgedraft")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_state_dir() == Path("/home/someone/.local/state/edgedraft")
