"""`edgedraft adapter` and `edgedraft state`: what was learned is seen, chosen, moved, erased."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from edgedraft.runtime import DecodeConfig, Engine, SessionConfig, open_target_folder
from edgedraft.runtime.adapter_store import AdapterStore, open_adapter_store
from edgedraft.runtime.cli import main
from edgedraft.runtime.folder import open_model_folder
from edgedraft.runtime.state import DeviceState
from edgedraft.runtime.tokenizer_file import TokenIds, load_tokenizer
from edgedraft.runtime.training_files import open_training_files
from graphs import tiny_target
from tiny_drafter import tiny_drafter, tiny_lora

SECRET = "the quick brown fox "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a target's folder and a drafter's."""
    folder = tmp_path_factory.mktemp("pair")
    return tiny_target(folder / "target"), tiny_drafter(folder / "drafter")


@pytest.fixture
def store(pair: tuple[Path, Path]) -> AdapterStore:
    """Return the store that the command uses, with two generations."""
    target, drafter = open_target_folder(pair[0]), open_model_folder(pair[1])
    state = DeviceState(Path(os.environ["EDGEDRAFT_STATE"]), target.fingerprint)
    store = open_adapter_store(state.folder, drafter, TokenIds(load_tokenizer(target.tokenizer)))
    shapes = open_training_files(drafter).shapes
    for seed in (1, 2):
        store.add(tiny_lora(shapes, seed=seed))
    return store


@pytest.fixture
def run(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return what runs `edgedraft adapter` and returns its status and all it said."""

    def run(*arguments: str) -> tuple[int, str]:
        pair_options = ["--target", str(pair[0]), "--drafter", str(pair[1])]
        status = main(["adapter", arguments[0], *pair_options, *arguments[1:]])
        out, err = capsys.readouterr()
        return status, out + err

    return run


def starred(table: str) -> str:
    (line,) = [line for line in table.splitlines() if line.startswith("*")]
    return line


def test_the_table_marks_the_active_generation(
    store: AdapterStore, run: Callable[..., tuple[int, str]]
) -> None:
    status, table = run("list")
    assert status == 0
    assert len(table.splitlines()) == 4
    assert starred(table).split()[1:4] == ["2", "4", str(store.records()[1].num_modules)]
    for command, said, marked in (
        (["use", "1"], "in use: generation 1", "1"),
        (["rollback"], "in use: generation 2", "2"),
        (["use", "none"], "in use: the drafter as it was shipped", "none"),
    ):
        assert run(*command) == (0, said + "\n")
        assert starred(run("list")[1]).split()[1] == marked


def test_an_adapter_goes_out_and_comes_back_under_a_name(
    store: AdapterStore, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    status, said = run("export", str(tmp_path / "maths"), "--adapter", "1")
    assert (status, said) == (0, f"written to {tmp_path / 'maths.onnx_adapter'}\n")
    assert run("import", str(tmp_path / "maths.onnx_adapter")) == (
        0,
        "in use: generation 3 (maths)\n",
    )
    assert run("import", str(tmp_path / "maths.json"), "--name", "sums")[1].endswith("(sums)\n")
    assert "maths" in run("list")[1]


def test_a_wish_that_cannot_be_granted_is_one_line_and_changes_nothing(
    store: AdapterStore,
    run: Callable[..., tuple[int, str]],
    tmp_path: Path,
    pair: tuple[Path, Path],
) -> None:
    for command, expected in (
        (["use", "code"], "no adapter 'code' here; there are none, 1, 2"),
        (["import", str(tmp_path / "x")], "cannot be read"),
        (["use", "1", "--drafter", str(pair[0])], "this drafter cannot learn"),
        (["use"], "required: WHICH"),
    ):
        status, said = run(*command)
        assert status == 2
        assert expected in said and said.count("\n") == 1
    assert starred(run("list")[1]).split()[1] == "2"


def test_an_unusable_generation_says_why_in_the_table(
    store: AdapterStore, run: Callable[..., tuple[int, str]]
) -> None:
    path = store._path(1)
    path.write_bytes(path.read_bytes()[:-1])
    assert "unusable: " in run("list")[1].splitlines()[2]


def test_forgetting_leaves_only_what_passes_cost(
    pair: tuple[Path, Path], store: AdapterStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """No fragment of a text, nor its token ids, remains in any file."""
    target, drafter = pair
    engine = Engine.open(target, drafters=["ngram", drafter], session=SessionConfig(threads=1))
    engine.generate(SECRET * 5, DecodeConfig(max_tokens=12, ignore_eos=True))
    engine.save()
    folder = store._folder.parents[1]
    for litter in ("plans.damaged", ".ngrams.bin.abc", "adapters/.x/y", "buffer.bin"):
        (folder / litter).parent.mkdir(exist_ok=True)
        (folder / litter).write_text(SECRET)
    assert main(["state", "show", "--target", str(target)]) == 0
    shown = capsys.readouterr().out
    for name in ("ngrams.bin", "spellings-", "/2.onnx_adapter", "buffer.bin", "plans.json"):
        assert name in shown
    assert main(["state", "forget", "--target", str(target)]) == 0
    assert "nothing that was learned is left" in capsys.readouterr().out
    assert [x.name for x in folder.rglob("*")] == ["plans.json"]
    assert main(["state", "forget", "--target", str(target)]) == 0


def test_state_is_copied_to_one_file(
    pair: tuple[Path, Path],
    store: AdapterStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "state.tar"
    assert main(["state", "export", str(out), "--target", str(pair[0])]) == 0
    folder = store._folder.parents[1]
    paths = [path for path in folder.rglob("*") if path.is_file()]
    with tarfile.open(out) as archive:
        assert len(archive.getnames()) == len(paths) == 5
        for path in paths:
            member = archive.extractfile(path.relative_to(folder.parent).as_posix())
            assert member is not None and member.read() == path.read_bytes()
    assert main(["state", "export", str(out), "--target", str(pair[0])]) == 2
    assert "is there already" in capsys.readouterr().err
