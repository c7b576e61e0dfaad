"""The simulation counts what drafting step by step would have given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')

import numpy as np  # noqa: E402

from edgedraft.runtime.datatypes import Draft  # noqa: E402
from edgedraft.runtime.translate import Translator  # noqa: E402
from edgedraft.runtime.vocab_map import VocabMap  # noqa: E402
from edgedraft.trainer.answers import Answer  # noqa: E402
from edgedraft.trainer.batches import group  # noqa: E402
from edgedraft.trainer.drafter import Training  # noqa: E402
from edgedraft.trainer.examples import answer_examples  # noqa: E402
from edgedraft.trainer.model import DrafterShape, make_drafter  # noqa: E402
from edgedraft.trainer.optimizer import drafter_optimizers  # noqa: E402
from edgedraft.trainer.simulate import Simulator, count_rounds  # noqa: E402


@pytest.fixture(scope="module")
def model(
    answers: list[Answer], vocab_map: VocabMap, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A drafter that is sometimes right."""
    model = make_drafter(DrafterShape(layers=2, hidden=16, heads=2, mlp=24), 270, seed=1)
    plan = group(answer_examples(answers, vocab_map), np.random.default_rng(0), max_tokens=800)
    checkpoint = tmp_path_factory.mktemp("run") / "c.pt"
    Training(model, drafter_optimizers(model), plan * 8, checkpoint).run()
    return model.eval()


@torch.inference_mode()
def draft_naively(model: Any, vocab_map: VocabMap, committed: Sequence[int]) -> tuple[int, ...]:
    """Read everything again for every piece."""
    context = [piece for token in committed for piece in vocab_map.spelling(token)]
    pieces: list[int] = []
    while True:
        logits = model(input_ids=torch.tensor([context + pieces])).logits[0, -1]
        logits[torch.from_numpy(~vocab_map.usable)] = -torch.inf
        pieces.append(int(logits.argmax()))
        draft = Draft(tuple(pieces), (1.0,) * len(pieces))
        tokens = Translator(vocab_map).translate(draft, budget=4).tokens
        if len(tokens) == 4 or len(pieces) == 8:
            return tokens


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_drafts_of_all_positions_equal_drafts_made_one_by_one(
    model: Any, vocab_map: VocabMap, answers: list[Answer], share: float
) -> None:
    """Also where some pieces must not be drafted."""
    usable = vocab_map.usable & (np.random.default_rng(0).random(len(vocab_map.usable)) < share)
    vocab_map = replace(vocab_map, usable=usable)
    spellings = set()
    for answer in answers[:3]:
        together = Simulator(model, vocab_map).drafts(answer)
        for i, draft in enumerate(together):
            committed = [*answer.prompt_ids, *answer.response_ids[:i]]
            assert draft == draft_naively(model, vocab_map, committed), i
            spellings |= {len(vocab_map.spelling(token)) for token in draft}
    assert max(spellings) > 1, "drafts of single pieces prove little"


def test_rounds_equal_rounds_played_one_by_one(
    model: Any, vocab_map: VocabMap, answers: list[Answer]
) -> None:
    truth = answers[1].response_ids
    emitted: list[int] = []
    rounds = 0
    while len(emitted) < len(truth):
        for token in draft_naively(model, vocab_map, [*answers[1].prompt_ids, *emitted]):
            if list(truth[: len(emitted) + 1]) != [*emitted, token]:
                break
            emitted.append(token)
        emitted += truth[len(emitted) : len(emitted) + 1]
        rounds += 1
    assert rounds < len(truth), "something was accepted"
    counts = count_rounds(Simulator(model, vocab_map).drafts(answers[1]), truth)
    assert counts.rounds == rounds


def test_right_drafts_give_k_plus_one_and_wrong_ones_one() -> None:
    truth = list(range(23))
    right = [truth[i : i + 4] for i in range(23)]
    assert count_rounds(right, truth).tau == 23 / 5
    assert count_rounds(right, truth).first_rate == 1.0
    wrong = [[99]] * 23
    assert count_rounds(wrong, truth).tau == 1.0
    assert count_rounds(wrong, truth).first_rate == 0.0


def test_answers_are_counted_by_data_set_and_by_how_they_ended(
    model: Any, vocab_map: VocabMap, answers: list[Answer]
) -> None:
    results = Simulator(model, vocab_map).measure(answers[:5])
    assert set(results) == {"all", "finished", "cut", "toy"}
    sizes = {name: counts.tokens for name, counts in results.items()}
    assert sizes["all"] == sizes["toy"] == sizes["finished"] + sizes["cut"]
    assert sizes["finished"] == sum(len(a.response_ids) for a in answers[:5:2])
    assert results["all"].rounds == results["finished"].rounds + results["cut"].rounds
