"""Smoothing and rotation change weights, never what the model computes in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from edgedraft.export.rotate import norm_offset, rotated
from edgedraft.export.smooth import smooth
from tiny_models import CONFIGS, make_model, reference


def calibration() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [[int(x) for x in rng.integers(3, 304, 30)] for _ in range(4)]


def with_outliers(model: Any) -> Any:
    """Enlarge a channel behind every first norm and one inside every MLP."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[7] += 20
            layer.mlp.up_proj.weight[3] *= 30
    return model


def int8_errors(model: Any, tokens: list[int]) -> dict[str, float]:
    """Return how far each kind of linear is off in int8, relative to its exact output."""
    errors: dict[str, list[float]] = {}

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        step = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (rows / step).round() * step

    def compare(name: str) -> Any:
        def hook(linear: Any, inputs: tuple[torch.Tensor]) -> None:
            exact = inputs[0] @ linear.weight.T
            error = rounded(inputs[0]) @ rounded(linear.weight).T - exact
            errors.setdefault(name, []).append(float(error.norm() / exact.norm()))

        return hook

    hooks = [
        module.register_forward_pre_hook(compare(name.rsplit(".")[-1]))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    reference(model, tokens)
    for hook in hooks:
        hook.remove()
    return {name: sum(values) / len(values) for name, values in errors.items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_output_stays_the_same(family: str, text: list[int]) -> None:
    model = with_outliers(make_model(CONFIGS[family]()))
    before = reference(model, text)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    smooth(model, calibration())
    assert np.abs(reference(model, text) - before).max() <= 2e-5 * np.ptp(before)
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, weights[name])}
    for part in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        assert f"model.layers.1.{part}.weight" in changed


@pytest.mark.parametrize("rotate_stream", [False, True])
def test_hidden_states_stay_the_models_own_where_that_is_asked_for(
    rotate_stream: bool, text: list[int]
) -> None:
    model = with_outliers(make_model(CONFIGS["llama"]()))
    ids = torch.tensor([text])
    with torch.no_grad():
        before = model.model(input_ids=ids).last_hidden_state
        smooth(model, calibration(), rotate_stream=rotate_stream)
        after = model.model(input_ids=ids).last_hidden_state
    assert torch.allclose(after, before, atol=1e-4, rtol=1e-4) != rotate_stream


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_eight_bits_lose_less_afterwards(family: str, text: list[int]) -> None:
    model = with_outliers(make_model(CONFIGS[family]()))
    before = int8_errors(model, text)
    smooth(model, calibration())
    after = int8_errors(model, text)
    for part in ("q_proj", "k_proj", "v_proj", "down_proj"):
        assert after[part] < 0.7 * before[part], (part, before, after)


def test_norms_behind_attention_keep_the_stream_unrotated() -> None:
    model = make_model(CONFIGS["gemma3"]())
    embedding = model.model.embed_tokens.weight.clone()
    smooth(model, calibration())
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_head_is_untied() -> None:
    model = make_model(CONFIGS["llama, tied head, dynamic rope"]())
    smooth(model, calibration())
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings


def test_a_strange_architecture_is_left_alone(text: list[int]) -> None:
    config = hf.GPT2Config(vocab_size=304, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    model = make_model(config)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    smooth(model, calibration())
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())


def test_smoothing_twice_gives_the_same_weights_bit_for_bit() -> None:
    models = [with_outliers(make_model(CONFIGS["llama"]())) for _ in range(2)]
    for model in models:
        smooth(model, calibration())
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_calibration_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration must hold at least one token"):
        smooth(make_model(CONFIGS["llama"]()), [[]])


@pytest.mark.parametrize("width", [1, 9, 64, 96])
def test_a_rotation_is_orthogonal_and_spreads_what_stands_out(width: int) -> None:
    unit = torch.eye(width, dtype=torch.float64)
    matrix = rotated(unit)
    torch.testing.assert_close(matrix @ matrix.T, unit)
    assert matrix.abs().amax() <= (2 / width) ** 0.5 + 1e-12
    if width >= 64:  # nor does it gather what was spread
        assert rotated(torch.ones(1, width)).abs().amax() < 0.5 * width**0.5


def test_norms_are_recognised_by_what_they_compute() -> None:
    llama, gemma = (make_model(CONFIGS[x]()) for x in ("llama", "gemma3"))
    assert norm_offset(llama.model.norm) == 0
    assert norm_offset(gemma.model.norm) == 1
    assert norm_offset(torch.nn.LayerNorm(8)) is None
