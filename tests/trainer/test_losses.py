"""Every loss equals its formula, computed directly."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')

from edgedraft.trainer.cli import build_parser  # noqa: E402
from edgedraft.trainer.losses import (  # noqa: E402
    LOSSES,
    blended_kl_tv,
    cross_entropy,
    forward_kl,
    reverse_kl,
    total_variation,
)
from edgedraft.trainer.trie_marginal import trie_marginal  # noqa: E402

ROWS, VOCAB, K = 6, 11, 4


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Return logits, ids and probabilities, and both distributions in full."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 2
    ids = np.stack([rng.permutation(VOCAB)[:K] for _ in range(ROWS)])
    probs = rng.dirichlet(np.ones(K), ROWS).astype(np.float32)
    probs[0] = [0.4, 0.6, 0, 0]  # padded: the ids of the padding must not matter
    ids[0, 2:] = ids[0, 0]
    p = np.zeros((ROWS, VOCAB))
    for row in range(ROWS):
        np.add.at(p[row], ids[row], probs[row])
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return torch.tensor(logits), torch.tensor(ids), torch.tensor(probs), p, q.astype(np.float64)


def test_cross_entropy_is_minus_the_log_of_the_tokens_probability() -> None:
    logits, ids, _, _, q = case()
    tokens = ids[:, 0]
    expected = -np.log(q[np.arange(ROWS), tokens.numpy()])
    assert cross_entropy(logits, tokens).numpy() == pytest.approx(expected, rel=1e-5)


def test_forward_kl_weighs_by_the_teacher() -> None:
    logits, ids, probs, p, q = case()
    safe = np.where(p > 0, p, 1)
    expected = (p * np.log(safe / q)).sum(-1)
    assert forward_kl(logits, ids, probs).numpy() == pytest.approx(expected, rel=1e-4)


def test_reverse_kl_weighs_by_the_drafter() -> None:
    logits, ids, probs, p, q = case()
    floored = (1 - 1e-4) * p + 1e-4 / VOCAB
    expected = (q * np.log(q / floored)).sum(-1)
    assert reverse_kl(logits, ids, probs).numpy() == pytest.approx(expected, rel=1e-4)


def test_total_variation_is_half_the_distance() -> None:
    logits, ids, probs, p, q = case()
    expected = np.abs(p - q).sum(-1) / 2
    assert total_variation(logits, ids, probs).numpy() == pytest.approx(expected, abs=1e-6)


def test_the_blend_moves_from_kl_to_total_variation_as_drafts_improve() -> None:
    logits, ids, probs, p, _ = case()
    kl, variation = forward_kl(logits, ids, probs), total_variation(logits, ids, probs)
    share = float(np.exp(-3 * (1 - variation.numpy().mean())))
    expected = (share * kl + (1 - share) * variation).numpy()
    assert blended_kl_tv(logits, ids, probs).numpy() == pytest.approx(expected, rel=1e-5)
    good = torch.tensor(np.log(p + 1e-9))
    assert blended_kl_tv(good, ids, probs).numpy() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("loss", [forward_kl, reverse_kl, total_variation, blended_kl_tv])
def test_descending_a_loss_brings_the_drafter_to_the_teacher(loss: object) -> None:
    logits, ids, probs, p, _ = case()
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        loss(logits, ids, probs).sum().backward()  # type: ignore[operator]
        optimizer.step()
    assert logits.detach().softmax(-1).numpy() == pytest.approx(p, abs=0.02)


def test_the_command_line_offers_exactly_these_losses() -> None:
    command = ["drafter", "--tokenizer", "t", "--out", "o", "--loss"]
    for loss in LOSSES:
        assert build_parser().parse_args([*command, loss]).loss == loss
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command, "l2"])


def test_the_trie_marginal_is_the_chance_of_the_next_piece() -> None:
    """Against the definition: condition on what is written, sum over what comes next."""
    rng = np.random.default_rng(1)
    spellings = [[5], [5, 6], [5, 6, 7], [5, 8], [9], [9, 6], [4, 5, 6, 7]]
    probs = rng.dirichlet(np.ones(len(spellings))).astype(np.float32)
    for true in spellings:
        marginals = trie_marginal(spellings, probs, true)
        assert len(marginals) == len(true)
        for depth, marginal in enumerate(marginals):
            going_on = [
                (spelling[depth], float(prob))
                for spelling, prob in zip(spellings, probs, strict=True)
                if len(spelling) > depth and spelling[:depth] == true[:depth]
            ]
            total = sum(prob for _, prob in going_on)
            for piece in range(10):
                expected = sum(prob for d, prob in going_on if d == piece) / total
                assert marginal.get(piece, 0.0) == pytest.approx(expected)


def test_a_teacher_that_never_thought_of_the_token_teaches_its_spelling() -> None:
    assert trie_marginal([[5]], np.ones(1, np.float32), [6, 7])[1] == {7: 1.0}
    assert trie_marginal([[6, 7]], np.ones(1, np.float32), [6, 7]) == [{6: 1.0}, {7: 1.0}]
