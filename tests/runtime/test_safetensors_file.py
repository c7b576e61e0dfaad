"""Tensors are read as they were written, and a file that is not whole is refused in one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgedraft.runtime import FolderError
from edgedraft.runtime.safetensors_file import read_safetensors
from tiny_drafter import safetensors


def written(path: Path, header: Any, body: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def test_tensors_come_back_with_names_types_and_shapes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, npt.NDArray[Any]] = {
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "single": rng.standard_normal((2, 2, 2)).astype(np.float32),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 7), np.float16),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(tensors, format="pt"))
    found = read_safetensors(path)
    assert list(found) == list(tensors)
    for name, expected in tensors.items():
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert np.array_equal(found[name], expected)
        assert not found[name].flags.owndata and not found[name].flags.writeable  # mapped


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    expected = np.array([[1.0, -2.5], [0.0, 3.0e38]], np.float32)
    expected = (expected.view(np.uint32) & 0xFFFF0000).view(np.float32)
    body = (expected.view(np.uint32) >> 16).astype("<u2").tobytes()
    entry = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
    found = read_safetensors(written(tmp_path / "x", {"w": entry}, body))["w"]
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


def test_another_writer_is_read(tmp_path: Path) -> None:
    other = pytest.importorskip("safetensors.numpy")
    expected: dict[str, npt.NDArray[Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, np.float16),
    }
    other.save_file(expected, tmp_path / "x")
    found = read_safetensors(tmp_path / "x")
    assert {name: x.tolist() for name, x in found.items()} == {
        name: x.tolist() for name, x in expected.items()
    }


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


BAD: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "shorter than its length": lambda path: path.write_bytes(b"\x08\0\0"),
    "shorter than its header": lambda path: path.write_bytes(b"\xff" * 8 + b"{}"),
    "no JSON": lambda path: written(path, b"hello"),
    "deep": lambda path: written(path, b"[" * 100_000),
    "a list": lambda path: written(path, []),
    "an entry of another kind": lambda path: written(path, {"w": 3}, bytes(8)),
    "no type": lambda path: written(path, {"w": {"shape": [2]}}, bytes(8)),
    "beyond the end": lambda path: written(path, entry(data_offsets=[4, 12]), bytes(8)),
    "before the start": lambda path: written(
        path, entry(data_offsets=[-8, -4], shape=[1]), b"1234"
    ),
    "another length": lambda path: written(path, entry(shape=[3]), bytes(8)),
    "a negative shape": lambda path: written(path, entry(shape=[-1]), bytes(8)),
    "a huge shape": lambda path: written(path, entry(shape=[10**30]), bytes(8)),
    "a shape of words": lambda path: written(path, entry(shape=["2"]), bytes(8)),
    "another type": lambda path: written(path, entry(dtype="I64"), bytes(8)),
    "a type of another kind": lambda path: written(path, entry(dtype=[]), bytes(8)),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    BAD[fault](path)
    with pytest.raises(FolderError) as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < 400


def test_no_damage_does_more_than_refuse(tmp_path: Path) -> None:
    rng = random.Random(0)
    content = safetensors({"a": np.ones((3, 4), np.float32), "b": np.ones(5, np.float16)})
    path = tmp_path / "x"
    refused = 0
    for _ in range(400):
        spoilt = bytearray(content[: rng.choice([len(content), rng.randrange(len(content))])])
        for _ in range(rng.randrange(1, 4)):
            if spoilt:
                spoilt[rng.randrange(min(len(spoilt), 150))] = rng.randrange(256)
        path.write_bytes(spoilt)
        try:
            for array in read_safetensors(path).values():
                array.sum()
        except FolderError:
            refused += 1
    assert refused > 200
