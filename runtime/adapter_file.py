"""An adapter on disk: `NAME.onnx_adapter`, onnxruntime's own format, and `NAME.json` beside it.

The manifest says what the adapter belongs to and carries the checksums of both files. It is written
last, so that a kill between the two leaves something that is refused. onnxruntime sees a file only
after its checksum was right: of damaged ones it takes every sixth for another adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .datatypes import FloatArray
from .errors import AdapterError
from .folder import ModelFolder, file_sha256
from .lora import Lora, Shape, lora_shapes
from .ort_session import onnxruntime
from .state import json_sha256, replaced, write_atomic
from .tokenizer_file import TokenIds
from .training_files import TrainingFiles

SUFFIX = ".onnx_adapter"
FORMAT = "edgedraft-adapter"
FORMAT_VERSION = 1
_SHOWN = 3  # names of tensors in one message
_TYPES: dict[str, type | tuple[type, ...]] = {
    "name": (str, type(None)),
    "generation": int,
    "rank": int,
    "alpha": (int, float),
    "modules": list,
    "base": str,
    "draft_vocabulary": str,
    "target_vocabulary": str,
    "sha256": str,
    "provenance": dict,
}


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What an adapter belongs to."""

    weights: str  # checksum of the drafter's own weights
    draft_vocabulary: str  # checksum of the drafter's tokenizer file
    target_vocabulary: str  # fingerprint of the target's ids
    shapes: Mapping[str, Shape]  # module -> (outputs, inputs)

    @classmethod
    def of(cls, drafter: ModelFolder, files: TrainingFiles, target: TokenIds) -> AdapterBase:
        """Return what adapters of this drafter for targets with these ids belong to."""
        return cls(
            files.fingerprint, file_sha256(drafter.tokenizer), target.fingerprint, files.shapes
        )


@dataclass(frozen=True, slots=True, eq=False)  # holds arrays
class Adapter:
    """What was learned, and its history."""

    lora: Lora
    generation: int = 0  # counted by the store that it lies in
    name: str | None = None  # None: learned on this device
    provenance: Mapping[str, Any] = field(default_factory=dict)


def write_adapter(path: Path, adapter: Adapter, base: AdapterBase) -> None:
    """Write an adapter to `path`, which ends in `.onnx_adapter`, and its manifest beside it.

    Raises `AdapterError`, and writes nothing, for one that does not fit its base or is not finite;
    `OSError` when the device refuses.
    """
    lora = adapter.lora
    _check(path, lora, base)
    provenance = json.loads(json.dumps(dict(adapter.provenance)))  # as it will be read
    ort = onnxruntime()
    # The values look into the arrays, which therefore outlive the writing.
    arrays = {name: np.ascontiguousarray(x, np.float32) for name, x in lora.tensors.items()}
    content = ort.AdapterFormat()
    content.set_parameters(
        {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in arrays.items()}
    )
    with replaced(path, private=True) as temporary:
        content.export_adapter(str(temporary))
        checksum = file_sha256(temporary)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": adapter.name,
        "generation": adapter.generation,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "modules": list(lora.modules),
        "base": base.weights,
        "draft_vocabulary": base.draft_vocabulary,
        "target_vocabulary": base.target_vocabulary,
        "sha256": checksum,
        "provenance": provenance,
    }
    manifest["manifest_sha256"] = json_sha256(manifest)
    write_atomic(manifest_path(path), json.dumps(manifest, indent=1).encode(), private=True)


def read_adapter(path: Path, base: AdapterBase) -> Adapter:
    """Read an adapter; raise `AdapterError` unless it is whole and fits its base."""
    manifest = _read_manifest(manifest_path(path))
    for key, expected, what in (
        ("base", base.weights, "drafter"),
        ("draft_vocabulary", base.draft_vocabulary, "draft vocabulary"),
        ("target_vocabulary", base.target_vocabulary, "target vocabulary"),
    ):
        if (given := manifest[key]) != expected:
            raise AdapterError(
                f"{path}: was made for another {what} ({given:.12}, this one is {expected:.12}); "
                "use it with the pair that it was made for"
            )
    try:
        checksum = file_sha256(path)
    except OSError as error:
        raise AdapterError(
            f"{path}: cannot be read ({error.strerror}); copy it together with its manifest"
        ) from error
    if checksum != manifest["sha256"]:
        raise AdapterError(f"{path}: its checksum differs from its manifest's; copy both again")
    lora = Lora(manifest["rank"], float(manifest["alpha"]), _read_tensors(path))
    _check(path, lora, base)
    if sorted(lora.modules) != sorted(manifest["modules"]):
        raise AdapterError(f"{path}: holds other modules than its manifest lists; copy both again")
    return Adapter(lora, manifest["generation"], manifest["name"], manifest["provenance"])


def manifest_path(path: Path) -> Path:
    """Return where the manifest of an adapter file lies."""
    return path.with_suffix(".json")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        kind, version = manifest["format"], manifest["format_version"]
    except OSError as error:
        raise AdapterError(
            f"{path}: cannot be read ({error.strerror}); an adapter is a {SUFFIX} file and the "
            "manifest beside it"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise AdapterError(f"{path}: not the manifest of an adapter; copy it again") from error
    if kind != FORMAT:
        raise AdapterError(f"{path}: of format {kind!r:.40}, expected {FORMAT!r}")
    if version != FORMAT_VERSION:
        raise AdapterError(
            f"{path}: format version {version!r:.20}, this EdgeDraft reads {FORMAT_VERSION}; "
            "update EdgeDraft or make the adapter again"
        )
    checksum = manifest.pop("manifest_sha256", None)
    if checksum != json_sha256(manifest):
        raise AdapterError(f"{path}: damaged or edited, its checksum does not fit; copy it again")
    for key, kind in _TYPES.items():
        if not isinstance(manifest.get(key), kind):
            raise AdapterError(
                f"{path}: {key!r} is {manifest.get(key)!r:.40}; make the adapter again"
            )
    return manifest  # type: ignore[no-any-return]


def _read_tensors(path: Path) -> dict[str, FloatArray]:
    try:
        content = onnxruntime().AdapterFormat.read_adapter(str(path))
        # Copied: what onnxruntime gives out are views of the file, in any order.
        return {name: np.array(x.numpy()) for name, x in sorted(content.get_parameters().items())}
    except Exception as error:  # onnxruntime raises a family of unrelated classes
        reason = " ".join(str(error).split())[:200]
        raise AdapterError(f"{path}: onnxruntime cannot read it ({reason})") from error


def _check(path: Path, lora: Lora, base: AdapterBase) -> None:
    """Raise `AdapterError` unless every tensor is one of the base's, of its shape, and finite."""
    given = lora.tensors
    known = [module for module in lora.modules if module in base.shapes]
    expected = lora_shapes({module: base.shapes[module] for module in known}, lora.rank)
    faults = [f"{name} is missing" for name in expected if name not in given]
    faults += [f"{name} is not the drafter's" for name in given if name not in expected]
    for name, shape in expected.items():
        if (array := given.get(name)) is None:
            continue
        if array.shape != shape:
            faults.append(f"{name} is {_size(array.shape)}, expected {_size(shape)}")
        elif array.dtype != np.float32:
            faults.append(f"{name} is {array.dtype}, expected float32")
        elif not np.isfinite(array).all():
            faults.append(f"{name} has values that are no numbers")
    if not lora.rank >= 1 or not 0 < lora.alpha < np.inf:
        faults.append(f"rank {lora.rank} and alpha {lora.alpha} must be positive")
    if not given:
        faults.append("it holds no tensors")
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise AdapterError(
            f"{path}: does not fit this drafter: {'; '.join(faults[:_SHOWN])}{more}; make it again "
            "from this drafter"
        )


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
