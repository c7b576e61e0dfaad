"""The training step graph: its loss and gradients are those of torch's autograd."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from edgedraft.export.acceptance_head import AcceptanceHead
from edgedraft.export.errors import ExportError
from edgedraft.export.training_files import round_to_half
from edgedraft.export.training_step import (
    export_evaluation,
    export_training_step,
    named_weights,
    trainable_model,
)
from edgedraft.runtime import SessionConfig
from edgedraft.runtime.ort_session import open_session
from tiny_models import CONFIGS, make_model

SHIPPED = Path(__file__).parents[2] / "drafter"
TINY = (
    "llama",
    "llama, one kv head, linear rope",
    "llama, no grouping, llama3 rope",
    "llama, biases, yarn rope",
    "tied",
)
GOLDEN = LlamaConfig(  # of tests/golden/training_step.onnx
    vocab_size=60,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.15,
    tie_word_embeddings=True,
)
FLOOR = 1e-6
WIDEN = "acceptance_head.widen"
Array = npt.NDArray[Any]
Feeds = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Drafter:
    """A model in both worlds."""

    model: Any
    weights: Feeds
    shapes: Mapping[str, tuple[int, ...]]  # module -> (outputs, inputs)
    step: Any  # sessions
    evaluation: Any
    head: AcceptanceHead | None = None

    @property
    def vocab(self) -> int:
        return int(self.model.config.vocab_size)


@cache
def drafter(name: str) -> Drafter:
    """Return a tiny model by the name of its configuration, or the shipped one."""
    if name == "shipped":
        model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    elif name == "tied":
        config = CONFIGS["llama"]()
        config.tie_word_embeddings = True
        model = make_model(config)
    else:
        model = make_model(CONFIGS[name]())
    return as_drafter(model)


def make_head(width: int) -> AcceptanceHead:
    """Return a head whose every weight counts."""
    torch.manual_seed(1)
    head = AcceptanceHead(width)
    with torch.no_grad():
        head.out.normal_(std=0.3)
        head.scale.fill_(0.3)
    return head


def as_drafter(model: Any, head: AcceptanceHead | None = None) -> Drafter:
    for part in (model, head):
        if part is not None:
            round_to_half(part)
    trainable = trainable_model(model, head)
    graphs = [make(trainable) for make in (export_training_step, export_evaluation)]
    sessions = [
        open_session(ir.to_proto(graph).SerializeToString(), SessionConfig(threads=1))
        for graph in graphs
    ]
    return Drafter(
        model=model,
        weights={k: x.detach().half().numpy() for k, x in named_weights(model, head).items()},
        shapes={module: trainable.weights[x] for module, x in trainable.modules.items()},
        step=sessions[0],
        evaluation=sessions[1],
        head=head,
    )


def make_lora(drafter: Drafter, rank: int, seed: int = 0) -> Feeds:
    rng = np.random.default_rng(seed)
    lora: Feeds = {}
    for module, (outputs, inputs) in drafter.shapes.items():
        for name, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            size = 1 / np.sqrt(inputs) if name == "A" else 0.02
            values = size * rng.standard_normal(shape)
            lora[f"{module}.lora_{name}"] = values.astype(np.float32)
    return lora


def make_batch(
    drafter: Drafter,
    shape: tuple[int, int],
    n: int,
    teachers: int,
    divergence: tuple[float, float, float] = (0.5, 0.3, 0.2),
    seed: int = 0,
) -> Feeds:
    """Return a random batch; the teacher leaves something over, and names nothing in places."""
    rng = np.random.default_rng(seed)
    ids = [rng.choice(drafter.vocab, teachers, replace=False) for _ in range(n)]
    probs = rng.dirichlet(np.ones(teachers + 1), n)[:, :teachers]
    probs[rng.random(probs.shape) < 0.2] = 0
    return {
        "tokens": rng.integers(0, drafter.vocab, shape),
        "at": rng.integers(0, shape[0] * shape[1], n),  # some of them twice
        "next": rng.integers(0, drafter.vocab, n),
        "nll_weight": rng.choice([0.0, 0.2, 1.0], n).astype(np.float32),
        "teacher_ids": np.array(ids, np.int64).reshape(n, teachers),
        "teacher_probs": probs.astype(np.float32),
        "teacher_weight": rng.choice([0.3, 1.0], n).astype(np.float32),
        "divergence": np.array(divergence, np.float32),
        "scale": np.array(1.5, np.float32),
    }


def run(drafter: Drafter, batch: Feeds, lora: Feeds) -> Feeds:
    return run_graph(drafter.step, {**drafter.weights, **batch, **lora})


def run_graph(session: Any, feeds: Feeds) -> Feeds:
    """Run a graph on those feeds that it takes."""
    names, wanted = ([x.name for x in y] for y in (session.get_outputs(), session.get_inputs()))
    return dict(zip(names, session.run(names, {x: feeds[x] for x in wanted}), strict=True))


def logits_of(drafter: Drafter, batch: Feeds, lora: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return transformers' logits with the LoRA merged into the weights."""
    model = drafter.model
    changed = {}
    for module in drafter.shapes:
        if module == WIDEN:
            continue
        a, b = lora[f"{module}.lora_A"], lora[f"{module}.lora_B"]
        frozen = model.get_submodule(module).weight.detach()
        changed[f"{module}.weight"] = frozen + float(batch["scale"]) * b @ a
    logits: torch.Tensor = torch.func.functional_call(
        model,
        changed,
        kwargs={"input_ids": torch.from_numpy(batch["tokens"]), "use_cache": False},
        tie_weights=False,
    ).logits
    return logits.flatten(0, 1)[torch.from_numpy(batch["at"])]


def loss_of(logits: torch.Tensor, batch: Feeds) -> torch.Tensor:
    """The loss as docs/formats.md defines it, over whole distributions."""
    t = {name: torch.from_numpy(x) for name, x in batch.items()}
    log_q = torch.log_softmax(logits, -1)
    nll = -log_q.gather(1, t["next"][:, None])[:, 0]
    named = t["teacher_probs"] > 0
    q = log_q.gather(1, t["teacher_ids"]).exp() * named
    p = torch.cat([t["teacher_probs"], (1 - t["teacher_probs"].sum(1, True)).clamp(min=0)], 1)
    q = torch.cat([q, (1 - q.sum(1, True)).clamp(min=FLOOR)], 1)
    log_p = p.clamp(min=FLOOR).log()
    log_q = torch.where(q > 0, q, 1).log()
    forward = (p * (log_p - log_q)).sum(1)
    backward = (q * (log_q - log_p)).sum(1)
    distance = (p - q).abs().sum(1) / 2
    divergence = torch.stack([forward, backward, distance], 1) @ t["divergence"]
    total = (t["nll_weight"] + t["teacher_weight"]).sum().clamp(min=FLOOR)
    return (t["nll_weight"] * nll + t["teacher_weight"] * divergence).sum() / total


def judged(drafter: Drafter, batch: Feeds, lora: Feeds) -> Feeds:
    """What an acceptance head says and where its cross-entropy falls, by autograd: the head as
    transformers' hidden states reach it, with its LoRA merged and the drafter's.
    """
    assert drafter.head is not None
    tensors = {name: torch.from_numpy(x) for name, x in lora.items()}
    own = [f"{WIDEN}.lora_{x}" for x in "AB"]
    for name in own:
        tensors[name].requires_grad_()
    hidden: list[torch.Tensor] = []
    hook = drafter.model.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    with torch.no_grad():
        logits = logits_of(drafter, batch, tensors)
    hook.remove()
    rows = hidden[0].flatten(0, 1)[torch.from_numpy(batch["at"])]
    a, b = (tensors[name] for name in own)
    weight = drafter.head.widen.weight.detach() + float(batch["scale"]) * b @ a
    said = torch.func.functional_call(
        drafter.head, {"widen.weight": weight}, (rows[None], logits[None])
    )
    hit = (logits.argmax(-1) == torch.from_numpy(batch["next"])).float()
    loss = torch.nn.functional.binary_cross_entropy(said, hit)
    gradients = torch.autograd.grad(loss, [tensors[name] for name in own])
    return {
        "acceptance": said.detach().numpy(),
        **{f"{name}.grad": x.numpy() for name, x in zip(own, gradients, strict=True)},
    }


def in_double(drafter: Drafter, batch: Feeds, lora: Feeds) -> tuple[Drafter, Feeds, Feeds]:
    """Return the same in float64, where the reference adds no rounding of its own."""
    feeds, wide = (
        {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in values.items()}
        for values in (batch, lora)
    )
    return replace(drafter, model=deepcopy(drafter.model).double()), feeds, wide


def autograd(drafter: Drafter, batch: Feeds, lora: Feeds) -> Feeds:
    tensors = {name: torch.from_numpy(x).requires_grad_() for name, x in lora.items()}
    logits = logits_of(drafter, batch, tensors)
    loss = loss_of(logits, batch)
    gradients = torch.autograd.grad(loss, list(tensors.values()))
    probs = torch.softmax(logits.detach(), -1)
    following = torch.from_numpy(batch["next"])
    return {
        "loss": loss.detach().numpy(),
        "hit": (probs.argmax(-1) == following).float().numpy(),
        "prob": probs.gather(1, following[:, None])[:, 0].numpy(),
        **{f"{k}.grad": x.numpy() for k, x in zip(tensors, gradients, strict=True)},
    }


def assert_same(got: Feeds, expected: Feeds, tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    assert float(got["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6, abs=1e-6)
    assert (got["hit"] == expected["hit"]).all()
    np.testing.assert_allclose(got["prob"], expected["prob"], rtol=1e-4)
    sizes = {x: float(np.linalg.norm(expected[x])) for x in expected if x.endswith(".grad")}
    for name, size in sizes.items():
        # A gradient of zero, of queries that see one key, comes out as rounding.
        bound = max(tolerance * size, 1e-6 * max(sizes.values()))
        assert np.linalg.norm(got[name] - expected[name]) <= bound, name


@pytest.mark.parametrize("name", [*TINY, "shipped"])
@pytest.mark.parametrize(
    ("shape", "n", "teachers", "rank"), [((1, 2), 1, 1, 1), ((3, 9), 14, 5, 4), ((1, 33), 6, 0, 2)]
)
def test_loss_and_gradients_are_those_of_autograd(
    name: str, shape: tuple[int, int], n: int, teachers: int, rank: int
) -> None:
    made = drafter(name)
    batch, lora = make_batch(made, shape, n, teachers), make_lora(made, rank)
    # Random tokens are far from anything the shipped drafter knows: fp32 itself is up to 5e-5 off.
    tolerance = 1e-4 if name == "shipped" else 1e-5
    assert_same(run(made, batch, lora), autograd(*in_double(made, batch, lora)), tolerance)


@pytest.mark.parametrize(
    "divergence",
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)],
    ids=["KL(p||q)", "KL(q||p)", "TV", "-"],
)
def test_each_divergence_alone(divergence: tuple[float, float, float]) -> None:
    made = drafter("llama")
    batch, lora = make_batch(made, (2, 8), 9, 6, divergence), make_lora(made, 3)
    assert_same(run(made, batch, lora), autograd(made, batch, lora))


def test_a_teacher_may_name_everything_or_nothing() -> None:
    made = drafter("llama")
    batch, lora = make_batch(made, (2, 8), 9, made.vocab), make_lora(made, 3)
    # Of every piece something, and of the rest, which has no pieces, nothing or a fifth.
    batch["teacher_probs"] += 1e-3
    batch["teacher_probs"] /= batch["teacher_probs"].sum(1, keepdims=True)
    batch["teacher_probs"][2:4] *= 0.8
    batch["teacher_probs"][4:] = 0
    assert_same(run(made, batch, lora), autograd(made, batch, lora))


def test_gradients_are_slopes_of_the_loss() -> None:
    made = drafter("tied")
    batch, lora = make_batch(made, (2, 8), 9, 4), make_lora(made, 3)
    got = run(made, batch, lora)
    rng = np.random.default_rng(1)
    for name in lora:
        # Half of the entries at once: rounding drowns a single one.
        direction = got[f"{name}.grad"] * rng.integers(0, 2, lora[name].shape)
        step = (1e-2 / np.linalg.norm(direction) * direction).astype(np.float32)
        up, down = (
            float(run(made, batch, {**lora, name: lora[name] + sign * step})["loss"])
            for sign in (1, -1)
        )
        slope = 2 * float((got[f"{name}.grad"] * step).sum())
        assert up - down == pytest.approx(slope, rel=0.02, abs=2e-6), name


def test_padding_changes_nothing() -> None:
    made = drafter("llama")
    batch, lora = make_batch(made, (3, 7), 10, 4), make_lora(made, 2)
    padded = dict(batch)
    padded["tokens"] = np.pad(batch["tokens"], ((0, 0), (0, 5)), constant_values=9)
    padded["at"] = batch["at"] // 7 * 12 + batch["at"] % 7
    twice = np.repeat(batch["teacher_ids"][:, :1], 3, axis=1)  # pieces of probability 0
    padded["teacher_ids"] = np.concatenate([batch["teacher_ids"], twice], axis=1)
    padded["teacher_probs"] = np.pad(batch["teacher_probs"], ((0, 0), (0, 3)))
    assert_same(run(made, padded, lora), run(made, batch, lora))


def test_a_batch_without_weight_teaches_nothing() -> None:
    made = drafter("llama")
    batch, lora = make_batch(made, (2, 5), 4, 3), make_lora(made, 2)
    for name in ("nll_weight", "teacher_weight"):
        batch[name] = np.zeros_like(batch[name])
    got = run(made, batch, lora)
    assert got["loss"] == 0
    assert all((x == 0).all() for name, x in got.items() if name.endswith(".grad"))


def test_a_module_of_rank_0_is_the_frozen_one() -> None:
    made = drafter("tied")
    batch, lora = make_batch(made, (2, 8), 6, 3), make_lora(made, 4)
    off = [name for name in lora if "q_proj" not in name and "lm_head" not in name]
    without = {name: np.zeros_like(x) if name in off else x for name, x in lora.items()}
    of_rank_0 = dict(lora)
    for name in off:
        shape = [0 if x == 4 else x for x in lora[name].shape]
        of_rank_0[name] = np.zeros(shape, np.float32)
    expected, got = run(made, batch, without), run(made, batch, of_rank_0)
    for name in off:
        assert got.pop(f"{name}.grad").shape == of_rank_0[name].shape
        del expected[f"{name}.grad"]
    assert_same(got, expected)


def test_the_evaluation_graph_predicts_what_the_step_graph_does() -> None:
    made = drafter("tied")
    batch, lora = make_batch(made, (3, 6), 8, 2), make_lora(made, 2)
    logits = logits_of(made, batch, {name: torch.from_numpy(x) for name, x in lora.items()})
    batch["next"][:5] = logits.argmax(-1)[:5].numpy()
    expected = run(made, batch, lora)
    wanted = {x.name for x in made.evaluation.get_inputs()}
    feeds = {k: x for k, x in {**made.weights, **batch, **lora}.items() if k in wanted}
    hit, prob = made.evaluation.run(["hit", "prob"], feeds)
    assert (hit == expected["hit"]).all() and hit[:5].all() and not hit[5:].all()
    np.testing.assert_allclose(prob, expected["prob"], rtol=1e-6)


def test_the_evaluation_graph_says_what_the_acceptance_head_does_and_how_it_should_move() -> None:
    made = as_drafter(make_model(GOLDEN), make_head(GOLDEN.hidden_size))
    batch, lora = make_batch(made, (3, 6), 12, 2), make_lora(made, 2)
    logits = logits_of(made, batch, {name: torch.from_numpy(x) for name, x in lora.items()})
    batch["next"][:6] = logits.argmax(-1)[:6].numpy()  # half of them hit
    got = run_graph(made.evaluation, {**made.weights, **batch, **lora})
    expected = judged(made, batch, lora)
    assert got.keys() == {"hit", "prob", *expected}  # and no gradient of the drafter's
    np.testing.assert_allclose(got["acceptance"], expected["acceptance"], rtol=1e-4)
    for name in expected.keys() - {"acceptance"}:
        size = np.linalg.norm(expected[name])
        assert size > 1e-4 and np.linalg.norm(got[name] - expected[name]) < 1e-4 * size


def test_attention_is_never_a_denormal_number() -> None:
    """Arithmetic with denormal numbers takes a processor many times as long."""
    model = make_model(GOLDEN)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 4e3  # scores some hundreds apart
    made = as_drafter(model)
    batch, lora = make_batch(made, (2, 12), 8, 4), make_lora(made, 2)
    graph = ir.to_proto(export_training_step(trainable_model(model)))
    kept = [x for x in graph.graph.node if x.op_type == "ThresholdedRelu"]
    assert len(kept) == len(model.model.layers)
    names = [name for node in kept for name in (node.input[0], node.output[0])]
    graph.graph.output.extend(onnx.ValueInfoProto(name=x) for x in names)
    session = open_session(graph.SerializeToString(), SessionConfig(threads=1))
    found = run_graph(session, {**made.weights, **batch, **lora})
    tiny = np.finfo(np.float32).tiny
    for before, after in zip(names[::2], names[1::2], strict=True):
        positive = found[before] > 0
        assert (positive & (found[before] < tiny)).any(), "the test shows nothing"
        assert not (positive & (found[after] > 0) & (found[after] < 1e-20)).any()
        np.testing.assert_allclose(found[after], found[before], atol=1e-20)


def test_a_head_changes_nothing_of_the_step() -> None:
    made = as_drafter(make_model(GOLDEN), make_head(GOLDEN.hidden_size))
    bare = as_drafter(make_model(GOLDEN))
    assert [x.name for x in made.step.get_inputs()] == [x.name for x in bare.step.get_inputs()]
    assert [x.name for x in made.step.get_outputs()] == [x.name for x in bare.step.get_outputs()]
    assert made.shapes.keys() - bare.shapes.keys() == {WIDEN}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama, tied head, dynamic rope", "dynamic RoPE cannot learn"),
        ("gemma3", "Gemma3ForCausalLM cannot learn on the device"),
        ("mistral, sliding window", "MistralForCausalLM cannot learn on the device"),
    ],
)
def test_what_is_not_built_like_llama_is_refused(name: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        trainable_model(make_model(CONFIGS[name]()))


def test_a_small_graph_without_weights() -> None:
    graph = ir.to_proto(export_training_step(trainable_model(drafter("shipped").model)))
    assert graph.ByteSize() < 100_000
    assert all(x.domain in ("", "ai.onnx") for x in graph.opset_import), "standard operators only"


def test_the_recorded_step_is_the_one_written_today() -> None:
    recorded = onnx.load(Path(__file__).parents[1] / "golden" / "training_step.onnx")
    today = ir.to_proto(export_training_step(trainable_model(make_model(GOLDEN))))
    assert recorded.graph.input == today.graph.input
    assert recorded.graph.output == today.graph.output
    assert [x.op_type for x in recorded.graph.node] == [x.op_type for x in today.graph.node]


def test_the_recorded_evaluation_is_the_one_written_today() -> None:
    recorded = onnx.load(Path(__file__).parents[1] / "golden" / "evaluation.onnx")
    trainable = trainable_model(make_model(GOLDEN), make_head(GOLDEN.hidden_size))
    today = ir.to_proto(export_evaluation(trainable))
    assert recorded.graph.input == today.graph.input
    assert recorded.graph.output == today.graph.output
    assert [x.op_type for x in recorded.graph.node] == [x.op_type for x in today.graph.node]
