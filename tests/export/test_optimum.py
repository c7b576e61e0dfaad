"""The way through optimum-onnx, and folders that optimum wrote, used as they are."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
import transformers as hf

from edgedraft.export.cli import main
from edgedraft.export.errors import ExportError
from edgedraft.export.optimum_source import (
    export_with_optimum,
    remove_repetitions,
    select_logit_rows,
)
from edgedraft.export.sources import Source, check_rope_was_read
from edgedraft.runtime import DecodeConfig, Engine, open_target_folder
from edgedraft.runtime.ort_session import onnxruntime
from graphs import TINY_VOCAB_SIZE, byte_level_tokenizer
from tiny_models import CONTEXT, make_model, open_graph, reference

needs_optimum = pytest.mark.skipif(
    find_spec("optimum") is None or find_spec("optimum.exporters") is None,
    reason="needs optimum-onnx: pip install 'edgedraft[optimum]'",
)
VOCAB = TINY_VOCAB_SIZE
_IDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15}
_GPT = {**_IDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_PHI = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
_LLAMA = {**_PHI, "num_key_value_heads": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_LLAMA),
    "tied llama": lambda: hf.LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "qwen2": lambda: hf.Qwen2Config(**_LLAMA),
    "mistral, sliding window": lambda: hf.MistralConfig(**_LLAMA, sliding_window=6),
    # Soft-capped logits: the head does not come last.
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_LLAMA, head_dim=16, sliding_window=6, final_logit_softcapping=5.0
    ),
    # Learned positions, parallel residuals, one key for all heads, ALiBi: not the direct way's.
    "gpt2": lambda: hf.GPT2Config(**_GPT),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**_GPT),
    "phi": lambda: hf.PhiConfig(**_PHI),
    "bloom": lambda: hf.BloomConfig(**_IDS, hidden_size=64, n_layer=2, n_head=4),
}
TEXT = [int(x) for x in np.random.default_rng(0).integers(3, VOCAB, 40)]
PROMPT = [7, 30, 31, 32, 9, 30, 31, 32]


def source_of(model: Any) -> Source:
    """Return a model as the exporter's other parts see it."""
    return Source(
        name="tiny",
        model=model,
        tokenizer=byte_level_tokenizer(),
        chat_template=None,
        vocab_size=VOCAB,
        bos_token_id=1,
        eos_token_ids=(2,),
        context_length=CONTEXT,
        provenance={},
    )


def save_model(config: Any, folder: Path) -> Any:
    """Save a tiny model with a tokenizer; return the model."""
    model = make_model(config)
    model.save_pretrained(folder)
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    fast.save_pretrained(folder)
    return model


def greedy(model: Any, count: int) -> list[int]:
    """Return transformers' own greedy continuation of `PROMPT`."""
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return [int(x) for x in ids[0, len(PROMPT) :]]


def answers(folder: Path, count: int = 40) -> tuple[list[int], npt.NDArray[Any], Engine]:
    """Return the token ids and logits of a folder's plain answer, once the speculative one was
    found equal, and the engine that speculated.
    """
    outputs = []
    for drafter in ("none", "lookup"):
        engine = Engine.open(folder, drafters=[drafter])
        traces = [p.trace for p in engine.stream(PROMPT, DecodeConfig(max_tokens=count)) if p.trace]
        tokens = [token for trace in traces for token in trace.emitted]
        outputs.append((tokens, engine))
    (plain, _), (speculative, engine) = outputs
    assert speculative == plain
    target = engine.target
    rows = []
    for width in (1, 2, 5, 16):
        target.rollback(0)
        target.extend(PROMPT)
        parts = [target.forward(plain[i : i + width]).copy() for i in range(0, count, width)]
        rows.append(np.concatenate(parts))
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])
    return plain, rows[0], engine


@needs_optimum
@pytest.mark.parametrize(
    "name", ["mistral, sliding window", "gemma3", "gpt2", "gpt_bigcode", "phi", "bloom"]
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name]())
    decoder = open_graph(export_with_optimum(source_of(model)), tmp_path, VOCAB)
    got = [decoder.forward(TEXT[:20]).copy()]
    decoder.forward([5, 6, 7, 8])  # a rejected draft
    decoder.rollback(20)
    for start, stop in ((20, 21), (21, 29), (29, 32), (32, 40)):
        got.append(decoder.forward(TEXT[start:stop]).copy())
    assert np.abs(np.concatenate(got) - reference(model, TEXT)).max() < 1e-4


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, Any]]]:
    """Return a maker of (folder as optimum writes it, model)."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            from optimum.exporters.onnx import main_export

            root = tmp_path_factory.mktemp(name.split(",")[0])
            model = save_model(CONFIGS[name](), root / "model")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's and optimum's on their own internals
                main_export(
                    str(root / "model"),
                    output=root / "onnx",
                    task="text-generation-with-past",
                    do_validation=False,
                )
            made[name] = (root / "onnx", model)
        return made[name]

    yield make


@needs_optimum
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "phi"])
def test_a_folder_of_optimums_own_answers_as_transformers_does(
    stock: Callable[[str], tuple[Path, Any]], name: str
) -> None:
    folder, model = stock(name)
    plain, logits, engine = answers(folder)
    assert plain == greedy(model, len(plain))
    expected = reference(model, [*PROMPT, *plain])[len(PROMPT) :, : logits.shape[1]]
    assert np.abs(logits - expected).max() < 1e-4
    assert engine.stats.accepted > 0
    assert engine.target.folder.context_length == CONTEXT


@needs_optimum
def test_a_graph_is_chosen_by_its_path_where_a_folder_has_several(
    stock: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """The layout of onnx-community: graphs in onnx/, everything else above them."""
    source, model = stock("llama")
    (tmp_path / "onnx").mkdir()
    for file in source.iterdir():
        shutil.copy(file, tmp_path / "onnx" if file.suffix == ".onnx" else tmp_path)
    _quantize_to_4_bits(tmp_path / "onnx/model.onnx", tmp_path / "onnx/model_q4.onnx")
    whole, _, _ = answers(tmp_path)
    assert whole == greedy(model, len(whole))
    by_graphs_folder, _, _ = answers(tmp_path / "onnx")
    assert by_graphs_folder == whole
    _, _, engine = answers(tmp_path / "onnx/model_q4.onnx")
    assert engine.target.folder.graph.name == "model_q4.onnx"
    assert engine.target.folder.tokenizer == tmp_path / "tokenizer.json"
    (tmp_path / "onnx/model.onnx").unlink()
    with pytest.raises(Exception, match=r"name one of its graphs instead: onnx/model_q4\.onnx"):
        open_target_folder(tmp_path)


def _quantize_to_4_bits(graph: Path, out: Path) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(graph), block_size=32, accuracy_level=4)
    quantizer.process()
    onnx.save(quantizer.model.model, out)


@needs_optimum
def test_a_graph_whose_rows_share_one_activation_scale_answers_plainly(
    stock: Callable[[str], tuple[Path, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What onnx-community calls model_quantized.onnx: a rejected draft would change the answer."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source, _ = stock("llama")
    for file in source.glob("*.json"):
        shutil.copy(file, tmp_path)
    quantize_dynamic(source / "model.onnx", tmp_path / "model.onnx", weight_type=QuantType.QInt8)
    engine = Engine.open(tmp_path)
    assert engine.target.max_rows == 1
    assert engine.target.single_rows
    assert "the rows of a pass change each other's logits" in caplog.text
    config = DecodeConfig(max_tokens=30)
    answer = engine.generate(PROMPT, config)
    assert answer.stats.proposed == 0
    assert (
        answer.token_ids
        == Engine.open(tmp_path, drafters=["none"]).generate(PROMPT, config).token_ids
    )


@needs_optimum
@pytest.mark.parametrize("name", ["tied llama", "gpt2"])
def test_changes_to_the_graph_keep_every_bit(
    stock: Callable[[str], tuple[Path, Any]], name: str
) -> None:
    folder, _ = stock(name)
    before = ir.load(folder / "model.onnx")
    expected = _run(before, TEXT)
    after = ir.load(folder / "model.onnx")
    remove_repetitions(after)
    assert len(after.graph) < 0.7 * len(before.graph)
    np.testing.assert_array_equal(_run(after, TEXT), expected)
    assert select_logit_rows(after.graph)
    np.testing.assert_array_equal(_run(after, TEXT, rows=range(len(TEXT))), expected)
    np.testing.assert_array_equal(_run(after, TEXT, rows=[3, 39]), expected[[3, 39]])


def _run(model: ir.Model, tokens: list[int], rows: Any = None) -> npt.NDArray[np.float32]:
    session = onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString())
    feeds: dict[str, npt.NDArray[Any]] = {}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            _, heads, _, size = value.shape
            feeds[value.name] = np.zeros((1, heads, 0, size), np.float32)
        elif value.name == "logit_rows":
            feeds[value.name] = np.array(list(rows), np.int64)
        elif value.name == "position_ids":
            feeds[value.name] = np.arange(len(tokens))[None]
        elif value.name == "attention_mask":
            feeds[value.name] = np.ones((1, len(tokens)), np.int64)
        else:
            feeds[value.name] = np.array([tokens])
    logits: npt.NDArray[np.float32] = session.run(["logits"], feeds)[0][0]
    return logits


@needs_optimum
def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    model = save_model(CONFIGS["tied llama"](), tmp_path / "model")
    arguments = ["target", str(tmp_path / "model"), "--via", "optimum", "--precision", "fp32"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    stored = (tmp_path / "out/decoder.onnx.data").stat().st_size
    table = VOCAB * 64
    assert stored < 4 * (sum(p.numel() for p in model.parameters()) + table // 2)


@needs_optimum
@pytest.mark.parametrize(("name", "precision"), [("qwen2", "fp32"), ("gpt2", "int8")])
def test_the_command_makes_a_folder_that_speculates_losslessly(
    name: str, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(CONFIGS[name](), tmp_path / "model")
    arguments = ["target", str(tmp_path / "model"), "--via", "optimum", "--precision", precision]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "max |logit difference| in fp32" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["architecture"] == type(model).__name__
    assert manifest["provenance"]["via"] == "optimum"
    assert manifest["quality"]["max_logit_difference_fp32"] < 1e-4
    plain, _, engine = answers(tmp_path / "out")
    assert engine.target.folder.exporter == "edgedraft"
    if precision == "fp32":
        assert plain == greedy(model, len(plain))
    else:
        assert manifest["quality"]["kl"] < 0.01
        stored = (tmp_path / "out/decoder.onnx.data").stat().st_size
        assert stored < 2 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("between", ["Softmax", "Add of a matrix", "MatMul of activations"])
def test_rows_are_chosen_only_where_the_head_is_certain(between: str) -> None:
    x = ir.Value(name="x", shape=ir.Shape([1, "rows", 4]), type=ir.TensorType(ir.DataType.FLOAT))
    weight = ir.tensor(np.ones((4, 8), np.float32), name="weight")
    mixing = ir.tensor(np.ones((3, 8), np.float32), name="mixing")
    weights = [
        ir.Value(name=t.name, const_value=t, shape=ir.Shape(t.shape), type=ir.TensorType(t.dtype))
        for t in (weight, mixing)
    ]
    head = ir.node("MatMul", [x, x if between.startswith("MatMul") else weights[0]])
    second = [weights[1]] if between.startswith("Add") else []
    last = ir.node("Add" if second else "Softmax", [head.outputs[0], *second])
    last.outputs[0].name = "logits"
    last.outputs[0].shape = ir.Shape([1, "rows", 8])
    graph = ir.Graph([x], last.outputs, nodes=[head, last], initializers=weights)
    assert not select_logit_rows(graph)
    assert [value.name for value in graph.inputs] == ["x"]
    assert head.inputs[0] is x


def test_without_optimum_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optimum.exporters.onnx", None)  # makes the import fail
    save_model(CONFIGS["llama"](), tmp_path / "model")
    arguments = ["target", str(tmp_path / "model"), "--via", "optimum", "--precision", "fp32"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.endswith('--via optimum needs optimum-onnx: pip install "edgedraft[optimum]"')
    assert not (tmp_path / "out").exists()


@needs_optimum
def test_an_architecture_that_optimum_does_not_know_is_refused_in_one_line() -> None:
    config = hf.XGLMConfig(
        vocab_size=VOCAB, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4
    )
    with pytest.raises(ExportError, match="XGLMForCausalLM cannot be exported by optimum") as error:
        export_with_optimum(source_of(make_model(config)))
    assert "\n" not in str(error.value)


@needs_optimum
def test_a_rotation_that_would_change_with_the_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    config = hf.LlamaConfig(**_LLAMA, rope_scaling=rope)
    with pytest.raises(ExportError, match=f"--max-context {CONTEXT}"):
        export_with_optimum(source_of(make_model(config)), context_length=CONTEXT + 1)


@needs_optimum
@pytest.mark.parametrize(
    "saved",
    [
        {"rope_theta": 500000.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
        {"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 10000.0}},
    ],
    ids=["base", "scaling", "base of one kind of layer"],
)
def test_rotary_settings_that_only_transformers_5_reads_are_not_lost_in_silence(
    saved: dict[str, Any],
) -> None:
    model = make_model(CONFIGS["llama"]())
    model.config.rope_parameters = saved
    with pytest.raises(ExportError, match="copy them to rope_theta and rope_scaling"):
        check_rope_was_read(model.config, "tiny")
