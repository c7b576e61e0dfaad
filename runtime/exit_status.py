"""How a command ends: what is known to go wrong is one line on stderr, and a status says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from .errors import EdgeDraftError

INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended
_BROKEN_PIPE = 141  # and one whose reader went away


def exit_status(program: str, command: Callable[[], int | None], *known: type[Exception]) -> int:
    """Run a command and return its exit status: 2 for what EdgeDraft raises on purpose, what the
    device refuses, and errors `known` beside them.
    """
    refusals: tuple[type[Exception], ...] = (EdgeDraftError, OSError, *known)
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # As the documentation of Python's signal module advises: nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except refusals as error:
        sys.stderr.write(f"{program}: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    return status or 0
