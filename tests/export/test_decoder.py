"""An exported graph computes what transformers computes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgedraft.export.decoder import export_decoder
from edgedraft.export.errors import ExportError
from edgedraft.export.fusion import share_tied_head
from tiny_models import CONFIGS, CONTEXT, make_model, open_graph, reference

# All nodes of a graph of two layers: ten a layer, and four for embedding, norm, rows and head.
_LEAN = 24
_LEAN_WITH_MORE_PARTS = {
    "llama, biases, yarn rope": 34,
    "qwen2, sliding window in one layer": 26,
    "qwen3": 40,
    "gemma3": 48,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_in_a_lean_graph(
    name: str, text: list[int], tmp_path: Path
) -> None:
    model = make_model(CONFIGS[name]())
    expected = reference(model, text)
    graph = export_decoder(model, CONTEXT)
    operators = Counter(node.op_type for node in graph.graph)
    assert len(graph.graph) <= _LEAN_WITH_MORE_PARTS.get(name, _LEAN), operators

    decoder = open_graph(graph, tmp_path)
    got = [decoder.forward(text[:20]).copy()]
    decoder.forward([5, 6, 7, 8])
    decoder.rollback(20)
    for start, stop in ((20, 21), (21, 29), (29, 32), (32, 40)):
        got.append(decoder.forward(text[start:stop]).copy())
    assert np.abs(np.concatenate(got) - expected).max() < 1e-4
    assert np.array_equal(reference(model, text), expected), "the export changed the model"


def test_the_tied_head_reads_the_embedding(text: list[int], tmp_path: Path) -> None:
    model = make_model(CONFIGS["llama, tied head, dynamic rope"]())
    graph = export_decoder(model, CONTEXT)
    share_tied_head(graph.graph)
    decoder = open_graph(graph, tmp_path)
    assert np.abs(decoder.forward(text) - reference(model, text)).max() < 1e-4
    stored = (tmp_path / "decoder.onnx.data").stat().st_size
    parameters = sum(x.numel() for x in model.parameters())
    assert stored < 4 * (parameters + 2 * CONTEXT * 16 + 1000)


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return make_model(CONFIGS["qwen3"]())


@pytest.fixture(scope="module")
def full_graph(qwen3: Any) -> ir.Model:
    """A graph with every input and output there is."""
    return export_decoder(qwen3, CONTEXT, hidden_state=True, tree=True)


def test_graph_inputs_and_outputs_are_as_documented(full_graph: ir.Model) -> None:
    values = (*full_graph.graph.inputs, *full_graph.graph.outputs)
    cache = "[1,2,capacity,32]"
    assert {x.name: str(x.shape) for x in values} == {
        "input_ids": "[1,rows]",
        "position_ids": "[1,rows]",
        "seqlens_k": "[1]",
        "total_sequence_length": "[]",
        "logit_rows": "[logit_rows]",
        **{f"past_key_values.{n}.{kind}": cache for n in (0, 1) for kind in ("key", "value")},
        "attention_bias": "[1,1,rows,total]",
        "logits": "[1,logit_rows,304]",
        "hidden_state": "[1,logit_rows,64]",
        **{f"present.{n}.{kind}": cache for n in (0, 1) for kind in ("key", "value")},
    }


def test_hidden_state_and_logits_of_the_rows_asked_for(
    full_graph: ir.Model, qwen3: Any, text: list[int], tmp_path: Path
) -> None:
    open_graph(full_graph, tmp_path)
    with torch.no_grad():
        hidden = qwen3.model(input_ids=torch.tensor([text])).last_hidden_state[0].numpy()
    rows = [3, 39]
    outputs = _run(tmp_path / "decoder.onnx", text, rows)
    assert np.abs(outputs["hidden_state"][0] - hidden[rows]).max() < 1e-4
    assert np.abs(outputs["logits"][0] - reference(qwen3, text)[rows]).max() < 1e-4


def test_a_tree_sees_its_own_branch_only(
    full_graph: ir.Model, qwen3: Any, text: list[int], tmp_path: Path
) -> None:
    decoder = open_graph(full_graph, tmp_path)
    decoder.extend(text[:10])
    assert decoder.supports_trees
    # text[10] is followed by text[11], text[12] in one branch and text[13], text[14] in the other.
    rows = decoder.forward(text[10:15], parents=[-1, 0, 1, 0, 3]).copy()
    first = reference(qwen3, text[:13])[10:]
    second = reference(qwen3, [*text[:11], *text[13:15]])[11:]
    assert np.abs(rows - np.concatenate([first, second])).max() < 1e-4


def test_rope_that_changes_with_the_length_is_exported_where_it_stays_the_same(
    text: list[int], tmp_path: Path
) -> None:
    factors = [1.0 + i / 8 for i in range(8)]
    config = hf.Phi3Config(
        **{**_phi3_sizes(), "original_max_position_embeddings": 40},
        rope_scaling={"type": "longrope", "short_factor": factors, "long_factor": factors[::-1]},
    )
    model = make_model(config)
    with pytest.raises(ExportError, match="--max-context 40"):
        export_decoder(model, CONTEXT)
    decoder = open_graph(export_decoder(model, 40), tmp_path)
    assert np.abs(decoder.forward(text) - reference(model, text)).max() < 1e-4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.CohereConfig, "rotates its queries in a way that is not supported"),
        (hf.BloomConfig, "do not use transformers' attention interface"),
    ],
)
def test_what_cannot_be_exported_says_so_in_one_line(config: Any, reason: str) -> None:
    sizes = {"vocab_size": 304, "hidden_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
    model = make_model(
        config(**sizes, intermediate_size=96, num_attention_heads=4, n_layer=1, n_head=4)
    )
    with pytest.raises(ExportError, match=reason) as error:
        export_decoder(model, CONTEXT)
    assert "\n" not in str(error.value)


def test_a_failed_export_leaves_transformers_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(CONFIGS["llama"]())
    modeling = sys.modules[type(model).__module__]
    before = (dict(ALL_ATTENTION_FUNCTIONS), modeling.__dict__["apply_rotary_pos_emb"])

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(ExportError, match="RuntimeError: out of luck$"):
        export_decoder(model, CONTEXT)
    assert (dict(ALL_ATTENTION_FUNCTIONS), modeling.__dict__["apply_rotary_pos_emb"]) == before
    assert model.config._attn_implementation == "eager"
    assert "forward" not in vars(model.model.rotary_emb)


def _phi3_sizes() -> dict[str, Any]:
    sizes = CONFIGS["llama"]().to_dict()
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names += " num_key_value_heads max_position_embeddings pad_token_id initializer_range"
    return {name: sizes[name] for name in names.split()}


def _run(path: Path, tokens: list[int], logit_rows: list[int]) -> dict[str, Any]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        "input_ids": np.array([tokens]),
        "position_ids": np.arange(len(tokens))[None],
        "seqlens_k": np.array([len(tokens) - 1], np.int32),
        "total_sequence_length": np.array(len(tokens), np.int32),
        "logit_rows": np.array(logit_rows),
        "attention_bias": np.zeros((1, 1, len(tokens), len(tokens)), np.float32),
    }
    for x in session.get_inputs():
        if x.name not in feeds:
            feeds[x.name] = np.zeros((1, x.shape[1], CONTEXT, x.shape[3]), np.float32)
    names = [x.name for x in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))
