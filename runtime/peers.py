"""Other engines on the same prompts, for comparison.

Each peer lives in a process of its own (`peer_worker.py`): its libraries never mix with ours, and
while it waits for a prompt it uses no core (measured: onnxruntime's and OpenMP's threads spin for
some 30 ms after a run, then sleep; docs/experiments.md). A short pause on both sides of a run lets
the threads of whoever ran before come to rest, so that every engine has the machine to itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any, Self

from .bench import Run, Runner
from .config import DecodeConfig
from .errors import EdgeDraftError
from .folder import ModelFolder
from .stats import RunStats

PEERS = ("genai", "transformers")
# Ways to decode, by the name they have in the result. What stands behind a colon is a variant: the
# peer is judged by the faster of its variants, prompt by prompt. What stands behind a hyphen speeds
# up the peer's own plain loop, whose name stands before it (`own_plain`).
_MODES = {
    "genai": {"genai": "greedy", "genai:resting": "resting"},
    "transformers": {"transformers": "greedy", "transformers-lookup": "lookup"},
}
# Universal assisted generation: a drafter with another tokenizer.
_UAG_MODES = {
    "transformers-uag-reencode": "reencode",
    "transformers-uag-intersection": "intersection",
    "transformers-uag-intersection:adaptive": "intersection, adaptive",
}
_SETTLE_S = 0.1


class PeerError(EdgeDraftError):
    """A peer that is not installed, cannot open the model or has failed."""


class Peer:
    """Another engine in its own process."""

    def __init__(self, name: str, model: str, threads: int, drafter: str | None = None) -> None:
        """Start the engine and load the models; raise `PeerError` when either fails."""
        self.name = name
        self._modes = _MODES[name] | (_UAG_MODES if drafter else {})
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgedraft.runtime.peer_worker", name, model, str(threads)]
            + ([drafter] if drafter else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            self.facts = self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def runners(self) -> dict[str, Runner]:
        """Return the engine's ways to decode, by the name they have in the result."""
        return {kind: partial(self.run, mode) for kind, mode in self._modes.items()}

    def run(self, mode: str, ids: Sequence[int], config: DecodeConfig) -> Run:
        """Answer one prompt greedily."""
        request = {
            "mode": mode,
            "ids": list(ids),
            "max_tokens": config.max_tokens,
            "ignore_eos": config.ignore_eos,
        }
        sleep(_SETTLE_S)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error
        answer = self._receive()
        sleep(_SETTLE_S)
        return Run(
            tuple(answer["token_ids"]),
            answer["prefill_s"],
            answer["decode_s"],
            answer["timed_tokens"],
            # The pass over the prompt gives tokens, too: every pass is a round.
            stats=RunStats(rounds=answer["passes"], emitted=len(answer["token_ids"])),
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise PeerError(message["error"])
        return message

    def _failure(self) -> PeerError:
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        return PeerError(f"{self.name} ended unexpectedly ({said[-1] if said else 'no message'})")


def peer_model(name: str, folder: ModelFolder, given: str | None) -> str:
    """Return the model a peer is to open; raise `PeerError` when there is none for it."""
    if name == "genai":
        if not (folder.path / "genai_config.json").is_file():
            raise PeerError(
                f"{folder.path}: onnxruntime-genai opens folders with a genai_config.json only; "
                "compare on a folder that its model builder wrote"
            )
        return str(folder.path)
    model = folder.provenance.get("model")
    source = given or (model.get("source") if isinstance(model, dict) else None)
    if not isinstance(source, str) or not Path(source).is_dir():
        raise PeerError("transformers needs the model's Hugging Face folder: give --peer-model DIR")
    return source


def peer_drafter(given: str | None) -> str | None:
    """Return the drafter transformers is to use, if any; raise `PeerError` when it cannot."""
    if given is None:
        return None
    missing = [x for x in ("config.json", "tokenizer.json") if not (Path(given) / x).is_file()]
    if missing:
        raise PeerError(
            f"{given}: no {' and no '.join(missing)}; --peer-drafter takes the Hugging Face folder "
            "that the drafter was exported from"
        )
    return given


def own_plain(kind: str) -> str | None:
    """Return the plain loop that a way to decode speeds up; None for a plain loop."""
    plain, hyphen, _ = kind.partition("-")
    return plain if hyphen else None
