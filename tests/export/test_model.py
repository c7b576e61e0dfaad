"""`edgedraft-export target` writes a folder the runtime opens, or nothing."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file

from edgedraft.export import cli
from edgedraft.export import model as model_module
from edgedraft.export.cli import main
from edgedraft.export.decoder import export_decoder
from edgedraft.export.errors import ExportError
from edgedraft.export.folder import staged_folder
from edgedraft.export.parity import agreement, fp32_difference, reference_logits
from edgedraft.export.training_step import trainable_model
from edgedraft.runtime import OnnxModel, open_target_folder
from edgedraft.runtime.errors import FolderError
from edgedraft.runtime.folder import check_files, open_model_folder
from edgedraft.runtime.ort_session import onnxruntime
from edgedraft.runtime.peers import peer_model
from edgedraft.runtime.requantize import quantize_columns
from tiny_models import CONFIGS, CONTEXT, make_model, open_graph, reference, save_folder

_NUMPY = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}


@pytest.fixture(scope="module")
def tied_model() -> Any:
    return make_model(CONFIGS["llama, tied head, dynamic rope"]())


@pytest.fixture(scope="module")
def source_folder(tied_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tied_model, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a drafter's source that can learn on the device."""
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = True
    return save_folder(make_model(config), tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def learner(plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a drafter that can learn; do not change it."""
    out = tmp_path_factory.mktemp("drafters") / "learner"
    assert main(["drafter", str(plain_folder), "--out", str(out)]) == 0
    return out


def test_an_exported_folder_runs_and_says_what_was_measured(
    source_folder: Path, tied_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exports" / "tiny"
    arguments = ["target", str(source_folder), "--out", str(out), "--precision", "fp32"]
    assert main([*arguments, "--max-context", "48"]) == 0
    printed = capsys.readouterr()
    assert "max |logit difference| in fp32" in printed.out and "v(8)" in printed.out
    assert "tracing LlamaForCausalLM" in printed.err

    folder = open_target_folder(out)
    check_files(folder)
    assert (folder.name, folder.precision, folder.context_length) == ("tiny", "fp32", 48)
    assert (folder.vocab_size, folder.bos_token_id, folder.eos_token_ids) == (259, 1, (2,))
    assert folder.chat_template is not None
    assert set(folder.quality["pass_ms"]) == {"1", "4", "8", "16"}
    assert folder.quality["max_logit_difference_fp32"] < 1e-4
    assert folder.provenance["model"]["source"] == str(source_folder)
    assert peer_model("transformers", folder, None) == str(source_folder), "to compare with"
    assert folder.provenance["packages"]["torch"]
    model = OnnxModel(folder)
    rows = model.forward([1, 2, 3])
    assert rows.shape == (3, 259), "padded vocabulary rows are cut off"
    assert np.abs(rows - reference(tied_model, [1, 2, 3])[:, :259]).max() < 1e-4
    assert [x.name for x in out.parent.iterdir()] == ["tiny"]

    # A second export replaces the first one only when told to.
    before = (out / "manifest.json").read_text()
    assert main(arguments) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert (out / "manifest.json").read_text() == before
    assert main([*arguments, "--force"]) == 0
    assert open_target_folder(out).context_length == CONTEXT
    assert main(["check", str(out)]) == 0
    (out / "decoder.onnx.data").write_bytes(b"0" * (out / "decoder.onnx.data").stat().st_size)
    assert main(["check", str(out)]) == 2


def test_a_drafter_folder_is_opened_as_a_drafter_only(source_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    (source_folder / "abc.ngrams").write_bytes(b"counts")
    assert main(["drafter", str(source_folder), "--out", str(out), "--precision", "fp32"]) == 0
    folder = open_model_folder(out)
    assert folder.is_drafter
    assert (out / "abc.ngrams").read_bytes() == b"counts"
    assert folder.mark_token_id is None, "this tokenizer has no mark"
    outputs = {x.name for x in onnx.load(folder.graph, load_external_data=False).graph.output}
    assert "hidden_state" in outputs
    with pytest.raises(FolderError, match="holds a drafter, .* --drafter"):
        open_target_folder(out)
    assert main(["check", str(out)]) == 0


def test_a_drafters_integers_can_be_made_again_from_its_weights(learner: Path) -> None:
    check_files(open_model_folder(learner))
    training = json.loads((learner / "manifest.json").read_text())["training"]
    names = [training[x] for x in ("step_graph", "evaluation_graph", "weights")]
    assert all((learner / name).is_file() for name in names)
    weights = load_file(learner / training["weights"])
    assert set(training["modules"].values()) <= set(weights)
    assert training["modules"]["lm_head"] == "model.embed_tokens.weight", "the head is tied"

    graph = onnx.load(learner / "decoder.onnx").graph
    stored = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
    for name, modules in training["merge"].items():
        parts = [weights[training["modules"][x]].astype(np.float32) for x in modules]
        integers, scales = quantize_columns(np.concatenate(parts).T)
        assert (integers == stored[name]).all()
        assert (scales == stored[f"{name}.scales"]).all()
    assert sum(len(x) for x in training["merge"].values()) == len(training["modules"])
    products = [x for x in graph.node if x.op_type == "MatMulIntegerToFloat"]
    assert {x.input[1] for x in products} == set(training["merge"]), "every product can change"


def test_integers_can_be_replaced_when_a_session_is_made(learner: Path) -> None:
    """What makes a drafter that has learned."""
    ort = onnxruntime()
    folder = open_model_folder(learner)
    name, *_ = json.loads((learner / "manifest.json").read_text())["training"]["merge"]
    stored = {x.name: x for x in onnx.load(folder.graph).graph.initializer}
    replaced = {
        f"{name}{suffix}": ort.OrtValue.ortvalue_from_numpy(
            np.zeros_like(numpy_helper.to_array(stored[f"{name}{suffix}"]))
        )
        for suffix in ("", ".scales")
    }
    options = ort.SessionOptions()
    options.add_external_initializers(list(replaced), list(replaced.values()))
    sessions = [ort.InferenceSession(str(folder.graph), x) for x in (options, None)]
    feeds = {
        x.name: np.zeros([d if isinstance(d, int) else 1 for d in x.shape], _NUMPY[x.type])
        for x in sessions[0].get_inputs()
    }
    feeds["input_ids"][:] = 7
    feeds["total_sequence_length"] = np.array(1, np.int32)
    changed, same = (x.run(["logits"], feeds)[0] for x in sessions)
    assert not np.allclose(changed, same)


def test_a_drafter_that_cannot_learn_is_exported_all_the_same(
    source_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafter"
    assert main(["drafter", str(source_folder), "--out", str(out), "--max-context", "48"]) == 0
    assert "dynamic RoPE cannot learn on the device" in capsys.readouterr().err
    assert "training" not in json.loads((out / "manifest.json").read_text())


def test_a_step_graph_that_disagrees_leaves_nothing_behind(
    plain_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(model: Any, head: Any) -> Any:
        return replace(trainable_model(model, head), epsilon=1.0)

    monkeypatch.setattr(model_module, "trainable_model", wrong)
    assert main(["drafter", str(plain_folder), "--out", str(tmp_path / "out")]) == 2
    assert "the training step disagrees with transformers" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_quantised_folder_says_what_it_lost(
    source_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = tmp_path / "evaluation.txt"
    evaluation.write_text("Some text that nobody calibrated on.")
    out = tmp_path / "out"
    arguments = ["target", str(source_folder), "--out", str(out), "--precision", "int8"]
    assert main([*arguments, "--eval-text", str(evaluation)]) == 0
    assert "KL to fp32 (nats)" in capsys.readouterr().out
    folder = open_target_folder(out)
    assert folder.precision == "int8"
    assert folder.quality["positions"] == len(evaluation.read_text()) - 1  # one token a byte
    assert 0 < folder.quality["kl"] < 0.1
    assert folder.quality["max_logit_difference_fp32"] < 1e-3, "smoothing changed the fp32 model"


def test_a_graph_that_disagrees_leaves_nothing_behind(
    source_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return 1.5 * reference_logits(*args, **kwargs)

    monkeypatch.setattr(model_module, "reference_logits", wrong)
    out = tmp_path / "out"
    assert main(["target", str(source_folder), "--out", str(out), "--precision", "fp32"]) == 2
    assert "disagrees with transformers" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "\n"),
        (OSError(28, "No space", "out"), 2, "edgedraft-export: [Errno 28] No space: 'out'\n"),
    ],
)
def test_ctrl_c_and_what_the_device_refuses_end_without_a_traceback(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(options: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr(cli, "_check", fail)
    assert main(["check", "out"]) == status
    assert capsys.readouterr().err == said


def test_agreement_of_a_graph_with_its_own_model(
    tied_model: Any, text: list[int], tmp_path: Path
) -> None:
    decoder = open_graph(export_decoder(tied_model, CONTEXT), tmp_path)
    difference = fp32_difference(decoder, text, reference_logits(tied_model, text))
    assert 0 < difference < 1e-4
    measured = agreement(decoder, tied_model, [text, text[::-1]])
    assert measured.positions == 2 * (len(text) - 1)
    assert measured.kl == pytest.approx(0, abs=1e-6)
    assert measured.top1_agreement == 1
    assert measured.perplexity_graph == pytest.approx(measured.perplexity_model, rel=1e-5)

    other = make_model(CONFIGS["llama, tied head, dynamic rope"]())
    other.lm_head.weight.data *= 1.2
    changed = agreement(decoder, other, [text])
    p, q = (_log_softmax(reference(x, text[:-1])) for x in (other, tied_model))
    assert changed.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)
    following = -q[np.arange(len(text) - 1), text[1:]].mean()
    assert changed.perplexity_graph == pytest.approx(np.exp(following), rel=1e-3)
    with pytest.raises(ExportError, match="disagrees with transformers"):
        fp32_difference(decoder, text, reference_logits(other, text))


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    for force in (False, True):
        with (
            pytest.raises(ExportError, match="files that are no export"),
            staged_folder(tmp_path, force=force),
        ):
            pass
    assert (tmp_path / "thesis.txt").exists()


def test_an_interrupted_export_keeps_the_former_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text(json.dumps({"format": "edgedraft-target"}))
    with pytest.raises(KeyboardInterrupt), staged_folder(out, force=True) as stage:
        (stage / "manifest.json").write_text("half")
        raise KeyboardInterrupt
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert json.loads((out / "manifest.json").read_text()) == {"format": "edgedraft-target"}
    with staged_folder(out, force=True) as stage:
        (stage / "new").write_text("")
    assert [x.name for x in out.iterdir()] == ["new"]
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-context", "1"], "max_context must be >= 32, got 1"),
        (["--via", "optimum", "--tree"], "need the direct way"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["target", "smollm2", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err


def _log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
