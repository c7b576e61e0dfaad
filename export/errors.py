"""What can go wrong while exporting, as one exception with a message for a person."""

from __future__ import annotations

from edgedraft.runtime.errors import EdgeDraftError


class ExportError(EdgeDraftError):
    """A model, file or option that cannot be exported; the message says what to do."""
