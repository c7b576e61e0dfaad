"""`edgedraft-export target` writes a folder the runtime opens, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgedraft.export import model as model_module
from edgedraft.export.cli import main
from edgedraft.export.decoder import export_decoder
from edgedraft.export.errors import ExportError
from edgedraft.export.folder import staged_folder
from edgedraft.export.parity import agreement, fp32_difference, reference_logits
from edgedraft.runtime import OnnxModel, open_target_folder
from edgedraft.runtime.errors import FolderError
from edgedraft.runtime.folder import check_files, open_model_folder
from edgedraft.runtime.peers import peer_model
from tiny_models import CONFIGS, CONTEXT, make_model, open_graph, reference, save_folder


@pytest.fixture(scope="module")
def tied_model() -> Any:
    return make_model(CONFIGS["llama, tied head, dynamic rope"]())


@pytest.fixture(scope="module")
def source_folder(tied_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tied_model, tmp_path_factory.mktemp("models") / "tiny")


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
