"""Low-rank additions: what they add, and that they begin with nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgedraft.runtime.lora import Lora, lora_shapes

SHAPES = {"layer.q_proj": (6, 4), "lm_head": (20, 4)}


def lora(rank: int = 2, alpha: float = 6.0) -> Lora:
    rng = np.random.default_rng(1)
    tensors = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in lora_shapes(SHAPES, rank).items()
    }
    return Lora(rank, alpha, tensors)


def test_tensors_are_named_and_shaped_as_peft_does_it() -> None:
    assert lora_shapes(SHAPES, 3) == {
        "layer.q_proj.lora_A": (3, 4),
        "layer.q_proj.lora_B": (6, 3),
        "lm_head.lora_A": (3, 4),
        "lm_head.lora_B": (20, 3),
    }
    assert lora().modules == tuple(SHAPES)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_merged_weight_is_its_own_plus_b_times_a_scaled(dtype: type) -> None:
    learned = lora()
    weight: npt.NDArray[Any] = np.random.default_rng(2).standard_normal((6, 4)).astype(dtype)
    a, b = learned.tensors["layer.q_proj.lora_A"], learned.tensors["layer.q_proj.lora_B"]
    merged = learned.merged(weight, "layer.q_proj")
    assert learned.scale == 3.0
    assert merged.dtype == np.float32
    assert merged == pytest.approx(weight.astype(np.float64) + 3.0 * (b @ a), rel=1e-5)
    x = np.random.default_rng(3).standard_normal(4)
    assert merged @ x == pytest.approx(weight @ x + 3.0 * (b @ (a @ x)), rel=1e-4)


def test_learning_begins_with_a_drawn_by_seed_and_b_zero() -> None:
    shapes = {"wide": (50, 3000)}
    first, again, other = (
        Lora.initial(shapes, 8, 8.0, np.random.default_rng(seed)) for seed in (0, 0, 1)
    )
    a = first.tensors["wide.lora_A"]
    assert np.array_equal(a, again.tensors["wide.lora_A"])
    assert not np.array_equal(a, other.tensors["wide.lora_A"])
    assert not first.tensors["wide.lora_B"].any()
    assert all(x.dtype == np.float32 for x in first.tensors.values())
    assert abs(a.mean()) < 1e-3
    assert a.var() == pytest.approx(1 / (3 * 3000), rel=0.05)


def test_what_has_learned_nothing_changes_no_bit() -> None:
    nothing = Lora.initial(SHAPES, 2, 4.0, np.random.default_rng(0))
    weight = np.random.default_rng(1).standard_normal((20, 4)).astype(np.float16)
    assert np.array_equal(nothing.merged(weight, "lm_head"), weight.astype(np.float32))
