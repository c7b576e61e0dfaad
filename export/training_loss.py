"""The loss of a training step and its gradient with respect to the logits.

For each predicted position, with q the drafter's distribution, `next` the piece that came and p
the teacher's distribution:

    loss = nll_weight * -log q(next) + teacher_weight * (c1 KL(p||q) + c2 KL(q||p) + c3 TV(p, q))

averaged over the weights. The teacher names K pieces; what it leaves over belongs to all other
pieces together, so p and q are compared over K + 1 outcomes. OmniDraft's hybrid loss (arXiv
2507.02659, section 3.2), cross-entropy and the divergences against a trie marginal are all choices
of the weights.

With v = q dD/dq over the outcomes, v_rest that of the last one, and u = v_rest / q_rest, a logit of
piece x has the gradient q(x) (u - sum(v)), and pieces with an outcome of their own v - q u on top:
so rows as wide as the vocabulary are touched only by a softmax, a factor and a scatter. A multiple
of q in v cancels and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .onnx_arithmetic import Expression

_FLOOR = 1e-6  # stands in for less wherever the teacher, or what q leaves over, meets a logarithm
_END = 2**62  # behind every column


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What a training step learns from; n positions, K pieces the teacher names."""

    next: Expression  # (n, 1)
    nll_weight: Expression  # (n, 1)
    teacher_ids: Expression  # (n, K)
    teacher_probs: Expression  # (n, K)
    teacher_weight: Expression  # (n, 1)
    divergence: Expression  # (3,)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A row of logits as a distribution, and how it did."""

    probs: Expression  # (n, vocab)
    log_sum: Expression  # (n, 1): logit - log_sum = log probability
    log_prob: Expression  # (n, 1), of `next`
    hit: Expression  # (n, 1): 1.0 where `next` was the likeliest


def predict(logits: Expression, next_piece: Expression) -> Prediction:
    """Return the distributions behind logits (n, vocab)."""
    probs = logits.op("Softmax", axis=-1)
    best = logits.op("ArgMax", axis=-1, keepdims=1)
    # The likeliest piece has at least 1 / vocab, so that its logarithm is safe.
    log_sum = _at(logits, best) - _at(probs, best).op("Log")
    return Prediction(
        probs=probs,
        log_sum=log_sum,
        log_prob=_at(logits, next_piece) - log_sum,
        hit=best.op("Equal", next_piece).cast(ir.DataType.FLOAT),
    )


def distillation_loss(
    logits: Expression, prediction: Prediction, inputs: LossInputs
) -> tuple[Expression, Expression]:
    """Return the loss, a scalar, and its gradient with respect to the logits."""
    forward, backward, distance = (inputs.divergence.op("Gather", i) for i in range(3))
    named = inputs.teacher_probs.op("Greater", 0.0).cast(ir.DataType.FLOAT)
    log_q_named = _at(logits, inputs.teacher_ids) - prediction.log_sum
    q_named = log_q_named.op("Exp") * named
    q_over = 1.0 - q_named.sum()
    q_rest = q_over.op("Max", _FLOOR)
    p = inputs.teacher_probs.beside((1.0 - inputs.teacher_probs.sum()).op("Max", 0.0))
    q = q_named.beside(q_rest)
    log_p = p.op("Max", _FLOOR).op("Log")
    log_q = log_q_named.beside(q_rest.op("Log"))

    gap, ratio = q - p, log_q - log_p
    divergence = (q * backward - p * forward) * ratio + gap.op("Abs") * (distance * 0.5)
    total = (inputs.nll_weight + inputs.teacher_weight).op("ReduceSum", keepdims=0)
    share = total.op("Max", _FLOOR).op("Reciprocal")
    nll_share, teacher_share = inputs.nll_weight * share, inputs.teacher_weight * share
    per_row = teacher_share * divergence.sum() - nll_share * prediction.log_prob
    loss = per_row.op("ReduceSum", keepdims=0)

    v = q * (ratio * backward + gap.op("Sign") * (distance * 0.5)) - p * forward
    v_named = v.columns(0, -1)
    # At its floor the last outcome moves no more.
    v_rest = v.columns(-1, _END) * q_over.op("Greater", _FLOOR).cast(ir.DataType.FLOAT)
    u = v_rest / q_rest
    everywhere = teacher_share * (u - v_named.sum() - v_rest) + nll_share
    on_top = ((v_named - q_named * u) * teacher_share).beside(-nll_share)
    where = inputs.teacher_ids.beside(inputs.next)
    gradient = (prediction.probs * everywhere).op(
        "ScatterElements", where, on_top, axis=-1, reduction="add"
    )
    return loss, gradient


def _at(rows: Expression, ids: Expression) -> Expression:
    """Return the entries of each row that the same row of `ids` names."""
    return rows.op("GatherElements", ids, axis=-1)
