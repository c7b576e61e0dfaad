"""A drafter's acceptance head in its decode graph: what torch computes, nothing else changed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgedraft.export import model as model_module
from edgedraft.export.acceptance_head import PREFIX
from edgedraft.export.cli import main
from edgedraft.export.decoder import export_decoder
from edgedraft.export.errors import ExportError
from edgedraft.export.parity import reference_acceptance
from edgedraft.export.training_files import check_training_files, round_to_half
from edgedraft.runtime import OnnxModel, SessionConfig
from edgedraft.runtime.folder import check_files, open_model_folder
from edgedraft.runtime.merged_drafter import open_drafter
from edgedraft.runtime.training_files import open_training_files
from edgedraft.trainer.acceptance_head import FILE, AcceptanceHead, certainty_of, save_head
from tiny_drafter import tiny_lora
from tiny_models import CONFIGS, CONTEXT, make_model, open_graph, reference, save_folder

WIDTH = 64


def make_head() -> AcceptanceHead:
    """Return a head whose every weight counts, rounded as a file holds it."""
    torch.manual_seed(1)
    head = AcceptanceHead(WIDTH)
    with torch.no_grad():
        head.out.normal_(std=0.2)
        head.scale.fill_(0.3)
        for parameter in head.parameters():
            parameter.copy_(parameter.half())
    return head


@pytest.fixture(scope="module")
def drafter() -> Any:
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = True
    return make_model(config)


@pytest.fixture(scope="module")
def source(drafter: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a drafter with a head."""
    folder = save_folder(drafter, tmp_path_factory.mktemp("models") / "with_head")
    save_head(make_head(), folder)
    return folder


def trained(model: Any, tokens: list[int], head: AcceptanceHead | None = None) -> np.ndarray:
    """Return what the trainer's head says of every row."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        logits = (head or make_head())(hidden, certainty_of(model.lm_head(hidden)))
        said: np.ndarray = logits.sigmoid().numpy()
    return said


def test_exporter_and_trainer_mean_the_same_head(
    drafter: Any, source: Path, text: list[int]
) -> None:
    head = model_module.read_head(source / FILE, WIDTH)
    said = reference_acceptance(drafter, head, text)
    assert said.shape == (len(text),) and said.std() > 0.05
    np.testing.assert_allclose(said, trained(drafter, text), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_graph_says_of_every_row_what_torch_does(
    name: str, text: list[int], tmp_path: Path, source: Path
) -> None:
    model = make_model(CONFIGS[name]())
    head = model_module.read_head(source / FILE, WIDTH)
    expected = reference_acceptance(model, head, text)
    graph = export_decoder(model, CONTEXT, hidden_state=True, acceptance_head=head)
    assert [x.name for x in graph.graph.outputs][:3] == ["logits", "hidden_state", "acceptance"]
    decoder = open_graph(graph, tmp_path)
    decoder.extend(text[:10])
    for start, stop in ((10, 11), (11, 14), (14, 34)):
        logits = decoder.forward(text[start:stop])
        assert np.abs(logits - reference(model, text)[start:stop]).max() < 1e-3
        assert decoder.acceptance is not None and decoder.acceptance.shape == (stop - start,)
        np.testing.assert_allclose(decoder.acceptance, expected[start:stop], atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-block"])
def test_a_drafter_folder_brings_its_head_along(
    source: Path, drafter: Any, tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafter"
    assert main(["drafter", str(source), "--out", str(out), "--precision", precision]) == 0
    assert "max |acceptance difference| in fp32" in capsys.readouterr().out
    folder = open_model_folder(out)
    check_files(folder)
    assert folder.quality["max_acceptance_difference_fp32"] < 1e-4

    tokens = [5, 6, 7, 8]
    model = OnnxModel(folder)
    model.forward(tokens)
    assert model.acceptance is not None
    loose = {"fp32": 1e-4, "int8": 0.05, "int4-block": 0.3}[precision]
    np.testing.assert_allclose(model.acceptance, trained(drafter, tokens), atol=loose)


def test_what_a_head_has_learned_is_merged_into_it_and_into_nothing_else(
    source: Path, drafter: Any, text: list[int], tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    assert main(["drafter", str(source), "--out", str(out)]) == 0
    folder = open_model_folder(out)
    files = open_training_files(folder)
    shapes = {PREFIX + "widen": files.shapes[PREFIX + "widen"]}
    lora = tiny_lora(shapes, rank=2)
    head = make_head()
    with torch.no_grad():
        weight = lora.merged(files.tensors[PREFIX + "widen.weight"], PREFIX + "widen")
        head.widen.weight.copy_(torch.from_numpy(weight))
    models = [open_drafter(folder, SessionConfig(threads=1), lora=x) for x in (None, lora)]
    rows = [model.forward(text[:10]).copy() for model in models]
    assert np.array_equal(*rows)
    said = [model.acceptance for model in models]
    assert said[0] is not None and said[1] is not None
    expected = [trained(drafter, text[:10], x) for x in (make_head(), head)]
    assert np.abs(expected[0] - expected[1]).max() > 0.15
    for got, wanted in zip(said, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=0.05)


def test_a_head_that_would_learn_something_else_is_not_shipped(
    source: Path, drafter: Any, text: list[int], tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    assert main(["drafter", str(source), "--out", str(out)]) == 0
    round_to_half(rounded := deepcopy(drafter))
    rows = reference(rounded, text)
    check_training_files(out, text, rows, said := trained(rounded, text))
    with pytest.raises(ExportError, match="acceptance head of the training step disagrees"):
        check_training_files(out, text, rows, said + 0.01)


def test_logits_are_the_same_with_and_without_a_head(
    source: Path, drafter: Any, tmp_path: Path
) -> None:
    save_folder(drafter, tmp_path / "bare")
    outs = [tmp_path / "with", tmp_path / "without"]
    for folder, out in zip((source, tmp_path / "bare"), outs, strict=True):
        assert main(["drafter", str(folder), "--out", str(out)]) == 0
    with_head, without = (OnnxModel(open_model_folder(out)) for out in outs)
    rows = with_head.forward([3, 4, 5]).copy()
    assert np.array_equal(rows, without.forward([3, 4, 5]))
    assert with_head.acceptance is not None and without.acceptance is None


def test_a_target_has_no_head(source: Path, tmp_path: Path) -> None:
    arguments = ["target", str(source), "--out", str(tmp_path / "out"), "--precision", "fp32"]
    assert main(arguments) == 0
    assert OnnxModel(open_model_folder(tmp_path / "out")).acceptance is None


def test_a_head_that_does_not_fit_or_disagrees_leaves_nothing_behind(
    source: Path,
    drafter: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = save_folder(drafter, tmp_path / "bad")
    save_head(AcceptanceHead(WIDTH - 1), bad)
    assert main(["drafter", str(bad), "--out", str(tmp_path / "out")]) == 2
    assert "no acceptance head for hidden states of 64" in capsys.readouterr().err

    def wrong(*arguments: Any) -> np.ndarray:
        return reference_acceptance(*arguments) + 0.01

    monkeypatch.setattr(model_module, "reference_acceptance", wrong)
    assert main(["drafter", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "acceptance head disagrees with torch" in capsys.readouterr().err
    assert [x.name for x in tmp_path.iterdir()] == ["bad"]
