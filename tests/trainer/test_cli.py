"""From texts to a measured drafter with three commands; what is wrong is said in one line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgedraft.trainer import cli
from edgedraft.trainer.cli import main
from toy_vocabularies import TEXT

SIZES = ["--layers", "1", "--hidden", "16", "--heads", "2", "--mlp", "24"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    assert main(["tokenizer", str(text), "--vocab-size", "300", "--out", str(tmp_path / "t")]) == 0
    return tmp_path / "t"


def test_a_drafter_is_trained_and_measures_what_its_record_says(
    tokenizer: Path,
    answers_file: Path,
    target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
    pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')
    out, answers = tmp_path / "drafter", f"{answers_file}:{target_folder}"
    options = ["drafter", "--tokenizer", str(tokenizer), "--text", str(tmp_path / "text.txt")]
    options += ["--answers", answers, "--out", str(out), "--epochs", "2", *SIZES]
    assert main(options) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {
        file.name for file in out.iterdir()
    }
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    record = json.loads((out / "training.json").read_text())
    data = record["provenance"]["data_sha256"]
    assert sorted(Path(name).name for name in data) == [
        "answers.jsonl",
        "text.txt",
        "tokenizer.json",
        "tokenizer.json",
    ]
    assert record["provenance"]["seed"] == 0

    capsys.readouterr()
    assert main(["evaluate", str(out), "--answers", answers]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (tau,) = (row[2] for row in rows if row[0] == "all")
    assert tau == f"{record['held_out']['all']['tau']:.3f}"
    held_out = record["held_out"]["all"]["tokens"]
    assert main(["evaluate", str(out), "--every", "--answers", answers]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (tokens,) = (int(row[1]) for row in rows if row[0] == "all")
    assert tokens > held_out

    assert main(options) == 2
    assert "go on with --resume" in capsys.readouterr().err
    weights = (out / "model.safetensors").read_bytes()
    assert main([*options, "--resume"]) == 0
    assert (out / "model.safetensors").read_bytes() == weights, "there was nothing left to do"

    further = ["drafter", "--tokenizer", str(out), "--start", str(out), "--answers", answers]
    assert main([*further, "--out", str(tmp_path / "further"), "--epochs", "2"]) == 0
    assert json.loads((tmp_path / "further/config.json").read_text())["num_hidden_layers"] == 1
    after = json.loads((tmp_path / "further/training.json").read_text())["held_out"]["all"]
    assert after["tau"] > record["held_out"]["all"]["tau"]
    text, other = str(tmp_path / "text.txt"), str(tmp_path / "other")
    assert main(["tokenizer", text, "--vocab-size", "290", "--out", other]) == 0
    capsys.readouterr()
    assert main([*further, "--tokenizer", other, "--out", str(tmp_path / "o")]) == 2
    assert "drafts in another vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tokenizer", "missing.txt", "--out", "o"], "missing.txt: cannot be read"),
        (["tokenizer", "gsm8k_test.jsonl", "--out", "o"], "test rows"),
        (["tokenizer", "text.txt", "--out", "text.txt/t"], "edgedraft-train: [Errno "),
        (["drafter", "--tokenizer", "nowhere", "--out", "o"], "no readable tokenizer.json"),
        (
            ["drafter", "--tokenizer", "t", "--out", "o", "--heads", "5"],
            "hidden must be a multiple",
        ),
        (
            ["drafter", "--tokenizer", "t", "--out", "o", "--epochs", "0"],
            "epochs must be > 0, got 0",
        ),
        (["drafter", "--tokenizer", "t", "--out", "o", "--answers", "a"], "FILE:TARGET_FOLDER"),
        (["drafter", "--tokenizer", "t", "--out", "o", "--resume"], "nothing to resume"),
        (["drafter", "--tokenizer", "t", "--out", "o"], "nothing to train on"),
        (["evaluate", "nowhere", "--answers", "a:b"], "nowhere: no readable drafter"),
    ],
)
def test_an_error_is_one_line(
    options: list[str],
    message: str,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if options[0] != "tokenizer":
        pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
        pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(options) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_ctrl_c_ends_with_130_and_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_tokenizer", interrupted)
    assert main(["tokenizer", "text.txt", "--out", "t"]) == 130
    assert capsys.readouterr().err == "\n"


def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert main(["evaluate", "d", "--answers", "a:b"]) == 2
    assert 'needs torch: pip install "edgedraft[train]"' in capsys.readouterr().err


def test_without_a_teacher_a_distribution_loss_is_refused(
    tokenizer: Path,
    answers_file: Path,
    target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
    pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')
    options = ["drafter", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "d"), *SIZES]
    options += ["--answers", f"{answers_file}:{target_folder}", "--loss", "lk"]
    assert main(options) == 2
    assert "--loss lk needs answers with top_k_ids" in capsys.readouterr().err


def test_top_k_logits_teach(
    tokenizer: Path,
    target_folder: Path,
    tmp_path: Path,
    write_rows: Callable[..., Path],
    answer_row: Callable[[int], dict[str, list[int]]],
) -> None:
    pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
    pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')
    rows = []
    for number in range(20):
        row = answer_row(number)
        ids = [[token, 5] for token in row["response_ids"]]
        rows.append(row | {"top_k_ids": ids, "top_k_logits": [[2.0, 0.0] for _ in ids]})
    file = write_rows("taught.jsonl", *rows)
    options = ["drafter", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "d"), *SIZES]
    options += ["--answers", f"{file}:{target_folder}", "--loss", "lk", "--epochs", "1"]
    assert main(options) == 0
