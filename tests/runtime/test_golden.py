"""Recorded requests are repeated round by round; `golden/record.py` says what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import DecodeConfig, Proposal, Proposer, SpeculativeDecoder, SuffixLookup
from graphs import golden_model

GOLDEN = Path(__file__).parent.parent / "golden"
TRACES = sorted(p.stem for p in GOLDEN.glob("*.json"))


class Recorded(Proposer):
    """Proposes what was proposed when the trace was recorded."""

    def __init__(self, rounds: Sequence[dict[str, Any]]) -> None:
        self._proposals: Iterator[dict[str, Any]] = iter([r["proposal"] for r in rounds])

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        tokens, parents = next(self._proposals).values()
        return Proposal(tuple(tokens), tuple(parents), (1.0,) * len(tokens), "recorded")


def load(name: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return trace


def test_there_are_traces_to_replay() -> None:
    assert TRACES == ["lookup", "mistakes"]
    assert any(r["path"] for r in load("lookup")["rounds"])


@pytest.mark.parametrize("own_proposals", [False, True])
@pytest.mark.parametrize("name", TRACES)
def test_a_recorded_request_is_repeated_round_by_round(name: str, own_proposals: bool) -> None:
    golden = load(name)
    proposer: Any = Recorded(golden["rounds"])
    if own_proposals:
        if golden["proposer"] != "lookup":
            pytest.skip("its proposals can only be played back")
        proposer = SuffixLookup()
    decoder = SpeculativeDecoder(golden_model(), proposer, eos_token_ids=golden["eos_token_ids"])
    config = DecodeConfig(
        max_tokens=golden["max_tokens"], max_draft_tokens=golden["max_draft_tokens"]
    )
    traces = list(
        {
            "proposal": {
                "tokens": list(trace.proposal.tokens),
                "parents": list(trace.proposal.parents),
            },
            "path": list(trace.verdict.path),
            "next_token": trace.verdict.next_token,
            "emitted": list(trace.emitted),
            "finish_reason": trace.finish_reason,
        }
        for trace in decoder.rounds(golden["prompt"], config)
    )
    assert traces == golden["rounds"]
