"""How far an exported graph is from the model it came from, and what its passes cost.

The reference is transformers' own forward in fp32. The graph is run the way the runtime runs it:
through the KV cache, in passes of several rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgedraft.runtime import OnnxModel
from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.plan import measure_passes

from .acceptance_head import AcceptanceHead
from .errors import ExportError

_ROWS = 16  # of one verify pass, as the runtime runs it
_CONTEXT = 256  # tokens in the cache while passes are timed
_TIMED_ROWS = (1, 4, 8, 16)
# Relative to the range of the logits. Rounding alone reaches 3e-6 in 30 layers; a wrong mask, scale
# or rotation shows as 1e-2 and more.
_TOLERANCE = 1e-3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a graph's next-token distributions compare with the model's, over all positions."""

    positions: int
    kl: float  # mean KL(model || graph), in nats
    top1_agreement: float  # share of positions with the same most likely token
    perplexity_model: float
    perplexity_graph: float


def reference_logits(model: torch.nn.Module, tokens: Sequence[int]) -> FloatArray:
    """Return transformers' logits of every position, shape (tokens, vocabulary)."""
    call: Any = model
    with torch.no_grad():
        logits = call(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    array: FloatArray = logits.float().numpy()
    return array


def reference_acceptance(
    model: torch.nn.Module, head: AcceptanceHead, tokens: Sequence[int]
) -> FloatArray:
    """Return what an acceptance head says of every position, shape (tokens,)."""
    call: Any = model
    hidden: list[torch.Tensor] = []
    handle = call.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: hidden.append(args[0])
    )
    try:
        with torch.no_grad():
            logits = call(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
            array: FloatArray = head(hidden[0], logits).numpy()
    finally:
        handle.remove()
    return array


def acceptance_difference(
    drafter: OnnxModel, tokens: Sequence[int], expected: FloatArray
) -> FloatArray:
    """Return |difference| from `reference_acceptance` at every position, decoding in pieces."""
    drafter.rollback(0)
    stated: list[FloatArray] = []
    for start in range(0, len(tokens), 5):
        drafter.forward(tokens[start : start + 5])
        assert drafter.acceptance is not None
        stated.append(drafter.acceptance.copy())
    drafter.rollback(0)
    difference: FloatArray = np.abs(np.concatenate(stated) - expected)
    return difference


def check_acceptance(difference: FloatArray) -> float:
    """Return an fp32 graph's largest difference; raise ExportError if it is beyond rounding."""
    largest = float(difference.max())
    if not largest <= _TOLERANCE:
        raise ExportError(
            f"the exported acceptance head disagrees with torch: probabilities differ by "
            f"{largest:.3g}; train it anew, or remove its file"
        )
    return largest


def fp32_difference(target: OnnxModel, tokens: Sequence[int], expected: FloatArray) -> float:
    """Return max |logit difference| of an fp32 graph over prefill, appends and a rollback.

    `expected` are the logits of `reference_logits` for the same tokens. Raises ExportError when
    the difference is beyond rounding.
    """
    half = len(tokens) // 2
    target.rollback(0)
    rows = [target.forward(tokens[:half]).copy()]
    target.forward(tokens[:3])  # what a rejected draft leaves behind must not matter
    target.rollback(half)
    for start in range(half, len(tokens), 5):
        rows.append(target.forward(tokens[start : start + 5]).copy())
    target.rollback(0)
    expected = expected[:, : target.vocab_size]
    difference = float(np.abs(np.concatenate(rows) - expected).max())
    spread = float(np.ptp(expected))
    if not difference <= _TOLERANCE * spread:  # NaN fails, too
        raise ExportError(
            f"the exported graph disagrees with transformers: logits differ by {difference:.3g}, "
            f"their range is {spread:.3g}; this model cannot be exported this way"
        )
    return difference


def agreement(
    target: OnnxModel, model: torch.nn.Module, sequences: Sequence[Sequence[int]]
) -> Agreement:
    """Compare a graph with its model on token sequences they have not been calibrated on."""
    kl = hits = positions = 0.0
    loss_model = loss_graph = 0.0
    for tokens in sequences:
        p = _log_softmax(reference_logits(model, tokens[:-1])[:, : target.vocab_size])
        target.rollback(0)
        for start in range(0, len(tokens) - 1, _ROWS):
            stop = min(start + _ROWS, len(tokens) - 1)
            q = _log_softmax(target.forward(tokens[start:stop]))
            part, rows = p[start:stop], np.arange(stop - start)
            kl += float((np.exp(part) * (part - q)).sum())
            hits += int((part.argmax(-1) == q.argmax(-1)).sum())
            following = list(tokens[start + 1 : stop + 1])
            loss_model -= float(part[rows, following].sum())
            loss_graph -= float(q[rows, following].sum())
        positions += len(tokens) - 1
    target.rollback(0)
    return Agreement(
        positions=int(positions),
        kl=kl / positions,
        top1_agreement=hits / positions,
        perplexity_model=float(np.exp(loss_model / positions)),
        perplexity_graph=float(np.exp(loss_graph / positions)),
    )


def pass_milliseconds(target: OnnxModel) -> dict[int, float]:
    """Return rows -> median milliseconds of a pass over a filled cache."""
    passes = measure_passes(target, _TIMED_ROWS, _CONTEXT)
    return {rows: 1000 * seconds for rows, seconds in passes.items()}


def quality_table(quality: dict[str, Any]) -> str:
    """Return what a manifest's `quality` says as a table for people."""
    lines = [f"{label:<36}{quality[key]:{form}}" for key, label, form in _LABELS if key in quality]
    costs = quality.get("pass_ms", {})
    lines += [f"{f'v({rows})':<36}{costs[rows]:.2f} ms" for rows in costs]
    return "\n".join(lines)


_LABELS = (
    ("max_logit_difference_fp32", "max |logit difference| in fp32", ".2e"),
    ("max_acceptance_difference_fp32", "max |acceptance difference| in fp32", ".2e"),
    ("mean_acceptance_difference", "mean |acceptance difference|", ".4f"),
    ("positions", "held-out positions", "d"),
    ("kl", "KL to fp32 (nats)", ".4f"),
    ("top1_agreement", "same most likely token", ".4f"),
    ("perplexity_model", "perplexity, fp32", ".3f"),
    ("perplexity_graph", "perplexity, this graph", ".3f"),
)


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
