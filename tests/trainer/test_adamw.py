"""The optimiser follows its paper, changes nothing in place, and takes no step into nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from edgedraft.runtime.datatypes import FloatArray
from edgedraft.trainer.adamw import AdamState, AdamW

Named = dict[str, FloatArray]


def tensors(seed: int, size: float = 1.0) -> Named:
    rng = np.random.default_rng(seed)
    return {name: size * rng.standard_normal((3, 4), np.float32) for name in ("a", "b")}


def steps(optimizer: AdamW, count: int, size: float) -> Named:
    values, state = tensors(0), AdamState()
    for i in range(count):
        after = optimizer.step(values, tensors(i + 1, size), state)
        assert after is not None
        values, state = after
    return values


@pytest.mark.parametrize("size", [0.01, 30.0])
def test_it_steps_as_torch_does_with_gradients_that_are_clipped_or_not(size: float) -> None:
    torch = pytest.importorskip("torch")
    optimizer = AdamW(learning_rate=0.05, weight_decay=0.1, warm_up=1)
    theirs = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in tensors(0).items()}
    adam = torch.optim.AdamW(theirs.values(), lr=0.05, weight_decay=0.1, betas=(0.9, 0.999))
    for i in range(20):
        for name, gradient in tensors(i + 1, size).items():
            theirs[name].grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        adam.step()
    for name, ours in steps(optimizer, 20, size).items():
        np.testing.assert_allclose(ours, theirs[name].detach().numpy(), rtol=1e-4, atol=1e-5)


def test_the_first_step_is_a_part_of_the_learning_rate_against_the_gradients_sign() -> None:
    optimizer = AdamW(learning_rate=5.0, weight_decay=0.0, warm_up=10)
    after = optimizer.step(tensors(0), tensors(1), AdamState())
    assert after is not None
    for name, before in tensors(0).items():
        moved = after[0][name] - before
        np.testing.assert_allclose(moved, -0.5 * np.sign(tensors(1)[name]), rtol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_gradient_that_is_no_number_changes_nothing_and_is_told(bad: float) -> None:
    optimizer, values, gradients = AdamW(), tensors(0), tensors(1)
    after = optimizer.step(values, gradients, AdamState())
    assert after is not None
    gradients["b"][1, 2] = bad
    before = {name: x.copy() for name, x in values.items()}
    with np.errstate(over="ignore", invalid="ignore"):
        assert optimizer.step(values, gradients, after[1]) is None
    assert all(np.array_equal(values[name], before[name]) for name in before)


def test_the_average_is_of_all_first_steps_and_later_of_the_latest() -> None:
    optimizer, state, values = AdamW(averaging=0.9), AdamState(), tensors(0)
    behind: list[Named] = []
    for i in range(200):
        after = optimizer.step(values, tensors(i), state)
        assert after is not None
        values, state = after
        behind.append(values)
        early = np.mean([x["a"] for x in behind], 0)
        if i == 0:
            np.testing.assert_array_equal(state.averages["a"], values["a"])
        elif i == 3:
            assert np.abs(state.averages["a"] - early).max() < np.abs(values["a"] - early).max()
    latest = sum(0.1 * 0.9 ** (199 - i) * x["a"] for i, x in enumerate(behind))
    np.testing.assert_allclose(state.averages["a"], latest, atol=1e-5)


def test_what_was_there_before_a_step_stays_as_it_was() -> None:
    values = tensors(0)
    before = {name: x.copy() for name, x in values.items()}
    first = AdamW().step(values, tensors(1), AdamState())
    assert first is not None
    kept = {name: x.copy() for name, x in first[1].means.items()}
    AdamW().step(first[0], tensors(2), first[1])
    assert all(np.array_equal(values[name], before[name]) for name in before)
    assert all(np.array_equal(first[1].means[name], kept[name]) for name in kept)
