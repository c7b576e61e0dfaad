"""What can go wrong while training, as one exception with a message for a person."""

from __future__ import annotations

from edgedraft.runtime.errors import EdgeDraftError


class TrainError(EdgeDraftError):
    """A text, an answer, a folder or an option that cannot be trained on; the message says what to
    do.
    """
