"""What the options of several commands have in common."""

from __future__ import annotations

from typing import Any


def require_positive(options: Any, *names: str) -> None:
    """Raise `ValueError` unless these options are above zero, or None."""
    for name in names:
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")
