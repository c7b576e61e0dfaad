"""Records the golden traces: python tests/golden/record.py

A trace is a greedy request, round by round, that any implementation of the decode loop has to
repeat: it feeds `prompt` to `tiny_decoder.onnx`, gives each round's `proposal` to the verifier and
compares `path`, `next_token` and `emitted`. Where `proposer` is "lookup", the proposals themselves
are to be repeated as well. Every choice has a margin that no CPU's rounding reaches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
MARGIN = 0.02
sys.path.insert(0, str(HERE.parent))

from edgedraft.runtime import DecodeConfig, SpeculativeDecoder, SuffixLookup  # noqa: E402
from edgedraft.runtime.interfaces import Proposer  # noqa: E402
from fakes import OracleProposer  # noqa: E402
from graphs import DecoderSpec, decoder_graph, golden_model  # noqa: E402

SPEC = DecoderSpec(
    vocab_size=40, heads=2, kv_heads=1, head_dim=16, max_positions=128, temperature=0.25
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def record(proposer: Proposer | None, name: str, config: DecodeConfig, eos: list[int]) -> Any:
    """Return one request as a JSON object."""
    decoder = SpeculativeDecoder(golden_model(), proposer, eos_token_ids=eos)
    rounds = []
    for trace in decoder.rounds(PROMPT, config):
        top = np.sort(trace.logits, axis=1)[:, -2:]
        assert (top[:, 1] - top[:, 0]).min() > MARGIN, "too close a choice: take another seed"
        rounds.append(
            {
                "proposal": {
                    "tokens": trace.proposal.tokens,
                    "parents": trace.proposal.parents,
                },
                "path": trace.verdict.path,
                "next_token": trace.verdict.next_token,
                "emitted": trace.emitted,
                "finish_reason": trace.finish_reason,
            }
        )
    return {
        "graph": "tiny_decoder.onnx",
        "context_length": 128,
        "vocab_size": SPEC.vocab_size,
        "proposer": name,
        "prompt": PROMPT,
        "max_tokens": config.max_tokens,
        "max_draft_tokens": config.max_draft_tokens,
        "eos_token_ids": eos,
        "rounds": rounds,
    }


def main() -> None:
    (HERE / "tiny_decoder.onnx").write_bytes(decoder_graph(SPEC))
    plain = record(None, "none", DecodeConfig(max_tokens=60), [])
    text = [token for r in plain["rounds"] for token in r["emitted"]]
    end = next(t for i, t in enumerate(text) if i > 25 and t not in text[:i])
    oracle = OracleProposer([*PROMPT, *text], SPEC.vocab_size, mistakes=0.25, seed=1)
    traces = {
        "lookup": record(SuffixLookup(), "lookup", DecodeConfig(max_tokens=60), []),
        "mistakes": record(oracle, "recorded", DecodeConfig(max_tokens=60), [end]),
    }
    for name, trace in traces.items():
        content = json.dumps(trace, indent=1)
        (HERE / f"{name}.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
