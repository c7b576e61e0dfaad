"""Adapters to and from PEFT: the same numbers on both sides, and one line for what cannot pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgedraft.export.acceptance_head import PREFIX, AcceptanceHead
from edgedraft.export.adapters import Pair, adapter_from_peft, peft_from_adapter
from edgedraft.export.cli import main
from edgedraft.export.training_step import named_weights, trainable_model
from edgedraft.runtime.adapter_file import Adapter, manifest_path, read_adapter, write_adapter
from edgedraft.runtime.lora import Lora
from edgedraft.runtime.safetensors_file import read_safetensors
from graphs import tiny_target, write_target_folder
from tiny_drafter import add_training_files, safetensors, tiny_lora
from tiny_models import CONFIGS, make_model

peft = pytest.importorskip("peft", reason='needs peft: pip install "edgedraft[export]"')

SOME = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")
# PEFT warns of every LoRA of a tied head, since merging it in place would change the embedding.
pytestmark = pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")


class Drafter:
    """A tiny Llama, and the folder of it that a device learns with."""

    def __init__(
        self, folder: Path, *, tied: bool, seed: int = 0, head: AcceptanceHead | None = None
    ) -> None:
        config = CONFIGS["llama"]()
        config.tie_word_embeddings = tied
        self.config = config
        model = make_model(config)
        for parameter in model.parameters():
            parameter.data = (parameter.data + seed / 8).half().float()
        self.state = model.state_dict()
        named = named_weights(model, head)
        own = {x: w.detach().half().numpy() for x, w in named.items()}
        self.modules = trainable_model(model, head).modules
        self.folder = write_target_folder(
            folder, format="edgedraft-drafter", graph=b"not needed", chat_template=None
        )
        add_training_files(folder, own, self.modules, {name: [name] for name in self.modules})

    def model(self) -> Any:
        """Return it afresh."""
        model = make_model(self.config)
        model.load_state_dict(self.state)
        return model


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return Drafter(tmp_path_factory.mktemp("drafter"), tied=request.param)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def pair(drafter: Drafter, target: Path) -> Pair:
    return Pair.open(drafter.folder, target)


@pytest.fixture
def run(drafter: Drafter, target: Path) -> Callable[..., int]:
    """Run a command for the pair."""
    folders = ["--drafter", str(drafter.folder), "--target", str(target)]
    return lambda command, source, out: main([command, str(source), *folders, "--out", str(out)])


@pytest.fixture
def trained(drafter: Drafter) -> Callable[..., Any]:
    """Train nothing, but return a PEFT model whose tensors are all different from zero."""

    def make(modules: Any = ("q_proj", "down_proj", "lm_head"), **settings: Any) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            target_modules=list(modules),
            task_type="CAUSAL_LM",
            **{"r": 4, "lora_alpha": 6, **settings},
        )
        model = peft.get_peft_model(drafter.model(), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = 0.3 * torch.randn_like(parameter)
        return model.eval()

    return make


def logits(model: Any) -> torch.Tensor:
    """Compute in double precision: what is left of a difference is one of meaning."""
    with torch.inference_mode():
        rows: torch.Tensor = model.double()(input_ids=torch.arange(5, 25)[None]).logits
    return rows


def merged(drafter: Drafter, lora: Lora) -> Any:
    """Return the drafter with other weights, its embedding as it was."""
    model = drafter.model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for module in lora.modules:
        a, b = (lora.tensors[f"{module}.lora_{x}"].astype(np.float64) for x in "AB")
        weight = model.get_submodule(module).weight
        weight.data = weight.double() + torch.from_numpy(lora.scale * b @ a)
    return model


def change(path: Path, **values: Any) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | values))


def test_there_and_back_again_nothing_changes(
    drafter: Drafter, pair: Pair, run: Callable[..., int], tmp_path: Path
) -> None:
    there, peft_folder, back = (tmp_path / x for x in ("a.onnx_adapter", "peft", "b.onnx_adapter"))
    shapes = {name: pair.base.shapes[name] for name in SOME}
    lora = Lora(4, 2.5, tiny_lora(shapes, rank=4).tensors)
    write_adapter(there, Adapter(lora, provenance={"lessons": 7}), pair.base)
    assert run("peft", there, peft_folder) == 0
    assert run("adapter", peft_folder, back) == 0
    first, second = (read_adapter(path, pair.base) for path in (there, back))
    assert (second.lora.rank, second.lora.alpha) == (4, 2.5)
    assert first.lora.tensors.keys() == second.lora.tensors.keys()
    for name, tensor in first.lora.tensors.items():
        assert np.array_equal(tensor, second.lora.tensors[name]), name
    assert second.provenance["training"] == {"lessons": 7}


def test_what_an_acceptance_head_learned_goes_there_and_back_beside_the_checkpoint(
    target: Path, tmp_path: Path
) -> None:
    head = AcceptanceHead(64)
    torch.nn.init.zeros_(head.out)
    torch.nn.init.zeros_(head.scale)
    drafter = Drafter(tmp_path / "drafter", tied=True, head=head)
    pair = Pair.open(drafter.folder, target)
    widen = f"{PREFIX}widen"
    lora = tiny_lora({name: pair.base.shapes[name] for name in (*SOME, widen)}, rank=4)
    write_adapter(there := tmp_path / "a.onnx_adapter", Adapter(lora), pair.base)
    folder = peft_from_adapter(there, pair, tmp_path / "peft")
    assert peft.PeftModel.from_pretrained(drafter.model(), folder).peft_config
    assert widen not in json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    back = read_adapter(adapter_from_peft(folder, pair, tmp_path / "b"), pair.base).lora
    assert back.tensors.keys() == lora.tensors.keys()
    assert all(np.array_equal(x, back.tensors[name]) for name, x in lora.tensors.items())


def test_peft_says_of_a_device_adapter_what_merged_weights_say(
    drafter: Drafter, pair: Pair, run: Callable[..., int], tmp_path: Path
) -> None:
    lora = tiny_lora(pair.base.shapes)
    write_adapter(tmp_path / "a.onnx_adapter", Adapter(lora), pair.base)
    assert run("peft", tmp_path / "a.onnx_adapter", tmp_path / "peft") == 0
    opened = peft.PeftModel.from_pretrained(drafter.model(), tmp_path / "peft")
    expected = logits(merged(drafter, lora))
    torch.testing.assert_close(logits(opened), expected, rtol=0, atol=1e-9)
    assert (expected - logits(drafter.model())).abs().max() > 0.1


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"lora_alpha": 3, "r": 2}])
@pytest.mark.parametrize("embeddings", [True, False], ids=["with a copy of the head", "without"])
def test_merged_weights_of_an_adapter_say_what_its_peft_model_said(
    drafter: Drafter,
    pair: Pair,
    run: Callable[..., int],
    trained: Callable[..., Any],
    tmp_path: Path,
    settings: dict[str, Any],
    embeddings: bool,
) -> None:
    model = trained(**settings)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=embeddings)
    assert run("adapter", tmp_path / "peft", tmp_path / "a") == 0, "the suffix is added"
    lora = read_adapter(tmp_path / "a.onnx_adapter", pair.base).lora
    torch.testing.assert_close(logits(merged(drafter, lora)), logits(model), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora is True, which an adapter file cannot express"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is {'q_proj': 2}"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["norm"]}, "modules_to_save is ['norm']"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the drafter"),
        ({"modules": ["embed_tokens"]}, "lora_embedding_A', which is not a LoRA of a linear"),
    ],
)
def test_what_an_adapter_cannot_express_is_refused_in_one_line(
    run: Callable[..., int],
    trained: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    message: str,
) -> None:
    trained(**settings).save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    refused(run, tmp_path, capsys, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"r": 0}, "r and lora_alpha must be > 0, got 0 and 6"),
        ({"lora_alpha": None}, "r and lora_alpha must be > 0, got 4 and None"),
        ({"r": 3}, "q_proj.lora_A is 4 x 64, expected 3 x 64"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(
    run: Callable[..., int],
    trained: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    trained(["q_proj"]).save_pretrained(tmp_path / "peft")
    change(tmp_path / "peft" / "adapter_config.json", **changes)
    refused(run, tmp_path, capsys, message)


def test_a_checkpoint_that_is_not_whole_or_not_this_drafters_is_refused_in_one_line(
    drafter: Drafter,
    run: Callable[..., int],
    trained: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "peft"
    refused(run, tmp_path, capsys, "has no adapter_config.json; expected a folder that PEFT's")
    trained(["v_proj", "lm_head"]).save_pretrained(folder, save_embedding_layers=True)
    weights = folder / "adapter_model.safetensors"

    (folder / "training.json").write_text('{"base": "0123456789abcdef"}')
    refused(run, tmp_path, capsys, "was trained on another drafter (0123456789ab, this one is ")
    (folder / "training.json").unlink()

    tensors = {name: np.array(x) for name, x in read_safetensors(weights).items()}
    other = {name: x + ("base_layer" in name) for name, x in tensors.items()}
    weights.write_bytes(safetensors(other))
    refused(run, tmp_path, capsys, "its copy of 'lm_head' is not this drafter's")

    missing = [x for x in tensors if "layers.1.self_attn.v_proj.lora_B" in x]
    weights.write_bytes(safetensors({k: x for k, x in tensors.items() if k not in missing}))
    refused(run, tmp_path, capsys, "layers.1.self_attn.v_proj.lora_B is missing")

    deeper = {name.replace("layers.1", "layers.2"): x for name, x in tensors.items()}
    weights.write_bytes(safetensors(deeper))
    refused(run, tmp_path, capsys, "changes 'model.layers.2.self_attn.v_proj', which this drafter")

    weights.write_bytes(weights.read_bytes()[:-100])
    refused(run, tmp_path, capsys, "is not all there")
    weights.unlink()
    refused(run, tmp_path, capsys, "has no adapter_model.safetensors; save the checkpoint again")


def test_nothing_is_overwritten_and_a_drafter_that_cannot_learn_has_no_adapter(
    drafter: Drafter,
    target: Path,
    pair: Pair,
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = tmp_path / "a.onnx_adapter"
    write_adapter(adapter, Adapter(tiny_lora(pair.base.shapes)), pair.base)
    assert run("peft", adapter, tmp_path / "peft") == 0
    before = {x.name: x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()}
    for command, source, out in (
        ("peft", adapter, tmp_path / "peft"),
        ("adapter", tmp_path / "peft", adapter),
    ):
        capsys.readouterr()
        assert run(command, source, out) == 2
        assert "is there already; remove it or choose another --out" in one_line(capsys)
    assert {x.name: x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()} == before
    assert manifest_path(adapter).exists()

    options = ["--target", str(target), "--drafter", str(target), "--out", str(tmp_path / "x")]
    assert main(["peft", str(adapter), *options]) == 2
    assert "this drafter cannot learn" in one_line(capsys)


def refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], message: str
) -> None:
    capsys.readouterr()
    assert run("adapter", tmp_path / "peft", tmp_path / "out") == 2
    assert message in one_line(capsys)
    assert not list(tmp_path.glob("out*"))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line
