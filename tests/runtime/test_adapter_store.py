"""Generations of adapters: one is active, older ones are kept, and no kill or damage loses both."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from damage import MUTATIONS
from edgedraft.runtime import AdapterError, StateError
from edgedraft.runtime.adapter_file import AdapterBase
from edgedraft.runtime.adapter_store import AdapterStore
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.state import save_json

BASE = AdapterBase("a" * 64, "b" * 64, "c" * 64, {"lm_head": (6, 4)})
OTHER = AdapterBase("f" * 64, "b" * 64, "c" * 64, {"lm_head": (6, 4)})
KILLS = int(os.environ.get("EDGEDRAFT_TEST_KILLS", 40))


def lora(number: float) -> Lora:
    """Return one that can be told from others by its number."""
    tensors = {"lm_head.lora_A": np.full((2, 4), number), "lm_head.lora_B": np.zeros((6, 2))}
    return Lora(2, 4.0, {name: x.astype(np.float32) for name, x in tensors.items()})


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "adapters" / "one", BASE)


def active(store: AdapterStore) -> float | None:
    """Return the number of the active adapter, None where the drafter is as shipped."""
    adapter = store.active()
    return float(adapter.lora.tensors["lm_head.lora_A"][0, 0]) if adapter else None


def files(folder: Path) -> list[str]:
    return sorted(x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file())


def test_a_new_store_has_the_drafter_as_shipped_and_writes_nothing(
    store: AdapterStore, tmp_path: Path
) -> None:
    assert store.active() is None
    assert store.records() == []
    assert files(tmp_path) == []


def test_what_was_added_last_is_active_also_for_the_next_process(store: AdapterStore) -> None:
    for number in (1, 2):
        assert store.add(lora(number), provenance={"rounds": number}) == number
        for opened in (store, AdapterStore(store._folder, BASE)):
            assert active(opened) == number
            adapter = opened.active()
            assert adapter is not None
            assert (adapter.generation, adapter.provenance) == (number, {"rounds": number})


def test_rolling_back_goes_the_way_that_was_come(store: AdapterStore) -> None:
    store.add(lora(1))
    store.add(lora(2))
    assert store.rollback() == 1
    assert active(store) == 1
    assert store.add(lora(3)) == 3  # a number is not given twice
    assert store.rollback() == 1  # what was rolled back is not on the way
    assert store.rollback() is None
    assert active(store) is None
    with pytest.raises(AdapterError, match="nothing to roll back: the drafter is as it was"):
        store.rollback()


def test_a_generation_is_chosen_by_number_or_name(store: AdapterStore, tmp_path: Path) -> None:
    store.add(lora(1))
    store.add(lora(2), name="maths")
    for which, expected in ((1, 1), ("maths", 2), ("1", 1), ("none", None), ("2", 2)):
        store.use(which)
        assert active(store) == expected
    store.use("1")
    assert store.rollback() == 2


@pytest.mark.parametrize("which", ["code", 9, "", "1.onnx_adapter"])
def test_an_unknown_adapter_changes_nothing_and_the_known_are_named(
    which: int | str, store: AdapterStore
) -> None:
    store.add(lora(1))
    store.add(lora(2), name="maths")
    with pytest.raises(AdapterError, match="no adapter .* here; there are none, 1, maths"):
        store.use(which)
    assert active(store) == 2


def test_few_generations_are_kept_but_all_that_have_a_name(store: AdapterStore) -> None:
    store.add(lora(1), name="maths")
    for number in range(2, 9):
        store.add(lora(number))
    assert [x.generation for x in store.records()] == [1, 5, 6, 7, 8]
    assert [x.name for x in store.records()] == ["maths", None, None, None, None]
    store.use("maths")
    assert active(store) == 1


def test_a_name_belongs_to_the_newest_that_has_it(store: AdapterStore) -> None:
    for number in range(1, 8):
        store.add(lora(number), name="maths" if number in (1, 2) else None)
    assert [x.generation for x in store.records() if x.name] == [2]


def test_records_tell_what_a_table_shows(store: AdapterStore) -> None:
    store.add(lora(1))
    store.add(lora(2), name="maths")
    first, second = store.records()
    assert (first.generation, first.name, first.is_active) == (1, None, False)
    assert (second.generation, second.name, second.is_active) == (2, "maths", True)
    assert (second.rank, second.num_modules, second.problem) == (2, 1, None)
    on_disk = sum(x.stat().st_size for x in store._folder.glob("2.*"))
    assert second.num_bytes == on_disk


def test_an_exported_adapter_is_imported_elsewhere(store: AdapterStore, tmp_path: Path) -> None:
    store.add(lora(5), provenance={"rounds": 9})
    path = store.export_file(tmp_path / "out" / "maths")
    assert files(tmp_path / "out") == ["maths.json", "maths.onnx_adapter"]
    elsewhere = AdapterStore(tmp_path / "elsewhere", BASE)
    elsewhere.add(lora(1))
    assert elsewhere.import_file(path) == 2
    assert active(elsewhere) == 5
    assert elsewhere.records()[-1].name == "maths"
    adapter = elsewhere.active()
    assert adapter is not None and adapter.provenance == {"rounds": 9}
    elsewhere.import_file(path.with_suffix(".json"), name="again")
    assert elsewhere.records()[-1].name == "again"
    store.use("none")
    with pytest.raises(AdapterError, match="no adapter to export: name one"):
        store.export_file(tmp_path / "nothing")
    assert store.export_file(tmp_path / "named", 1).exists()


def test_an_export_replaces_nothing(store: AdapterStore, tmp_path: Path) -> None:
    """`manifest` would take the place of a model folder's manifest.json."""
    store.add(lora(1))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(AdapterError, match="is there already"):
        store.export_file(tmp_path / "manifest")
    assert (tmp_path / "manifest.json").read_text() == "{}"
    assert not (tmp_path / "manifest.onnx_adapter").exists()


def test_an_import_that_does_not_fit_leaves_the_active_one(
    store: AdapterStore, tmp_path: Path
) -> None:
    store.add(lora(1))
    foreign = AdapterStore(tmp_path / "foreign", OTHER)
    foreign.add(lora(2))
    path = foreign.export_file(tmp_path / "foreign_maths")
    before = files(store._folder)
    with pytest.raises(AdapterError, match="made for another drafter"):
        store.import_file(path)
    with pytest.raises(AdapterError, match="cannot be read"):
        store.import_file(tmp_path / "nowhere.onnx_adapter")
    good = store.export_file(tmp_path / "good")
    for name in ("7", "none", "", "two\nlines", "x" * 65):
        with pytest.raises(AdapterError, match="cannot be an adapter's name"):
            store.import_file(good, name=name)
    spoilt = Lora(2, 4.0, {**lora(1).tensors, "lm_head.lora_A": np.full((2, 4), np.nan, "f4")})
    with pytest.raises(AdapterError, match="values that are no numbers"):
        store.add(spoilt)
    assert active(store) == 1
    assert files(store._folder) == before


def test_a_damaged_active_adapter_gives_way_to_the_one_before_it(
    store: AdapterStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3):
        store.add(lora(number))
    for number, expected in ((3, 2), (2, 1), (1, None)):
        path = store._path(number)
        path.write_bytes(path.read_bytes()[:-1])
        with caplog.at_level(logging.WARNING):
            assert active(store) == expected
        assert "going back to the one before it" in caplog.text
    assert [x.problem is not None for x in store.records()] == [True] * 3
    with pytest.raises(AdapterError, match="its checksum differs"):
        store.use(2)
    store.add(lora(4))
    assert active(store) == 4


def test_a_lost_trail_leads_to_the_newest_generation(store: AdapterStore) -> None:
    for number in (1, 2):
        store.add(lora(number))
    (store._folder / "trail.json").write_bytes(b"{")
    assert active(store) == 2
    assert store.rollback() == 1


def test_a_device_that_refuses_says_so_and_keeps_the_active_one(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(lora(1))

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = files(store._folder)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", no_space)
        for change in (lambda: store.add(lora(2)), lambda: store.use("none"), store.rollback):
            with pytest.raises(StateError, match="No space left"):
                change()
    assert active(store) == 1
    assert files(store._folder) == before


def test_a_trail_of_an_older_version_is_as_good_as_lost(store: AdapterStore) -> None:
    for number in (1, 2):
        store.add(lora(number))
    save_json(store._folder / "trail.json", [None, 1])
    assert active(store) == 2
    assert store.add(lora(3)) == 3


def test_a_number_is_never_given_twice(store: AdapterStore) -> None:
    """Or a learner would take somebody else's adapter for its own."""
    assert [store.add(lora(number)) for number in (1, 2)] == [1, 2]
    store.rollback()
    store.use("none")
    assert [x.generation for x in store.records()] == [1]
    assert store.add(lora(3)) == 3
    assert AdapterStore(store._folder, BASE).add(lora(4)) == 4


def test_what_could_not_be_made_active_does_not_stay(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(lora(1))
    store.export_file(tmp_path / "other.onnx_adapter")
    before = files(store._folder)

    def no_space(path: Path, value: object) -> None:
        raise StateError("no space left")

    with monkeypatch.context() as context:
        context.setattr("edgedraft.runtime.adapter_store.save_json", no_space)
        with pytest.raises(StateError, match="no space left"):
            store.import_file(tmp_path / "other.onnx_adapter")
    assert files(store._folder) == before
    assert [x.name for x in store.records()] == [None]


def test_what_a_kill_leaves_behind_goes_with_the_next_generation(store: AdapterStore) -> None:
    store.add(lora(1))
    for litter in (".2.onnx_adapter.abc", "2.onnx_adapter", ".trail.json.x"):
        (store._folder / litter).write_bytes(b"x")
    store.add(lora(2))
    assert files(store._folder) == ["1.json", "1.onnx_adapter", "2.json", "2.onnx_adapter"] + [
        "trail.json"
    ]


_KILLER = """
import logging, os, random, signal, sys, time
from pathlib import Path
import numpy as np
from edgedraft.runtime.adapter_file import AdapterBase
from edgedraft.runtime.adapter_store import AdapterStore
from edgedraft.runtime.lora import Lora

def lora(number):
    a, b = np.full((64, 256), number, np.float32), np.zeros((64, 64), np.float32)
    return Lora(64, 4.0, {"lm_head.lora_A": a, "lm_head.lora_B": b})

def warned(record):
    raise AssertionError(record.getMessage())

handler = logging.Handler()
handler.emit = warned
logging.getLogger("edgedraft").addHandler(handler)
base = AdapterBase("a" * 64, "b" * 64, "c" * 64, {"lm_head": (64, 256)})
store, rng = AdapterStore(Path(sys.argv[1]), base), random.Random(5)
store.add(lora(1))
store.add(lora(2))
seen, progress = 2, 0
for _ in range(int(sys.argv[2])):
    writer = os.fork()
    if not writer:
        while True:
            generation = 1 + max(x.generation for x in store.records())
            store.add(lora(generation))
            if generation % 3 == 0:
                store.rollback()
            if generation % 4 == 0:
                store.use(generation)
    time.sleep(rng.random() * 0.06)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    trail = store._trail()
    adapter = store.active()  # a warning would have raised
    assert adapter is not None and adapter.generation == trail[-1]
    assert (adapter.lora.tensors["lm_head.lora_A"] == adapter.generation).all()
    records = store.records()
    assert all(x.problem is None for x in records)
    there = {x.generation for x in records}
    assert len(trail) > 1 and set(trail) <= there | {None}, (trail, there)
    newest = max(there)
    progress += newest > seen
    seen = newest
store.add(lora(newest + 1))
print(progress, len(list(store._folder.iterdir())))
"""


def test_a_kill_at_any_moment_leaves_the_active_generation_and_those_before_it(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLER, str(tmp_path), str(KILLS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    progress, left = map(int, done.stdout.split())
    assert progress >= KILLS // 4  # most writers got somewhere
    assert left <= 9  # four generations and the trail: what kills left behind has gone


def test_no_damage_to_any_file_stops_a_store_or_makes_up_an_adapter(tmp_path: Path) -> None:
    rng = random.Random(0)
    store = AdapterStore(tmp_path / "store", BASE)
    for number in (1, 2, 3):
        store.add(lora(number), name="maths" if number == 1 else None)
    content = {x: x.read_bytes() for x in store._folder.iterdir()}
    for _ in range(MUTATIONS // 3):
        for path in store._folder.iterdir():
            path.unlink()
        for path, whole in content.items():
            path.write_bytes(whole)
        for path in rng.sample(sorted(content), rng.choice([1, 1, 2])):
            spoilt = bytearray(content[path])
            for _ in range(rng.choice([0, 1, 1, 9])):
                spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
            path.write_bytes(spoilt[: rng.choice([len(spoilt), rng.randrange(len(spoilt))])])
        adapter = store.active()
        if adapter is not None:
            assert (adapter.lora.tensors["lm_head.lora_A"] == adapter.generation).all()
        for record in store.records():
            assert record.problem is None or "\n" not in record.problem
        store.add(lora(9))
        assert active(store) == 9
