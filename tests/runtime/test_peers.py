"""Other engines speed up their own plain loop, and the benchmark says by how much."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgedraft.runtime import DecodeConfig, open_target_folder
from edgedraft.runtime.bench import ONE_ROW, SPECULATIVE, TWO_ROWS, PromptResult, Run
from edgedraft.runtime.bench_report import report
from edgedraft.runtime.cli import main
from edgedraft.runtime.peers import Peer, PeerError, own_plain, peer_drafter, peer_model
from edgedraft.runtime.prompt_files import BenchPrompt
from edgedraft.runtime.stats import RunStats

REENCODE = "transformers-uag-reencode"
INTERSECTION = "transformers-uag-intersection"
ADAPTIVE = "transformers-uag-intersection:adaptive"
UAG = (REENCODE, INTERSECTION, ADAPTIVE)
KINDS = {"transformers", "transformers-lookup", *UAG}

# A pass gives as many tokens as the way to draft lets expect: 2, 3 or 6; one without a drafter.
FAKE_TORCH = """
import contextlib, numpy as np
class Ids(np.ndarray):
    def numel(self): return self.size
    def split(self, size): return [self]
def tensor(rows): return np.array(rows).view(Ids)
ones_like = np.ones_like
inference_mode = contextlib.nullcontext
def set_num_threads(count): assert count == 1
"""
FAKE_TRANSFORMERS = """
import sys, numpy as np, torch
__version__ = "0"
class Config:
    def update(self, **values): self.__dict__.update(values)
class AutoModelForCausalLM:
    dtype = "float32"
    cut = False
    @classmethod
    def from_pretrained(cls, path, dtype=None):
        model = cls()
        model.generation_config = Config()
        model.given_dtype = dtype
        return model
    def eval(self): return self
    def register_forward_hook(self, hook): self.hook = hook
    def generate(self, ids, *, attention_mask, streamer, do_sample, max_new_tokens,
                 min_new_tokens=0, top_k=50, prompt_lookup_num_tokens=0,
                 assistant_model=None, tokenizer=None, assistant_tokenizer=None):
        step = 1
        if assistant_model:
            assert tokenizer == "target tokenizer" and assistant_model.given_dtype == "float32"
            assert list(assistant_tokenizer.get_vocab()) == ["a", "b"]
            assert not do_sample or top_k == 1, "the greedy text"
            assert do_sample or not assistant_model.cut, "a drafter that intersection has cut"
            assistant_model.cut = assistant_model.cut or do_sample
            rule = assistant_model.generation_config.num_assistant_tokens_schedule
            step = {"constant": 3, "heuristic_transient": 6}[rule] if do_sample else 2
        streamer.put(ids)
        new = torch.tensor([[7] * max_new_tokens])
        for start in range(0, max_new_tokens, step):
            self.hook(self, None, None)
            streamer.put(new[:, start : start + step])
        print("noise on stdout", flush=True)
        return np.concatenate([ids, new], axis=1)
class AutoTokenizer:
    @staticmethod
    def from_pretrained(path): return "target tokenizer"
class PreTrainedTokenizerFast:
    def __init__(self, tokenizer_file): open(tokenizer_file).close()
    def get_vocab(self): return {"b": 1, "a": 0}
class TextStreamer:
    def __init__(self, tokenizer, skip_prompt): pass
    def put(self, value): pass
"""


@pytest.fixture
def fake_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "transformers.py").write_text(FAKE_TRANSFORMERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def hand_made(name: str, drafted_s: float, adaptive_s: float, *, same: bool = True) -> PromptResult:
    """Ten tokens per run; transformers takes 8 s for them by itself, we take 3 s and 1 s."""

    def run(seconds: float, passes: int = 10, first_token: int = 0) -> list[Run]:
        tokens = (first_token, *range(1, 10))
        return [Run(tokens, 1.0, seconds, 10, stats=RunStats(rounds=passes, emitted=10))]

    runs = {
        TWO_ROWS: run(3.0),
        ONE_ROW: run(4.0),
        SPECULATIVE: run(1.0),
        "transformers": run(8.0),
        INTERSECTION: run(drafted_s, 4),
        ADAPTIVE: run(adaptive_s, 5, first_token=0 if same else 9),
    }
    return PromptResult(BenchPrompt(name, "c", "x"), 3, runs)


def test_a_drafter_is_judged_within_its_own_framework_with_ours_beside_it() -> None:
    results = [
        hand_made("a", 4.0, 16.0),
        hand_made("b", 32.0, 16.0),
        hand_made("c", 2.0, 1.0, same=False),
    ]
    document = report(
        results, [], {kind: {"engine": "t 1"} for kind in ("transformers", INTERSECTION)}
    )
    peers = document["overall"]["peers"]
    found = peers[INTERSECTION]
    assert found["speedup_over_own_plain"] == pytest.approx(2), "2, 0.5 and 8"
    assert found["our_speedup"] == pytest.approx(3)
    assert found["same_answers_as_own_plain"] == 2 and found["same_answers"] == 3
    assert found["variants"][INTERSECTION]["tokens_per_pass"] == pytest.approx(10 / 4)
    assert found["variants"][ADAPTIVE]["tokens_per_pass"] == pytest.approx(10 / 5)
    assert "speedup_over_own_plain" not in peers["transformers"]
    assert document["prompts"][2]["peers"] == {
        INTERSECTION: {
            "speedup_over_own_plain": pytest.approx(4),
            "tokens_per_pass": pytest.approx(2.5),
            "same_as_own_plain": True,
        },
        ADAPTIVE: {
            "speedup_over_own_plain": pytest.approx(8),
            "tokens_per_pass": pytest.approx(2),
            "same_as_own_plain": False,
        },
    }


def test_a_way_to_decode_names_the_plain_loop_it_speeds_up() -> None:
    assert [own_plain(kind) for kind in UAG] == ["transformers"] * 3
    assert own_plain("transformers") is None and own_plain("genai:resting") is None


@pytest.mark.usefixtures("fake_transformers")
def test_uag_runs_in_both_modes_and_the_table_tells(
    tiny_folder: Callable[..., Path],
    drafter_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out = tmp_path / "own.jsonl", tmp_path / "result.json"
    prompts.write_text('{"prompt": "a ring"}\n{"prompt": "of the sea"}\n')
    command = (
        f"bench --target {tiny_folder()} --prompts {prompts} --max-tokens 12 --ignore-eos "
        f"--threads 1 --compare transformers --peer-model {tmp_path} "
        f"--peer-drafter {drafter_folder} --json {out}"
    )
    assert main(command.split()) == 0
    document = json.loads(out.read_text())
    assert document["settings"]["peer_drafter"] == "drafter"
    peers = document["overall"]["peers"]
    assert set(peers) == KINDS - {ADAPTIVE}
    assert peers["transformers"]["variants"]["transformers"]["tokens_per_pass"] == 1
    variants = peers[REENCODE]["variants"] | peers[INTERSECTION]["variants"]
    assert {kind: v["tokens_per_pass"] for kind, v in variants.items()} == {
        REENCODE: 2,
        INTERSECTION: 3,
        ADAPTIVE: 6,
    }
    for kind in (REENCODE, INTERSECTION):
        assert peers[kind]["same_answers_as_own_plain"] == peers[kind]["prompts"] == 2
        assert peers[kind]["speedup_over_own_plain"] > 0
        assert peers[kind]["drafting"]["as_shipped"]["num_assistant_tokens"] == 20
    for row in document["prompts"]:
        assert set(row["peers"]) == KINDS - {"transformers"}
    printed = capsys.readouterr().err
    assert f"{REENCODE}: " in printed
    assert "3.00, 6.00 tokens/pass, its plain answer 2/2" in printed


@pytest.mark.usefixtures("fake_transformers")
def test_without_a_drafter_there_is_no_uag(tmp_path: Path) -> None:
    with Peer("transformers", str(tmp_path), threads=1) as peer:
        assert set(peer.runners()) == KINDS - set(UAG)
        assert "drafting" not in peer.facts
        run = peer.runners()["transformers"]([1, 2], DecodeConfig(max_tokens=5))
    assert run.token_ids == (7,) * 5 and run.timed_tokens == 4
    assert run.stats.tokens_per_pass == 1, "the pass over the prompt gives the first token"


def test_the_model_to_compare_with_is_the_one_the_target_was_exported_from(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = replace(
        open_target_folder(tiny_folder()), provenance={"model": {"source": str(tmp_path)}}
    )
    assert peer_model("transformers", folder, None) == str(tmp_path)
    assert peer_model("transformers", folder, str(tmp_path.parent)) == str(tmp_path.parent)
    for provenance in ({}, {"model": {"source": "owner/name"}}, {"source": str(tmp_path)}):
        with pytest.raises(PeerError, match="--peer-model"):
            peer_model("transformers", replace(folder, provenance=provenance), None)


def test_a_drafter_that_cannot_be_used_is_one_line(
    tiny_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerError, match="no config.json and no tokenizer.json"):
        peer_drafter(str(tmp_path))
    assert peer_drafter(None) is None
    prompts = tmp_path / "own.txt"
    prompts.write_text("a ring\n")
    command = f"bench --target {tiny_folder()} --prompts {prompts} --peer-drafter {tmp_path}"
    assert main(command.split()) == 2
    assert "add --compare transformers" in capsys.readouterr().err


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and a drafter that differs in its vocabulary only: other ids, one token more."""
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tiny_models import CONFIGS, make_model, save_folder

    model = make_model(hf.LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "vocab_size": 259}))
    target = save_folder(model, tmp_path / "target")
    rules = json.loads((target / "tokenizer.json").read_text())
    vocab = rules["model"]["vocab"]
    new_ids = torch.arange(259)
    new_ids[3:] = new_ids[3:].roll(1)  # behind the special tokens
    rules["model"]["vocab"] = {x: int(new_ids[i]) for x, i in vocab.items()} | {"ab": 259}
    drafter = make_model(hf.LlamaConfig(**{**model.config.to_dict(), "vocab_size": 260}))
    weights = drafter.state_dict()
    for name, value in model.state_dict().items():
        if value.shape == weights[name].shape:
            weights[name] = value
        else:
            weights[name][new_ids] = value
            weights[name][259] = 0
    drafter.load_state_dict(weights)
    folder = tmp_path / "other"
    drafter.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return target, folder


def test_transformers_drafts_across_vocabularies_and_gives_its_plain_answer(
    pair: tuple[Path, Path],
) -> None:
    target, drafter = map(str, pair)
    config = DecodeConfig(max_tokens=24)
    with Peer("transformers", target, threads=1, drafter=drafter) as peer:
        runs = {
            kind: [run(ids, config) for ids in ([70, 80, 90], [5, 6, 7, 8])]
            for kind, run in peer.runners().items()
        }
    assert set(runs) == KINDS
    for kind in UAG:
        for run, plain in zip(runs[kind], runs["transformers"], strict=True):
            assert run.token_ids == plain.token_ids, kind
            assert plain.stats.tokens_per_pass == 1
    assert max(run.stats.tokens_per_pass for run in runs[INTERSECTION]) > 1.5
    assert max(run.stats.tokens_per_pass for run in runs[ADAPTIVE]) > 1.5
