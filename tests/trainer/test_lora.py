"""A LoRA learns what a target says, as PEFT keeps it; the drafter under it stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')
peft = pytest.importorskip("peft", reason='needs peft: pip install "edgedraft[train]"')

from edgedraft.runtime.safetensors_file import read_safetensors  # noqa: E402
from edgedraft.trainer.checkpoint import load_checkpoint  # noqa: E402
from edgedraft.trainer.cli import main  # noqa: E402
from edgedraft.trainer.drafter import Training  # noqa: E402
from edgedraft.trainer.model import DrafterShape, load_drafter, make_drafter, save_drafter  # noqa: E402
from edgedraft.trainer.tokenizer import save_tokenizer, train_tokenizer  # noqa: E402
from toy_vocabularies import TEXT  # noqa: E402

WEIGHTS = "adapter_model.safetensors"
# PEFT warns of every LoRA of a tied head, since merging it in place would change the embedding.
pytestmark = pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that knows nothing."""
    folder = tmp_path_factory.mktemp("drafter")
    tokenizer: Tokenizer = train_tokenizer([TEXT], 300)
    save_tokenizer(tokenizer, folder)
    size = tokenizer.get_vocab_size()
    save_drafter(make_drafter(DrafterShape(1, 32, 2, 48), size, seed=0), folder)
    return folder


@pytest.fixture
def train(drafter: Path, answers_file: Path, target_folder: Path) -> Callable[..., int]:
    """Train a LoRA on the toy target's answers."""
    pair = ["--drafter", str(drafter), "--answers", f"{answers_file}:{target_folder}"]
    return lambda out, *options: main(
        ["lora", *pair, "--out", str(out), "--rank", "8", "--lr", "0.02", *options]
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_lora_learns_what_its_target_says_and_changes_nothing_else(
    train: Callable[..., int], drafter: Path, tmp_path: Path
) -> None:
    before = contents(drafter)
    out = tmp_path / "lora"
    assert train(out, "--epochs", "60") == 0
    assert contents(drafter) == before

    record = json.loads((out / "training.json").read_text())
    losses = [point["loss"] for point in record["progress"]["curve"] if "loss" in point]
    assert losses[-1] < losses[0] - 1
    assert record["held_out"]["all"]["tau"] > record["held_out_before"]["all"]["tau"] + 0.3
    measured = [point["all"] for point in record["progress"]["curve"] if "all" in point]
    assert measured, "tokens per pass are measured while training"
    data = {Path(name).name for name in record["provenance"]["data_sha256"]}
    assert data == {"answers.jsonl", "config.json", "model.safetensors", "tokenizer.json"}

    own = load_drafter(drafter)
    opened = peft.PeftModel.from_pretrained(load_drafter(drafter), out)
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode(), opened.disable_adapter():
        assert torch.equal(opened(input_ids=tokens).logits, own(input_ids=tokens).logits)
    assert set(read_safetensors(out / WEIGHTS)) == {
        f"base_model.model.{module}.lora_{x}.weight"
        for module in (
            *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"),
            *(f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")),
            "lm_head",
        )
        for x in "AB"
    }


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, "--epochs", "4") == 0
    run = Training.run
    with monkeypatch.context() as patch:

        def stopped(self: Training) -> None:
            run(self, until=2)
            raise KeyboardInterrupt

        patch.setattr(Training, "run", stopped)
        assert train(parts, "--epochs", "4") == 130
    assert not (parts / WEIGHTS).exists()
    assert train(parts, "--epochs", "4", "--resume") == 0
    assert (whole / WEIGHTS).read_bytes() == (parts / WEIGHTS).read_bytes()
    kept = load_checkpoint(parts / "checkpoint.pt")["model"]
    assert all("lora_" in name for name in kept), "what is frozen need not be kept"


def test_only_the_modules_asked_for_learn(train: Callable[..., int], tmp_path: Path) -> None:
    options = ["--modules", "q_proj", "lm_head", "--alpha", "2.5", "--epochs", "1"]
    assert train(tmp_path / "lora", *options) == 0
    names = {name.split(".lora_")[0] for name in read_safetensors(tmp_path / "lora" / WEIGHTS)}
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "lm_head"}
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["lora_alpha"] == 2.5


def test_a_device_takes_what_was_trained_and_no_other_drafter_does(
    train: Callable[..., int],
    drafter: Path,
    target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnxscript", reason='needs onnxscript: pip install "edgedraft[export]"')
    from edgedraft.export.cli import main as export

    other = tmp_path / "other"
    tokenizer = train_tokenizer([TEXT], 300)
    shape = DrafterShape(1, 32, 2, 48)
    save_drafter(make_drafter(shape, tokenizer.get_vocab_size(), seed=1), other)
    save_tokenizer(tokenizer, other)
    assert train(tmp_path / "lora", "--epochs", "1") == 0
    for folder, status in ((drafter, 0), (other, 2)):
        device, adapter = tmp_path / "device" / folder.name, tmp_path / f"{folder.name}.a"
        assert export(["drafter", str(folder), "--out", str(device)]) == 0
        capsys.readouterr()
        pair = ["--drafter", str(device), "--target", str(target_folder)]
        assert export(["adapter", str(tmp_path / "lora"), *pair, "--out", str(adapter)]) == status
        assert adapter.with_name(f"{adapter.name}.onnx_adapter").exists() == (status == 0)
    assert "was trained on another drafter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "0"], "rank must be > 0, got 0"),
        (["--lr", "-1"], "learning_rate must be > 0, got -1.0"),
        (["--resume"], "nothing to resume"),
        (["--loss", "lk"], "--loss lk needs answers with top_k_ids"),
        (["--drafter", "nowhere"], "nowhere: no readable tokenizer.json"),
        (["--answers", "a:b", "c:d"], "a LoRA is learned for one target"),
    ],
)
def test_an_error_is_one_line(
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert train(tmp_path / "lora", *options) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("edgedraft-train: ")
    assert message in line
    assert not (tmp_path / "lora").exists()


def test_another_runs_checkpoint_is_refused(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "lora", "--epochs", "1") == 0
    for options in (["--rank", "4"], ["--modules", "q_proj"], ["--epochs", "2"], []):
        resume: list[Any] = ["--resume"] if options else []
        assert train(tmp_path / "lora", "--epochs", "1", *options, *resume) == 2
        assert "begun with" in (error := capsys.readouterr().err) or "go on with" in error
