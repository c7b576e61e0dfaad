"""Packages that only some commands need, imported when they are.

The device has none of them, so they are never imported by name (`ruff.toml`, tests of the import
table), and a command that misses one says what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

from .errors import EdgeDraftError


class MissingExtraError(EdgeDraftError):
    """A package that this command needs is not installed."""


def need(module: str, what: str, install: str) -> Any:
    """Import a module for `what`; raise `MissingExtraError` naming what to pip install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f'{what} needs {module.split(".")[0]}: pip install "{install}" ({error})'
        ) from error
