"""Drafter folders in front of target folders: any pair of tokenizers, the same answer.

Among them the field cases 1 to 6, 8 and 12: faults that people reported against other runtimes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgedraft.runtime import (
    DecodeConfig,
    DrafterError,
    Engine,
    FolderError,
    SamplingConfig,
    SessionConfig,
)
from edgedraft.runtime.cli import main
from edgedraft.runtime.composite import CompositeProposer
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.drafting import open_policy
from edgedraft.runtime.policy import ConstantPolicy, DraftPolicy, GammaPolicy, PassCosts
from graphs import (
    byte_level_tokenizer,
    decoder_graph,
    sentencepiece_tokenizer,
    write_target_folder,
)
from toy_vocabularies import byte_level

ONE_THREAD = SessionConfig(threads=1)
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "own": lambda: byte_level(290),
}
PROMPTS = (
    "it 's  a test .",
    "def f(x):\n\treturn  x\r\n",
    "한국어 🙂 naïve",
    "ends with a space ",
    "http:",
    "\n",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a maker of folders of any role with any tokenizer."""

    @cache
    def make(
        tokenizer: str, *, drafter: bool = False, seed: int = 0, context_length: int = 512
    ) -> Path:
        made = TOKENIZERS[tokenizer]()
        role = {"format": "edgedraft-drafter"} if drafter else {}
        if tokenizer == "own":
            role |= {"eos_token_ids": [0], "mark_token_id": 1}
        return write_target_folder(
            tmp_path_factory.mktemp(tokenizer) / "t",
            tokenizer=made,
            chat_template=None,
            context_length=context_length,
            graph=decoder_graph(vocab_size=made.get_vocab_size(), seed=seed),
            **role,
        )

    return make


def open_engine(target: Path, drafters: list[str | Path], state: Path) -> Engine:
    """Open an engine that always drafts: these targets are as cheap as their drafters."""
    names = [*drafters, "k=15"]
    return Engine.open(target, drafters=names, session=ONE_THREAD, state_dir=state)


def draft_model(engine: Engine) -> DraftModel:
    assert isinstance(engine.proposer, CompositeProposer)
    model = engine.proposer.drafter
    assert isinstance(model, DraftModel)
    return model


@pytest.mark.parametrize("drafter", TOKENIZERS)
@pytest.mark.parametrize("target", ["byte-level", "sentencepiece"])
def test_an_answer_equals_the_plain_one_for_any_two_tokenizers(
    folder: Callable[..., Path], target: str, drafter: str, tmp_path: Path
) -> None:
    """Cases 1 and 9: lengths of both prompts differ, prompts end anywhere."""
    small = folder(drafter, drafter=True, seed=1)
    plain = Engine.open(folder(target), drafters=["none"], session=ONE_THREAD)
    for drafters in ([small], ["lookup", small]):
        engine = open_engine(folder(target), drafters, tmp_path)
        for prompt in PROMPTS:
            for sampling in (SamplingConfig(), SamplingConfig(temperature=1.5, seed=4)):
                config = DecodeConfig(max_tokens=30, ignore_eos=True, sampling=sampling)
                expected = plain.generate(prompt, config)
                assert engine.generate(prompt, config).token_ids == expected.token_ids


def test_a_drafter_that_is_the_target_has_everything_accepted(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A target's folder is a drafter too; with one vocabulary there is nothing to translate."""
    target = folder("byte-level")
    engine = open_engine(target, [target], tmp_path)
    answer = engine.generate("The quick", DecodeConfig(max_tokens=40, ignore_eos=True))
    assert answer.stats.accepted == answer.stats.proposed > 25


def test_the_context_begins_as_the_target_tokens_do_and_holds_no_mark_of_its_own(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Case 2: a draft tokenizer that adds BOS, and texts that clean-up would change."""
    small = folder("sentencepiece", drafter=True, seed=1)
    engine = open_engine(folder("byte-level"), [small], tmp_path)
    prompt = "it 's  a test ."
    engine.generate(prompt, DecodeConfig(max_tokens=12, ignore_eos=True))
    model = draft_model(engine)
    spelled = Tokenizer.from_file(str(small / "tokenizer.json"))
    pieces = [spelled.id_to_token(piece) for piece in model._context]
    assert "<s>" not in pieces
    assert "".join(pieces).replace("▁", " ").startswith(prompt)


def test_the_same_size_does_not_make_the_same_vocabulary(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Case 3: ids permuted. Case 4: other sizes and kinds are every pair above."""
    rules = json.loads(byte_level_tokenizer().to_str())
    vocab = rules["model"]["vocab"]
    names = sorted(vocab, key=vocab.__getitem__)
    specials = {entry["content"] for entry in rules["added_tokens"]}
    plain_names = [name for name in names if name not in specials]
    ids = [vocab[name] for name in plain_names]
    rules["model"]["vocab"] |= dict(zip(plain_names, ids[::-1], strict=True))
    permuted = Tokenizer.from_str(json.dumps(rules))
    small = write_target_folder(
        tmp_path / "permuted",
        tokenizer=permuted,
        chat_template=None,
        graph=decoder_graph(vocab_size=permuted.get_vocab_size(), seed=1),
    )
    target = folder("byte-level")
    engine = open_engine(target, [small], tmp_path)
    text = "The quick brown fox"
    engine.generate(text, DecodeConfig(max_tokens=4, ignore_eos=True))
    context = draft_model(engine)._context
    assert permuted.decode(context).startswith(text)
    assert context[:3] != byte_level_tokenizer().encode(text).ids[:3]


def test_a_token_that_the_drafter_cannot_write_leaves_its_context_consistent(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Cases 5 and 6: no unk to fall back on, a vocabulary that lacks bytes."""
    rules = json.loads(byte_level(290).to_str())
    kept = {n: i for n, i in rules["model"]["vocab"].items() if len(n) > 1 or n.isascii()}
    rules["model"]["vocab"] = kept
    rules["model"]["merges"] = [
        m
        for m in rules["model"]["merges"]
        if all(part in kept for part in m) and "".join(m) in kept
    ]
    poor = Tokenizer.from_str(json.dumps(rules))
    small = write_target_folder(
        tmp_path / "poor",
        tokenizer=poor,
        chat_template=None,
        graph=decoder_graph(vocab_size=290, seed=1),
        vocab_size=290,
        eos_token_ids=[0],
    )
    target = folder("byte-level")
    plain = Engine.open(target, drafters=["none"], session=ONE_THREAD)
    engine = open_engine(target, [small], tmp_path)
    config = DecodeConfig(max_tokens=40, ignore_eos=True)
    for prompt in ("한국어 🙂", "\r\n naïve text"):
        assert engine.generate(prompt, config).token_ids == plain.generate(prompt, config).token_ids
        model = draft_model(engine)
        assert len(model._cached) >= len(model._context) - model._offset - 8


def test_asking_again_reads_nothing_again(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Case 8: the same text must give the same draft context, so that its cache is reused."""
    small = folder("sentencepiece", drafter=True, seed=1)
    engine = open_engine(folder("byte-level"), [small], tmp_path)
    config = DecodeConfig(max_tokens=6, ignore_eos=True)
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    answers = {engine.generate(prompt, config).token_ids}
    model = draft_model(engine)
    context = list(model._context)
    read: list[int] = []
    extend = model._model.extend
    model._model.extend = lambda tokens: (read.append(len(tokens)), extend(tokens))[1]  # type: ignore[method-assign]
    for _ in range(3):
        answers.add(engine.generate(prompt, config).token_ids)
        assert model._context == context
    assert len(answers) == 1
    assert sum(read) < 30


def test_past_the_drafters_context_the_answer_goes_on(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Case 12: the drafter holds fewer tokens than the target."""
    small = folder("own", drafter=True, seed=1, context_length=48)
    target = folder("byte-level")
    plain = Engine.open(target, drafters=["none"], session=ONE_THREAD)
    engine = open_engine(target, [small], tmp_path)
    config = DecodeConfig(max_tokens=200, ignore_eos=True)
    prompt = "The quick brown fox jumps over the lazy dog."
    answer = engine.generate(prompt, config)
    assert answer.token_ids == plain.generate(prompt, config).token_ids
    assert answer.stats.proposed > 100


def test_a_pair_is_worked_out_once_and_then_needs_no_vocabulary(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, target = folder("own", drafter=True), folder("byte-level")
    open_engine(target, [small], tmp_path)
    (table,) = (tmp_path / "pairs").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr("edgedraft.runtime.drafting.Vocabulary", lambda *_: pytest.fail("again"))
        engine = open_engine(target, [small], tmp_path)
    assert np.count_nonzero(draft_model(engine)._map.usable) > 200
    table.write_bytes(table.read_bytes()[:-40])
    open_engine(target, [small], tmp_path)


@pytest.mark.parametrize("side", ["drafter", "target"])
def test_a_folder_with_another_tokenizer_gets_tables_of_its_own(
    folder: Callable[..., Path], side: str, tmp_path: Path
) -> None:
    """Names of the same number, each of them somewhere else."""
    rules = json.loads(byte_level(290).to_str())
    vocab, first = rules["model"]["vocab"], 2 + 256  # behind the special tokens and the bytes
    kept = {name: token for name, token in vocab.items() if token < first}
    moved = {name: first + 289 - token for name, token in vocab.items() if token >= first}
    rules["model"]["vocab"] = kept | moved
    other = Tokenizer.from_str(json.dumps(rules))
    role = {"format": "edgedraft-drafter"} if side == "drafter" else {}
    changed = write_target_folder(
        tmp_path / "changed",
        tokenizer=other,
        chat_template=None,
        graph=decoder_graph(vocab_size=other.get_vocab_size()),
        eos_token_ids=[0],
        mark_token_id=1,
        **role,
    )
    before = {"drafter": folder("own", drafter=True), "target": folder("own")}
    for folders in (before, before | {side: changed}):
        engine = open_engine(folders["target"], [folders["drafter"]], tmp_path / "state")
    fresh = open_engine(folders["target"], [folders["drafter"]], tmp_path / "new")
    ours, theirs = draft_model(engine)._map, draft_model(fresh)._map
    assert len(list((tmp_path / "state" / "pairs").iterdir())) == 2
    assert ours.key == theirs.key
    assert np.array_equal(ours.spelling_piece, theirs.spelling_piece)
    assert ours.direct(289) == first if side == "drafter" else ours.direct(first) == 289


@pytest.mark.parametrize(
    ("drafters", "complaint"),
    [
        (["none", "lookup"], "'none' cannot be combined"),
        (["magic"], "magic: no such folder, and no drafter of that name"),
        (["{drafter}", "{target}"], "one drafter folder at a time"),
        (["ngram=none.bin"], "none.bin: no such file; ngram=FILE names a seed"),
    ],
)
def test_drafters_that_do_not_fit_together_are_refused(
    folder: Callable[..., Path], drafters: list[str], complaint: str
) -> None:
    small, target = folder("own", drafter=True), folder("byte-level")
    names = [name.format(drafter=small, target=target) for name in drafters]
    with pytest.raises(DrafterError, match=complaint):
        Engine.open(target, drafters=names, session=ONE_THREAD)


def test_a_drafter_is_no_target(folder: Callable[..., Path]) -> None:
    with pytest.raises(FolderError, match="holds a drafter, which answers nothing"):
        Engine.open(folder("own", drafter=True))


def test_a_pair_can_be_looked_at(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 4: what two vocabularies share, before anything is run."""
    small, target = folder("own", drafter=True), folder("byte-level")
    assert main(["inspect", str(target), "--pair", str(small)]) == 0
    assert "in both" in capsys.readouterr().out
    assert main(["inspect", str(target), "--pair", str(small), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["marks_special_tokens"] is True


def test_the_length_of_drafts_can_be_set_where_drafters_are_named(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    names, policy = open_policy(["ngram", "k=4", "some/folder"], None)
    assert names == ["ngram", "some/folder"]
    assert isinstance(policy, ConstantPolicy) and policy.most == 4
    assert isinstance(open_policy(["gamma=0.3"], PassCosts({2: 1.0}))[1], GammaPolicy)
    assert type(open_policy(["ngram"], PassCosts({2: 1.0}))[1]) is DraftPolicy
    target, small = folder("byte-level"), folder("own", drafter=True, seed=1)
    lengths: set[int] = set()
    engine = Engine.open(target, drafters=[small, "k=3"], session=ONE_THREAD, state_dir=tmp_path)
    for piece in engine.stream(PROMPTS[0], DecodeConfig(max_tokens=30, ignore_eos=True)):
        lengths |= {len(piece.trace.proposal.tokens)} if piece.trace else set()
    assert max(lengths) == 3
    by_default = Engine.open(target, drafters=["k=3"], session=ONE_THREAD, state_dir=tmp_path)
    assert type(by_default.proposer) is type(
        Engine.open(target, session=ONE_THREAD, state_dir=tmp_path).proposer
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["k=0"], "k=0: k is a number of tokens, such as k=4"),
        (["k=four"], "k=four: k is a number"),
        (["gamma=1.5"], "gamma=1.5: k is a number of tokens, such as k=4, and gamma a probability"),
        (["gamma=nan"], "gamma=nan"),
        (["k=2", "gamma=0.3"], "one length of drafts at a time, got k=2 and gamma=0.3"),
    ],
)
def test_a_length_that_is_none_is_refused_in_one_line(names: list[str], said: str) -> None:
    with pytest.raises(DrafterError, match=said) as refused:
        open_policy(["ngram", *names], None)
    assert "\n" not in str(refused.value)
