"""A folder is checked when it is opened: every complaint is one line that says what to do."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import EdgeDraftError, Engine, FolderError, SessionConfig, open_target_folder
from edgedraft.runtime.folder import check_files
from graphs import byte_level_tokenizer, file_entry, tiny_target, write_target_folder

ONE_THREAD = SessionConfig(threads=1)


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Callable[..., Path]) -> Path:
    """Return a good folder that a test may spoil."""
    return Path(shutil.copytree(tiny_folder(), tmp_path / "target"))


def refusal(path: Path) -> str:
    """Return the message with which a folder is refused."""
    with pytest.raises(FolderError) as caught:
        open_target_folder(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.update(changes)
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v is not ...}))


def test_a_good_folder_says_what_the_manifest_says(folder: Path) -> None:
    target = open_target_folder(folder)
    assert target.name == "tiny"
    assert target.vocab_size == 290
    assert target.context_length == 512
    assert target.eos_token_ids == (289,)
    assert target.bos_token_id == 287
    assert target.exporter == "edgedraft"
    assert target.chat_template is not None and "<|im_start|>" in target.chat_template
    check_files(target)
    assert open_target_folder(str(folder)) == target


def test_unknown_keys_of_a_newer_exporter_are_ignored(folder: Path) -> None:
    edit(folder, colour="green", nested={"a": [1]})
    open_target_folder(folder)


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    a = open_target_folder(tiny_target(tmp_path / "a")).fingerprint
    assert open_target_folder(tiny_target(tmp_path / "b")).fingerprint == a
    assert open_target_folder(tiny_target(tmp_path / "c", seed=1)).fingerprint != a
    for contract in ("genai", "concat"):
        x = open_target_folder(tiny_target(tmp_path / f"{contract}1", contract=contract))
        y = open_target_folder(tiny_target(tmp_path / f"{contract}2", contract=contract, seed=1))
        assert x.fingerprint != y.fingerprint


def test_a_missing_folder_is_told_how_to_make_one(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert "no such folder; make one with: edgedraft-export target smollm2 --out" in message
    assert "no such folder" in refusal(tmp_path / "a\0b")
    (tmp_path / "file").write_text("x")
    assert "no such folder" in refusal(tmp_path / "file")


def test_an_empty_folder_is_told_what_is_expected(tmp_path: Path) -> None:
    assert "neither manifest.json nor config.json nor genai_config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "edgedraft-else"}, "a folder of format 'edgedraft-else', expected"),
        ({"format": ...}, "'format' is None; export the folder again"),
        ({"format_version": 2}, "format version 2, this EdgeDraft reads up to 1; update EdgeDraft"),
        ({"format_version": 0}, "'format_version' must be >= 1, got 0"),
        ({"format_version": True}, "'format_version' is True; export the folder again"),
        ({"format_version": "1"}, "'format_version' is '1'; export the folder again"),
        ({"vocab_size": 0}, "'vocab_size' must be >= 1, got 0"),
        ({"vocab_size": 3.5}, "'vocab_size' is 3.5"),
        ({"context_length": -4}, "'context_length' must be >= 1, got -4"),
        ({"eos_token_ids": 2}, "'eos_token_ids' is 2"),
        ({"eos_token_ids": [2, "3"]}, "'eos_token_ids' must list ids in [0, 290), got [2, '3']"),
        ({"eos_token_ids": [-2]}, "'eos_token_ids' must list ids in [0, 290), got [-2]"),
        ({"eos_token_ids": [290]}, "'eos_token_ids' must list ids in [0, 290), got [290]"),
        ({"bos_token_id": "<s>"}, "'bos_token_id' is '<s>'"),
        ({"bos_token_id": -1}, "'bos_token_id' must be in [0, 290), got -1"),
        ({"bos_token_id": 2**70}, "'bos_token_id' must be in [0, 290), got"),
        ({"graph": "other.onnx"}, "'graph' names 'other.onnx', which 'files' does not list"),
        ({"graph": None}, "'graph' is None"),
        ({"tokenizer": "x"}, "'tokenizer' names 'x', which 'files' does not list"),
        ({"chat_template": "y"}, "'chat_template' names 'y', which 'files' does not list"),
        ({"files": []}, r"'files' is []"),
        ({"name": 5}, "'name' is 5"),
        ({"precision": None}, "'precision' is None"),
        ({"quality": "good"}, "'quality' is 'good'"),
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_used_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit(folder, **changes)
    assert message in refusal(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a" * 300])
def test_a_manifest_cannot_name_files_elsewhere(folder: Path, name: str) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit(folder, files={**files, name: {"bytes": 1, "sha256": "0"}})
    refusal(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[" * 200_000, "cannot be read as JSON"),
        (b"[1]", "holds a list, expected an object"),
        (b"null", "holds a NoneType, expected an object"),
        (b"9" * 10_000, "cannot be read as JSON"),
    ],
    ids=["empty", "cut", "binary", "deep", "list", "null", "huge number"],
)
def test_a_manifest_that_is_no_json_object_is_refused(
    folder: Path, content: bytes, message: str
) -> None:
    (folder / "manifest.json").write_bytes(content)
    assert message in refusal(folder)


@pytest.mark.parametrize("name", ["decoder.onnx", "tokenizer.json", "chat_template.jinja"])
def test_a_file_that_differs_from_the_manifest_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes(flipped)
    assert "its checksum differs from the manifest's; copy or export it again" in refusal(folder)
    path.write_bytes(content[:-1])
    assert f"{len(content) - 1} bytes, the manifest says {len(content)}" in refusal(folder)
    path.write_bytes(b"")
    assert f"0 bytes, the manifest says {len(content)}" in refusal(folder)
    path.unlink()
    assert "missing, but the manifest lists it" in refusal(folder)
    path.mkdir()
    refusal(folder)


@pytest.mark.parametrize("entry", [5, {}, {"bytes": "9"}, {"bytes": 9}])
def test_a_manifest_entry_without_size_or_checksum_is_refused(folder: Path, entry: object) -> None:
    (folder / "extra").write_bytes(b"123456789")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit(folder, files={**files, "extra": entry})
    refusal(folder)


def test_large_files_are_compared_in_full_when_asked(folder: Path) -> None:
    path = folder / "weights.data"
    content = bytearray(9 * 1024 * 1024)
    path.write_bytes(content)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit(folder, files={**files, path.name: file_entry(path)})
    content[5] = 1
    path.write_bytes(content)
    target = open_target_folder(folder)  # by size
    with pytest.raises(FolderError, match="checksum differs"):
        check_files(target)


def test_a_template_that_is_no_text_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_bytes(b"\xff\xfe")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit(folder, files={**files, path.name: file_entry(path)})
    assert "not UTF-8" in refusal(folder)
    stock = tiny_target(tmp_path / "stock", contract="concat")
    (stock / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(stock)


def test_a_tokenizer_with_more_tokens_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["extra-one", "extra-two"])
    folder = write_target_folder(
        tmp_path / "t", tokenizer=tokenizer, vocab_size=290, context_length=64
    )
    with pytest.raises(FolderError, match="the tokenizer has 292 tokens"):
        Engine.open(folder, session=ONE_THREAD)


def test_logits_narrower_than_the_vocabulary_are_refused(
    tmp_path: Path, tiny_folder: Callable[..., Path]
) -> None:
    graph = (tiny_folder(vocab_size=100) / "decoder.onnx").read_bytes()
    folder = write_target_folder(tmp_path / "t", graph=graph)
    with pytest.raises(FolderError, match="logits have 100 columns, the tokenizer has 290 tokens"):
        Engine.open(folder, session=ONE_THREAD)


def stock(tmp_path: Path, contract: str = "concat") -> Path:
    return tiny_target(tmp_path / contract, contract=contract)


def test_stock_folders_give_what_their_configurations_say(tmp_path: Path) -> None:
    genai = open_target_folder(stock(tmp_path, "genai"))
    assert (genai.exporter, genai.context_length, genai.head_dim) == ("onnxruntime-genai", 512, 16)
    assert (genai.eos_token_ids, genai.bos_token_id) == ((289,), 287)
    optimum = open_target_folder(stock(tmp_path, "concat"))
    assert (optimum.exporter, optimum.context_length) == ("optimum", 512)
    assert (optimum.eos_token_ids, optimum.bos_token_id) == ((289,), None)
    assert optimum.chat_template is not None
    by_graph = open_target_folder(tmp_path / "concat" / "model.onnx")
    assert by_graph == optimum


def test_a_stock_folder_may_keep_its_graphs_below(tmp_path: Path) -> None:
    folder = stock(tmp_path)
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model_int8.onnx")
    assert "name one of its graphs instead: onnx/model_int8.onnx" in refusal(folder)
    target = open_target_folder(folder / "onnx" / "model_int8.onnx")
    assert target.path == folder
    (folder / "onnx" / "model_int8.onnx").rename(folder / "onnx" / "model.onnx")
    assert open_target_folder(folder).graph == folder / "onnx" / "model.onnx"


def test_several_end_tokens_are_collected_from_every_configuration(tmp_path: Path) -> None:
    folder = stock(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 289], "bos_token_id": 1}')
    target = open_target_folder(folder)
    assert target.eos_token_ids == (5, 289)
    assert target.bos_token_id == 1


def test_a_chat_template_is_found_where_exporters_put_it(tmp_path: Path) -> None:
    folder = stock(tmp_path)
    config = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert open_target_folder(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert open_target_folder(folder).chat_template == "J"
    (folder / "chat_template.jinja").unlink()
    config.write_text('{"chat_template": [3, null, {"x": 1}]}')
    assert open_target_folder(folder).chat_template is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", '{"a": 1}', "the context length is None; config.json must give"),
        ("config.json", "{}", "neither manifest.json nor config.json nor genai_config.json"),
        ("config.json", '{"max_position_embeddings": "9"}', "the context length is '9'"),
        ("config.json", '{"max_position_embeddings": 1}', "the context length is 1"),
        ("config.json", '{"max_position_embeddings": true}', "the context length is True"),
        ("tokenizer_config.json", "[]", "holds a list, expected an object"),
        ("tokenizer.json", None, "missing; save the model's fast tokenizer there"),
        ("model.onnx", None, "it holds no .onnx file"),
        ("genai_config.json", '{"model": {"decoder": {"filename": "g.onnx"}}}', "no g.onnx; name"),
        ("genai_config.json", '{"model": 3}', None),
        ("genai_config.json", '{"model": {"decoder": [1]}}', None),
    ],
)
def test_a_stock_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str | None
) -> None:
    folder = stock(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    if message is None:
        open_target_folder(folder)  # config.json says enough
    else:
        assert message in refusal(folder)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"version": "1.0", "model": {"type": "BPE"}}', "\0"]
)
def test_a_tokenizer_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    folder = stock(tmp_path)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(FolderError, match="not a tokenizer file") as caught:
        Engine.open(folder, session=ONE_THREAD)
    assert "\n" not in str(caught.value)


def test_a_broken_stock_folder_is_one_error_whatever_broke(tmp_path: Path) -> None:
    """Configurations and tokenizers with bytes flipped, cut and values exchanged."""
    rng = random.Random(0)
    good = stock(tmp_path, "genai")
    names = ("genai_config.json", "tokenizer_config.json", "tokenizer.json")
    contents = {name: (good / name).read_bytes() for name in names}
    outcomes = {"opened": 0, "refused": 0}
    for _ in range(250):
        name = rng.choice(names)
        (good / name).write_bytes(spoil(contents[name], rng))
        outcomes[attempt(good)] += 1
        (good / name).write_bytes(contents[name])
    assert outcomes["refused"] > 50


def test_a_broken_manifest_is_one_error_whatever_broke(folder: Path) -> None:
    rng = random.Random(1)
    path = folder / "manifest.json"
    content = path.read_bytes()
    values: list[Any] = [None, True, -1, 0, 10**400, 2**70, 1.5, "", "\ud800", "x" * 9000]
    values += [[], {}, [[]], {"": 0}, [None], "../..", "manifest.json", float("nan")]
    for i in range(300):
        if i % 2:
            path.write_bytes(spoil(content, rng))
        else:
            manifest = json.loads(content)
            place: Any = manifest
            if rng.random() < 0.4:
                place = manifest["files"]
                if rng.random() < 0.7:
                    place = place[rng.choice(list(place))]
            place[rng.choice([*place, "new"])] = rng.choice(values)
            path.write_text(json.dumps(manifest))
        attempt(folder)


def spoil(content: bytes, rng: random.Random) -> bytes:
    """Return a damaged copy: cut, emptied, bits flipped, pieces repeated or numbers exchanged."""
    kind = rng.randrange(6)
    at = rng.randrange(len(content))
    if kind == 0:
        return content[:at]
    if kind == 1:
        return bytes(len(content))
    if kind == 2:
        return content[:at] + content[at // 2 : at] + content[at:]
    if kind == 3:
        number = rng.choice([b"-1", b"99999999999999999999", b"0", b"null", b"1e9", b'"x"', b"[]"])
        digits = [i for i, c in enumerate(content) if chr(c).isdigit()]
        at = rng.choice(digits) if digits else at
        return content[:at] + number + content[at + 1 :]
    spoilt = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 20])):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def attempt(folder: Path) -> str:
    """Open a folder and its tokenizer and encode with them; anything but our own error fails."""
    from edgedraft.runtime.chat_template import render_chat
    from edgedraft.runtime.tokenizer_file import load_tokenizer

    try:
        target = open_target_folder(folder)
        tokenizer = load_tokenizer(target.tokenizer)
        tokenizer.encode("the thing").ids  # noqa: B018
        if target.chat_template:
            render_chat(target.chat_template, [{"role": "user", "content": "hi"}])
    except EdgeDraftError as error:
        assert "\n" not in str(error)
        return "refused"
    return "opened"


_GRAPH_FUZZER = """
import random, sys
from pathlib import Path
from edgedraft.runtime import EdgeDraftError, OnnxModel, SessionConfig, open_target_folder
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/runtime"]
from test_folder import spoil

folder, first, last = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
graph = folder / "model.onnx"
pristine = folder / "pristine"
if not pristine.exists():
    graph.rename(pristine)
content = pristine.read_bytes()
graph.write_bytes(content)
target = open_target_folder(folder)
for seed in range(first, last):
    print(seed, flush=True)
    graph.write_bytes(spoil(content, random.Random(seed)))
    try:
        model = OnnxModel(target, SessionConfig(threads=1), tokenizer_size=40)
    except EdgeDraftError as error:
        assert chr(10) not in str(error), error
        continue
    try:
        model.extend([1, 2, 3])
        model.forward([4, 5])
    except EdgeDraftError:
        pass
print("done")
"""


@pytest.mark.parametrize("contract", ["genai", "concat"])
def test_a_broken_graph_is_one_error_whatever_broke(tmp_path: Path, contract: str) -> None:
    """In a process of its own, since onnxruntime may abort on a hostile graph."""
    folder = tiny_target(
        tmp_path / "t", contract=contract, vocab_size=40, heads=2, kv_heads=1, max_positions=64
    )
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", _GRAPH_FUZZER, str(folder), tests, "0", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seed = done.stdout.split()[-1] if done.stdout else None
    assert done.returncode == 0 and seed == "done", (seed, done.stderr[-2000:])
