"""A drafter with an adapter in its weights is the drafter that such weights would have given."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from edgedraft.runtime import Engine, FolderError, ModelFolder, SessionConfig
from edgedraft.runtime.adapter_store import open_adapter_store
from edgedraft.runtime.composite import CompositeProposer
from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.folder import open_model_folder, open_target_folder
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.merged_drafter import merged_initializers, open_drafter
from edgedraft.runtime.onnx_model import OnnxModel
from edgedraft.runtime.policy import DraftPolicy
from edgedraft.runtime.state import DeviceState
from edgedraft.runtime.tokenizer_file import TokenIds, load_tokenizer
from edgedraft.runtime.training_files import find_training_files, open_training_files
from graphs import tiny_target
from tiny_drafter import tiny_drafter, tiny_lora

ONE_THREAD = SessionConfig(threads=1)
TEXT = [5, 60, 7, 200, 31, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return open_model_folder(tiny_drafter(tmp_path_factory.mktemp("drafter") / "tiny"))


def logits(model: OnnxModel) -> FloatArray:
    model.rollback(0)
    return model.forward(TEXT).copy()


def opened(folder: ModelFolder, lora: Lora | None = None) -> OnnxModel:
    return open_drafter(folder, ONE_THREAD, lora=lora)


def drafts(target: ModelFolder, folder: ModelFolder, state: Path, *, keep: bool) -> DraftModel:
    """Return what drafts in an engine that was opened anew."""
    engine = Engine.open(
        target, drafters=[folder.path], session=ONE_THREAD, state_dir=state, keep=keep
    )
    assert isinstance(engine.proposer, CompositeProposer)
    model = engine.proposer.drafter
    assert isinstance(model, DraftModel)
    model._policy = DraftPolicy()  # how much is drafted is not to depend on the clock
    return model


def test_an_adapter_that_has_learned_nothing_gives_the_shipped_drafter_to_the_bit(
    folder: ModelFolder,
) -> None:
    shapes = open_training_files(folder).shapes
    nothing = Lora.initial(shapes, 4, 8.0, np.random.default_rng(0))
    assert np.array_equal(logits(opened(folder, nothing)), logits(opened(folder)))


def test_a_merged_drafter_is_one_exported_with_those_weights(
    folder: ModelFolder, tmp_path: Path
) -> None:
    files = open_training_files(folder)
    lora = tiny_lora(files.shapes)
    weights = {x: lora.merged(files.tensors[name], x) for x, name in files.modules.items()}
    retrained = open_model_folder(tiny_drafter(tmp_path / "retrained", weights))
    merged = logits(opened(folder, lora))
    assert np.array_equal(merged, logits(opened(retrained)))
    assert np.abs(merged - logits(opened(folder))).max() > 1


def test_only_what_an_adapter_changes_is_made_anew(folder: ModelFolder) -> None:
    files = open_training_files(folder)
    for name, modules in list(files.merge.items())[:3]:
        lora = tiny_lora({modules[1]: files.shapes[modules[1]]})
        initializers = merged_initializers(files, lora)
        assert set(initializers) == {name, f"{name}.scales"}
        half = initializers[name].shape[1] // 2
        as_shipped = merged_initializers(files, tiny_lora({modules[0]: files.shapes[modules[0]]}))
        assert not np.array_equal(initializers[name][:, half:], as_shipped[name][:, half:])


def test_a_model_keeps_the_arrays_that_its_session_looks_into(folder: ModelFolder) -> None:
    files = open_training_files(folder)
    arrays = merged_initializers(files, tiny_lora(files.shapes))
    alive = [weakref.ref(array) for array in arrays.values()]
    model = OnnxModel(folder, ONE_THREAD, initializers=arrays)
    before = logits(model)
    del arrays
    gc.collect()
    assert all(ref() is not None for ref in alive)
    assert np.array_equal(logits(model), before)
    del model
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_drafter_without_its_weights_cannot_learn_but_drafts(tmp_path: Path) -> None:
    folder = open_model_folder(tiny_target(tmp_path / "target"))
    assert find_training_files(folder) is None
    with pytest.raises(FolderError, match="cannot learn.*edgedraft-export drafter"):
        open_training_files(folder)
    logits(opened(folder))


def test_an_engine_drafts_with_what_was_learned_for_its_target_unless_it_keeps_nothing(
    folder: ModelFolder, tmp_path: Path
) -> None:
    target = open_target_folder(tiny_target(tmp_path / "target", seed=0))
    state = DeviceState(tmp_path / "state", target.fingerprint)
    store = open_adapter_store(state.folder, folder, TokenIds(load_tokenizer(target.tokenizer)))
    lora = tiny_lora(open_training_files(folder).shapes)

    def drafter(keep: bool = True) -> FloatArray:
        model = drafts(target, folder, tmp_path / "state", keep=keep)._model
        assert isinstance(model, OnnxModel)
        return logits(model)

    shipped, learned = logits(opened(folder)), logits(opened(folder, lora))
    assert np.array_equal(drafter(), shipped)
    store.add(lora)
    assert np.array_equal(drafter(), learned)
    assert np.array_equal(drafter(keep=False), shipped)
    store.rollback()
    assert np.array_equal(drafter(), shipped)


def test_a_drafter_that_was_swapped_in_drafts_as_if_it_had_been_there(
    folder: ModelFolder, tmp_path: Path
) -> None:
    target = open_target_folder(tiny_target(tmp_path / "target"))
    lora = tiny_lora(open_training_files(folder).shapes)
    old, new = (drafts(target, folder, tmp_path / "state", keep=False) for _ in range(2))
    new.use(opened(folder, lora))
    text = np.random.default_rng(0).integers(0, 200, 60).tolist()
    as_shipped = [old.propose(text[:n], 4).tokens for n in range(40, 60)]
    learned = [new.propose(text[:n], 4).tokens for n in range(40, 60)]
    assert learned != as_shipped
    old.use(opened(folder, lora))
    assert [old.propose(text[:n], 4).tokens for n in range(59, 39, -1)] == learned[::-1]
