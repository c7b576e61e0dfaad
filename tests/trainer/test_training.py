"""A run that was stopped ends as if it had not been, and a kill costs nothing that was saved."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')

import numpy as np  # noqa: E402

from edgedraft.runtime.vocab_map import VocabMap  # noqa: E402
from edgedraft.trainer import drafter  # noqa: E402
from edgedraft.trainer.answers import Answer  # noqa: E402
from edgedraft.trainer.batches import group  # noqa: E402
from edgedraft.trainer.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from edgedraft.trainer.drafter import Training  # noqa: E402
from edgedraft.trainer.errors import TrainError  # noqa: E402
from edgedraft.trainer.examples import Example, answer_examples  # noqa: E402
from edgedraft.trainer.model import DrafterShape, make_drafter  # noqa: E402
from edgedraft.trainer.optimizer import (  # noqa: E402
    decay_has_begun,
    drafter_optimizers,
    rate_scale,
)

SHAPE = DrafterShape(layers=1, hidden=16, heads=2, mlp=24)


@pytest.fixture
def plan(answers: list[Answer], vocab_map: VocabMap) -> list[list[Example]]:
    return group(answer_examples(answers, vocab_map), np.random.default_rng(0), max_tokens=400)


def training(plan: list[list[Example]], checkpoint: Path, **options: Any) -> Training:
    return training_of(SHAPE, plan, checkpoint, **options)


def training_of(
    shape: DrafterShape, plan: list[list[Example]], checkpoint: Path, **options: Any
) -> Training:
    model = make_drafter(shape, 270, seed=0)
    return Training(model, drafter_optimizers(model), plan, checkpoint, **options)


def test_a_resumed_run_ends_in_the_same_weights(plan: list[list[Example]], tmp_path: Path) -> None:
    assert len(plan) >= 8
    whole = training(plan, tmp_path / "whole.pt")
    whole.run()
    training(plan, tmp_path / "parts.pt").run(until=3)
    for until in (5, None):
        part = training(plan, tmp_path / "parts.pt")
        part.resume()
        part.run(until=until)
    once, twice = (load_checkpoint(tmp_path / f"{name}.pt") for name in ("whole", "parts"))
    assert once["progress"]["step"] == twice["progress"]["step"] == len(plan)
    for name, value in once["model"].items():
        assert torch.equal(value, twice["model"][name]), name
    fresh = make_drafter(SHAPE, 270, seed=0).state_dict()
    assert not any(torch.equal(value, fresh[name]) for name, value in once["model"].items())


def test_training_lowers_the_loss(plan: list[list[Example]], tmp_path: Path) -> None:
    run = training([*plan, *plan, *plan, *plan, *plan, *plan], tmp_path / "c.pt")
    run.run()
    losses = [point["loss"] for point in run.progress.curve]
    assert losses[-1] < losses[0] - 0.5


def test_another_runs_checkpoint_is_refused(plan: list[list[Example]], tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    training(plan, path).run(until=1)
    with pytest.raises(TrainError, match="belongs to a run of"):
        training(plan[:-1], path).resume()
    wider = DrafterShape(layers=1, hidden=32, heads=2, mlp=24)
    with pytest.raises(TrainError, match="another kind of drafter"):
        training_of(wider, plan, path).resume()
    deeper = DrafterShape(layers=2, hidden=16, heads=2, mlp=24)
    with pytest.raises(TrainError, match="another kind of drafter"):
        training_of(deeper, plan, path).resume()
    path.write_bytes(b"half of it")
    with pytest.raises(TrainError, match="not a readable checkpoint"):
        training(plan, path).resume()


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_checkpoint_killed_while_it_is_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"weights": torch.arange(3)})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((torch, "save") if moment == "write" else (os, moment)), killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(path, {"weights": torch.zeros(3)})
    assert load_checkpoint(path)["weights"].tolist() == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]


def test_a_time_limit_shortens_a_run_and_the_rates_still_fall_to_zero(
    plan: list[list[Example]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=2.5)  # read before and after every step: each takes 2.5 s
    monkeypatch.setattr(drafter.time, "monotonic", lambda: next(clock))
    run = training(plan * 20, tmp_path / "c.pt", max_minutes=1.0)
    run.run(until=3)
    assert run.progress.total_steps == len(plan * 20), "the fall need not begin yet"
    run.run()
    assert run.progress.step == run.progress.total_steps == 24
    resumed = training(plan * 20, tmp_path / "c.pt", max_minutes=1.0)
    resumed.resume()
    assert resumed.progress.total_steps == 24


def test_rates_rise_stay_and_fall_to_zero() -> None:
    scales = [rate_scale(step, 1000) for step in range(1001)]
    assert scales[0] < 0.1
    assert scales[200] == scales[400] == 1.0
    assert scales[1000] == 0.0
    assert all(a >= b for a, b in zip(scales[100:], scales[101:], strict=False))
    assert max(rate_scale(step, 20) for step in range(20)) == 1.0, "short runs rise faster"
    for step in range(100, 1000):
        assert decay_has_begun(step, 1000) == (scales[step + 1] < scales[step])


@pytest.mark.parametrize("loss", ["forward-kl", "reverse-kl", "tv", "lk"])
def test_a_run_takes_any_loss_where_there_is_no_teacher(
    plan: list[list[Example]], tmp_path: Path, loss: str
) -> None:
    """Text has none: it is learned with cross-entropy whatever the answers are learned with."""
    finals = []
    for name in ("ce", loss):
        run = training(plan, tmp_path / f"{name}.pt", loss=name)
        run.run(until=2)
        finals.append(load_checkpoint(tmp_path / f"{name}.pt")["model"])
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())
