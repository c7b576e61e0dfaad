"""What was learned of a target's texts outlives the process, unless it is not to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, Engine, OnnxModel, SessionConfig, open_target_folder
from edgedraft.runtime.drafting import open_proposer, seed_name
from edgedraft.runtime.learned_ngrams import LearnedNgrams
from edgedraft.runtime.policy import DraftPolicy
from edgedraft.runtime.tokenizer_file import TokenIds
from graphs import byte_level_tokenizer
from toy_vocabularies import byte_level

TEXT, OTHER, THIRD = np.random.default_rng(0).integers(1, 200, size=(3, 80)).tolist()
ONE_THREAD = SessionConfig(threads=1)


def knows(ngrams: LearnedNgrams, text: list[int] = TEXT) -> bool:
    """Whether a text that was read before is continued as it went on then."""
    return ngrams.propose(text[:40], 4).tokens[:2] == tuple(text[40:42])


def read(ngrams: LearnedNgrams, text: list[int] = TEXT) -> LearnedNgrams:
    for _ in range(3):
        ngrams.propose(text, 0)
        ngrams.propose([7], 0)
    return ngrams


def test_a_kept_model_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    read(LearnedNgrams("a", kept=path)).save()
    assert knows(LearnedNgrams("a", kept=path))
    assert not knows(LearnedNgrams("a"))


def test_a_model_of_other_ids_or_a_damaged_one_is_left_alone_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ngrams.bin"
    read(LearnedNgrams("a", kept=path)).save()
    assert not knows(LearnedNgrams("b", kept=path))
    path.write_bytes(path.read_bytes()[:-9])
    assert not knows(LearnedNgrams("a", kept=path))
    assert len(caplog.records) == 2


def test_programs_beside_each_other_add_to_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    read(LearnedNgrams("a", kept=path)).save()
    one, other = (LearnedNgrams("a", kept=path) for _ in range(2))
    read(one, OTHER).save()
    read(other, THIRD).save()
    one.save()
    for ngrams in (one, other, LearnedNgrams("a", kept=path)):
        assert all(knows(ngrams, text) for text in (TEXT, THIRD))
    assert knows(other, OTHER) and knows(LearnedNgrams("a", kept=path), OTHER)


def test_what_was_erased_meanwhile_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.bin"
    ngrams = read(LearnedNgrams("a", kept=path))
    ngrams.save()
    path.unlink()
    ngrams.save()
    assert not knows(LearnedNgrams("a", kept=path))
    read(ngrams, OTHER).save()
    assert knows(LearnedNgrams("a", kept=path), OTHER)
    assert not knows(LearnedNgrams("a", kept=path))


def test_what_the_device_learned_comes_before_the_seed(tmp_path: Path) -> None:
    seed, kept = tmp_path / "seed.bin", tmp_path / "kept.bin"
    read(LearnedNgrams("a", kept=seed)).save()
    assert knows(LearnedNgrams("a", seed=seed))
    assert knows(LearnedNgrams("a", seed=seed, kept=kept))
    LearnedNgrams("a", kept=kept).save()
    assert not knows(LearnedNgrams("a", seed=seed, kept=kept))


def test_forgetting_leads_back_to_the_seed(tmp_path: Path) -> None:
    seed = tmp_path / "seed.bin"
    read(LearnedNgrams("a", kept=seed)).save()
    ngrams = read(LearnedNgrams("a", seed=seed), OTHER)
    ngrams.forget()
    assert knows(ngrams)
    assert not knows(ngrams, OTHER)


def test_names_of_ids_make_the_fingerprint() -> None:
    assert TokenIds(byte_level(300)).fingerprint == TokenIds(byte_level(300)).fingerprint
    assert TokenIds(byte_level(300)).fingerprint != TokenIds(byte_level(280)).fingerprint


def test_an_engine_keeps_what_it_learned_only_where_it_may(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config = DecodeConfig(max_tokens=30, ignore_eos=True)
    for keep in (False, True):
        engine = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path, keep=keep)
        engine.generate("the", config)
        engine.save()
        assert len(list(tmp_path.rglob("ngrams.bin"))) == keep


def test_a_device_that_refuses_is_warned_of_once(
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine.open(tiny_folder(), session=ONE_THREAD, state_dir=tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("edgedraft.runtime.table_file.write_atomic", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.generate("the", DecodeConfig(max_tokens=4))
            engine.save()
    assert len(caplog.records) == 1


def test_a_drafters_folder_brings_the_seed_of_its_targets(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    target = OnnxModel(open_target_folder(tiny_folder()), ONE_THREAD)
    ids = TokenIds(byte_level_tokenizer())
    name = seed_name(ids.fingerprint)
    folder = tmp_path / "drafter"
    folder.mkdir()
    for path in tiny_folder().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    read(LearnedNgrams(ids.fingerprint, kept=folder / name)).save()
    proposer = open_proposer(["ngram", folder], target, ids, DraftPolicy())
    (ngrams,) = proposer._free  # type: ignore[attr-defined]
    assert knows(ngrams)
    named = open_proposer([f"ngram={folder / name}"], target, ids, DraftPolicy())
    assert isinstance(named, LearnedNgrams) and knows(named)
