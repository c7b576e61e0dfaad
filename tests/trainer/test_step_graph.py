"""A step over several passes is the step over all at once, and a pass can be ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgedraft.runtime.lora import Lora
from edgedraft.runtime.training_files import TrainingFiles
from edgedraft.trainer import step_graph
from edgedraft.trainer.errors import TrainError
from edgedraft.trainer.lesson import Lesson
from edgedraft.trainer.step_graph import Interrupted, Passage, StepGraph, passes
from edgedraft.trainer.teacher import Objective, Teacher
from tiny_learner import HEAD, PIECES, tiny_pair, tiny_training_files

MIXED = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TrainingFiles:
    return tiny_training_files(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def graph(files: TrainingFiles) -> StepGraph:
    return StepGraph(files)


def make_lora(files: TrainingFiles, modules: Callable[[str], bool] = lambda name: True) -> Lora:
    rng = np.random.default_rng(0)
    shapes = {name: shape for name, shape in files.shapes.items() if modules(name)}
    lora = Lora.initial(shapes, 3, 6.0, rng)
    tensors = {
        k: x + 0.1 * rng.standard_normal(x.shape, np.float32) for k, x in lora.tensors.items()
    }
    return replace(lora, tensors=tensors)


def make_passages(*lengths: int) -> list[Passage]:
    teacher, rng = Teacher(tiny_pair(), Objective()), np.random.default_rng(1)
    texts = [rng.integers(0, PIECES, 4 + length).tolist() for length in lengths]
    spelled = [teacher.spell(Lesson.certain(text[:4], text[4:])) for text in texts]
    return [
        replace(x.passage, nll_weight=rng.random(length).astype(np.float32))
        for x, length in zip(spelled, lengths, strict=True)
        if x
    ]


def test_gradients_do_not_depend_on_how_passages_are_divided(
    files: TrainingFiles, graph: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, passages = make_lora(files), make_passages(20, 3, 11, 40)
    assert len(passes(passages)) == 1
    whole = graph.gradients(passages, lora, MIXED)
    monkeypatch.setattr(step_graph, "_POSITIONS", 25)
    assert len(passes(passages)) == 3
    parts = graph.gradients(passages, lora, MIXED)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.weight == pytest.approx(whole.weight)
    for name, tensor in whole.tensors.items():
        np.testing.assert_allclose(parts.tensors[name], tensor, rtol=1e-4, atol=1e-6)


def test_gradients_are_the_slope_of_the_loss(files: TrainingFiles, graph: StepGraph) -> None:
    lora, passages = make_lora(files), make_passages(12, 7)
    gradients = graph.gradients(passages, lora, MIXED).tensors
    rng = np.random.default_rng(2)
    way = {k: rng.standard_normal(x.shape, np.float32) for k, x in lora.tensors.items()}
    losses = []
    for size in (-1e-2, 1e-2):
        moved = {name: x + size * way[name] for name, x in lora.tensors.items()}
        losses.append(graph.gradients(passages, replace(lora, tensors=moved), MIXED).loss)
    expected = sum(float((gradient * way[name]).sum()) for name, gradient in gradients.items())
    assert (losses[1] - losses[0]) / 2e-2 == pytest.approx(expected, rel=2e-2)


def test_predictions_come_passage_by_passage_whatever_they_are_packed_with(
    files: TrainingFiles, graph: StepGraph
) -> None:
    lora, passages = make_lora(files), make_passages(20, 3, 11)
    together = graph.predictions(passages, lora)
    for passage, found in zip(passages, together, strict=True):
        (alone,) = graph.predictions([passage], lora)
        np.testing.assert_allclose(found.prob, alone.prob, rtol=1e-5)
        assert found.hit.shape == found.prob.shape == (passage.num_predicted,)
        assert np.array_equal(found.hit, alone.hit)
    as_shipped = graph.predictions(passages, None)
    assert not np.allclose(as_shipped[0].prob, together[0].prob)


def test_an_acceptance_head_learns_apart_from_the_drafter(
    files: TrainingFiles, graph: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, passages = make_lora(files), make_passages(20, 3, 11, 40)
    own = {name for name in lora.tensors if name.startswith(HEAD)}
    assert graph.gradients(passages, lora, MIXED).tensors.keys() == lora.tensors.keys() - own
    assert graph.has_acceptance_head
    predictions, whole = graph.judgements(passages, lora)
    assert whole.tensors.keys() == own and own
    assert whole.weight == 74 and 0 < whole.loss < 1
    said = graph.predictions(passages, lora)
    for one, other in zip(predictions, said, strict=True):
        for name in ("hit", "prob", "acceptance"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    of_each = [x.brier or 0.0 for x in said]
    assert np.average(of_each, weights=[x.hit.size for x in said]) == pytest.approx(whole.loss)
    monkeypatch.setattr(step_graph, "_POSITIONS", 25)
    _, parts = graph.judgements(passages, lora)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    for name, tensor in whole.tensors.items():
        assert np.abs(tensor).max() > 1e-4
        np.testing.assert_allclose(parts.tensors[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_drafter_without_a_head_has_nothing_of_it_to_learn(tmp_path: Path) -> None:
    files = tiny_training_files(tmp_path, head=False)
    bare = StepGraph(files)
    assert not any(name.startswith(HEAD) for name in files.shapes)
    assert not bare.has_acceptance_head
    assert bare.predictions(make_passages(9), None)[0].brier is None


def test_modules_without_a_lora_stay_as_they_are(files: TrainingFiles, graph: StepGraph) -> None:
    some = make_lora(files, lambda name: name.endswith(("q_proj", "v_proj")))
    found = graph.gradients(make_passages(9), some, MIXED)
    assert found.tensors.keys() == some.tensors.keys()


def test_no_pass_is_larger_than_it_may_be_except_for_a_passage_that_is() -> None:
    rng = np.random.default_rng(3)
    passages = make_passages(*rng.integers(1, 120, 60).tolist(), 300)
    groups = passes(passages)
    assert [x for group in groups for x in group] == passages
    for group in groups:
        pieces = len(group) * max(len(x.pieces) for x in group)
        assert len(group) == 1 or (pieces <= 512 and sum(x.num_predicted for x in group) <= 256)
    assert len(groups) < 40


def test_an_interrupted_graph_runs_again_only_when_it_is_told_to(
    files: TrainingFiles, graph: StepGraph
) -> None:
    lora, passages = make_lora(files), make_passages(10)
    graph.interrupt()
    for _ in range(2):
        with pytest.raises(Interrupted):
            graph.gradients(passages, lora, MIXED)
    with pytest.raises(Interrupted):
        graph.predictions(passages, lora)
    graph.resume()
    assert graph.gradients(passages, lora, MIXED).loss > 0


def test_a_running_pass_ends_when_another_thread_says_so(
    files: TrainingFiles, graph: StepGraph
) -> None:
    lora, passages = make_lora(files), make_passages(*[100] * 2000)
    timer = threading.Timer(0.1, graph.interrupt)
    timer.start()
    with pytest.raises(Interrupted):
        graph.gradients(passages, lora, MIXED)
    graph.resume()


def test_what_onnxruntime_refuses_is_one_clear_line(files: TrainingFiles, graph: StepGraph) -> None:
    lora = make_lora(files)
    name = next(iter(lora.tensors))
    bad: dict[str, Any] = {**lora.tensors, name: np.zeros((3, 5), np.float32)}
    with pytest.raises(TrainError, match="failed in onnxruntime") as caught:
        graph.gradients(make_passages(5), replace(lora, tensors=bad), MIXED)
    assert "\n" not in str(caught.value)
