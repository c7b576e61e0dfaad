"""What a result depends on besides the code under test, so that it can be repeated."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .folder import ModelFolder
from .ort_session import SessionConfig, usable_cores
from .plan import cpu_name

_PACKAGES = (
    "edgedraft",
    "numpy",
    "onnxruntime",
    "tokenizers",
    "onnxruntime-genai",
    "transformers",
    "torch",
)


def describe_run(folder: ModelFolder, session: SessionConfig, seed: int) -> dict[str, Any]:
    """Return command line, code, versions, machine and model as a JSON object."""
    return {
        **describe_code(_PACKAGES),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": session.num_threads,
        "providers": list(session.providers),
        "load_average": load_average(),
        "target": {
            "name": folder.name,
            "exporter": folder.exporter,
            "precision": folder.precision,
            "fingerprint": folder.fingerprint,
        },
        "seed": seed,
    }


def describe_code(packages: Sequence[str]) -> dict[str, Any]:
    """Return the command line, the date, the commit and the versions of these packages as JSON."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(Path(__file__).parent),
        "packages": package_versions(packages),
    }


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def git_revision(folder: Path) -> str | None:
    """Return the commit of a source checkout, with "+changes" when files differ from it."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def load_average() -> list[float] | None:
    """Return how many processes wanted a core over 1, 5 and 15 minutes: a hint of how quiet the
    machine was, this process counted in.
    """
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


def _git(folder: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *command], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
