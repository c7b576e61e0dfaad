"""An adapter file is whole and made for this pair, or it is refused in one readable line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import MUTATIONS, mutations
from edgedraft.runtime import AdapterError
from edgedraft.runtime.adapter_file import (
    Adapter,
    AdapterBase,
    manifest_path,
    read_adapter,
    write_adapter,
)
from edgedraft.runtime.folder import file_sha256
from edgedraft.runtime.lora import Lora, lora_shapes
from edgedraft.runtime.ort_session import onnxruntime
from edgedraft.runtime.state import json_sha256

SHAPES = {"layers.0.q_proj": (6, 4), "layers.0.k_proj": (3, 4), "lm_head": (20, 4)}
BASE = AdapterBase("a" * 64, "b" * 64, "c" * 64, SHAPES)


def lora(shapes: dict[str, tuple[int, int]] = SHAPES, rank: int = 2, seed: int = 0) -> Lora:
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in lora_shapes(shapes, rank).items()
    }
    return Lora(rank, 4.0, tensors)


def same(a: Lora, b: Lora) -> bool:
    return ((a.rank, a.alpha, set(a.tensors)) == (b.rank, b.alpha, set(b.tensors))) and all(
        np.array_equal(x, b.tensors[name]) for name, x in a.tensors.items()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a good adapter that a test may spoil."""
    path = tmp_path / "maths.onnx_adapter"
    write_adapter(path, Adapter(lora(), 7, "maths", {"command": "test"}), BASE)
    return path


def edit(path: Path, *, sealed: bool = True, **changes: Any) -> None:
    """Change a manifest; `sealed` says whether its checksum follows."""
    place = manifest_path(path)
    manifest = {**json.loads(place.read_text()), **changes}
    if sealed:
        del manifest["manifest_sha256"]
        manifest["manifest_sha256"] = json_sha256(manifest)
    place.write_text(json.dumps(manifest))


def refusal(path: Path, base: AdapterBase = BASE) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, base)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert str(path.parent / path.stem) in message
    return message


def test_an_adapter_comes_back_as_it_was_written(path: Path) -> None:
    found = read_adapter(path, BASE)
    assert same(found.lora, lora())
    assert (found.generation, found.name, found.provenance) == (7, "maths", {"command": "test"})
    assert sorted(x.name for x in path.parent.iterdir()) == ["maths.json", "maths.onnx_adapter"]


def test_onnxruntime_reads_it_under_the_names_of_the_training_graph(path: Path) -> None:
    content = onnxruntime().AdapterFormat.read_adapter(str(path)).get_parameters()
    assert {name: tuple(x.shape()) for name, x in content.items()} == lora_shapes(SHAPES, 2)


def test_provenance_may_be_any_json(path: Path) -> None:
    write_adapter(path, Adapter(lora(), provenance={"counts": {2: 1, 10: (3, None)}}), BASE)
    assert read_adapter(path, BASE).provenance == {"counts": {"2": 1, "10": [3, None]}}


def test_some_of_the_modules_are_enough(tmp_path: Path) -> None:
    some = lora({"lm_head": (20, 4)})
    write_adapter(tmp_path / "x.onnx_adapter", Adapter(some), BASE)
    assert same(read_adapter(tmp_path / "x.onnx_adapter", BASE).lora, some)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights": "d" * 64}, "made for another drafter .aaaaaaaaaaaa, this one is dddd"),
        ({"draft_vocabulary": "d" * 64}, "made for another draft vocabulary"),
        ({"target_vocabulary": "d" * 64}, "made for another target vocabulary"),
        ({"shapes": {"lm_head": (20, 4)}}, "layers.0.k_proj.lora_A is not the drafter's; .*1 more"),
        ({"shapes": {**SHAPES, "lm_head": (21, 4)}}, "lm_head.lora_B is 20 x 2, expected 21 x 2"),
    ],
)
def test_an_adapter_of_something_else_says_of_what(
    path: Path, changes: dict[str, Any], expected: str
) -> None:
    assert re.search(expected, refusal(path, replace(BASE, **changes)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "edgedraft-target"}, "of format 'edgedraft-target', expected"),
        ({"format_version": 2}, "format version 2, this EdgeDraft reads 1; update"),
        ({"rank": 3}, "lora_A is 2 x 4, expected 3 x 4"),
        ({"rank": "2"}, "'rank' is '2'"),
        ({"alpha": None}, "'alpha' is None"),
        ({"alpha": float("nan")}, "alpha nan must be positive"),
        ({"provenance": []}, r"'provenance' is \[\]"),
        ({"modules": ["lm_head"]}, "holds other modules than its manifest lists"),
        ({"sha256": "e" * 64}, "its checksum differs"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(
    path: Path, changes: dict[str, Any], expected: str
) -> None:
    edit(path, **changes)
    assert re.search(expected, refusal(path))


def test_a_manifest_that_was_edited_is_refused(path: Path) -> None:
    edit(path, sealed=False, alpha=400.0)
    assert "damaged or edited" in refusal(path)


def spoilt_tensors(change: Callable[[dict[str, Any]], Any]) -> Lora:
    tensors: dict[str, Any] = dict(lora().tensors)
    change(tensors)
    return Lora(2, 4.0, tensors)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda t: t.pop("lm_head.lora_B"), "lm_head.lora_B is missing"),
    "extra": (lambda t: t.update(bias=t["lm_head.lora_B"]), "bias is not the drafter's"),
    "transposed": (
        lambda t: t.update({"lm_head.lora_B": t["lm_head.lora_B"].T}),
        "lm_head.lora_B is 2 x 20, expected 20 x 2",
    ),
    "double": (
        lambda t: t.update({"lm_head.lora_B": np.ones((20, 2))}),
        "lm_head.lora_B is float64, expected float32",
    ),
    "not a number": (
        lambda t: t.update({"lm_head.lora_B": np.full((20, 2), np.nan, np.float32)}),
        "lm_head.lora_B has values that are no numbers",
    ),
    "infinite": (
        lambda t: t.update({"lm_head.lora_B": np.full((20, 2), np.inf, np.float32)}),
        "lm_head.lora_B has values that are no numbers",
    ),
    "nothing": (lambda t: t.clear(), "holds no tensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit_are_neither_written_nor_read(fault: str, path: Path) -> None:
    change, expected = FAULTS[fault]
    adapter = Adapter(spoilt_tensors(change))
    other = path.with_name("other.onnx_adapter")
    with pytest.raises(AdapterError, match=expected):
        write_adapter(other, adapter, BASE)
    assert not other.exists()
    # As another program might write it.
    ort = onnxruntime()
    content = ort.AdapterFormat()
    arrays = {name: np.ascontiguousarray(x) for name, x in adapter.lora.tensors.items()}
    content.set_parameters(
        {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in arrays.items()}
    )
    content.export_adapter(str(path))
    edit(path, sha256=file_sha256(path))
    assert expected in refusal(path)


def test_a_file_without_the_other_is_refused(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    assert "copy it together with its manifest" in refusal(path)
    path.write_bytes(content)
    manifest_path(path).unlink()
    assert "an adapter is a .onnx_adapter file and the manifest beside it" in refusal(path)


def test_onnxruntime_sees_no_file_whose_checksum_is_wrong(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it takes one with flipped bits for another adapter."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr("edgedraft.runtime.adapter_file.onnxruntime", lambda: pytest.fail("read"))
    assert "its checksum differs" in refusal(path)


def test_a_kill_between_adapter_and_manifest_leaves_something_that_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgedraft.runtime.adapter_file.write_atomic", killed)
    for place in (path, path.with_name("new.onnx_adapter")):
        with pytest.raises(KeyboardInterrupt):
            write_adapter(place, Adapter(lora(seed=1)), BASE)
        refusal(place)


def test_no_damaged_file_is_accepted_as_another_adapter(path: Path) -> None:
    rng = random.Random(0)
    refused = 0
    for place in (path, manifest_path(path)):
        content = place.read_bytes()
        for spoilt in mutations(content, MUTATIONS // 2, rng):
            place.write_bytes(spoilt)
            try:
                found = read_adapter(path, BASE)
            except AdapterError as error:
                assert "\n" not in str(error)
                refused += 1
            else:  # white space of the manifest
                assert same(found.lora, lora()) and found.name == "maths"
        place.write_bytes(content)
    assert refused > 0.9 * MUTATIONS
