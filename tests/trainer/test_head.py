"""A head learns how likely a drafted piece is to survive; the drafter it belongs to stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "edgedraft[train]"')
pytest.importorskip("accelerate", reason='needs accelerate: pip install "edgedraft[train]"')

from edgedraft.runtime.vocab_map import VocabMap  # noqa: E402
from edgedraft.trainer.acceptance_head import (  # noqa: E402
    FILE,
    AcceptanceHead,
    acceptance_loss,
    certainty_of,
    load_head,
    save_head,
)
from edgedraft.trainer.answers import Answer, read_answers  # noqa: E402
from edgedraft.trainer.cli import main  # noqa: E402
from edgedraft.trainer.data_sets import is_held_out  # noqa: E402
from edgedraft.trainer.errors import TrainError  # noqa: E402
from edgedraft.trainer.head_command import RECORD  # noqa: E402
from edgedraft.trainer.head_rows import Rows, rows_of  # noqa: E402
from edgedraft.trainer.model import DrafterShape, load_drafter, make_drafter, save_drafter  # noqa: E402
from edgedraft.trainer.reliability import brier, reliability, running_mean  # noqa: E402
from edgedraft.trainer.simulate import Simulator, count_rounds  # noqa: E402
from edgedraft.trainer.target import Target  # noqa: E402
from edgedraft.trainer.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer  # noqa: E402
from toy_vocabularies import TEXT  # noqa: E402

WIDTH = 32


@pytest.fixture(scope="module")
def drafter(
    tmp_path_factory: pytest.TempPathFactory, answers_file: Path, target_folder: Path
) -> Path:
    """A drafter that is right now and then."""
    untrained, folder = (tmp_path_factory.mktemp(name) / "d" for name in ("untrained", "drafter"))
    tokenizer = train_tokenizer([TEXT], 300)
    save_tokenizer(tokenizer, untrained)
    model = make_drafter(DrafterShape(1, WIDTH, 2, 48), tokenizer.get_vocab_size(), seed=0)
    save_drafter(model, untrained)
    pair = ["--answers", f"{answers_file}:{target_folder}", "--start", str(untrained)]
    options = ["--tokenizer", str(untrained), "--epochs", "25", "--out", str(folder)]
    assert main(["drafter", *pair, *options]) == 0
    return folder


@pytest.fixture
def vocab_map_of(target: Target) -> Callable[[Path], VocabMap]:
    """Return what makes the vocabulary map of a drafter's folder."""
    return lambda folder: target.vocab_map(load_tokenizer(folder))


@pytest.fixture
def train(drafter: Path, answers_file: Path, target_folder: Path) -> Callable[..., int]:
    """Train a head on the toy target's answers."""

    def call(out: Path, *options: str, answers: Path = answers_file) -> int:
        pair = ["--drafter", str(drafter), "--answers", f"{answers}:{target_folder}"]
        return main(["head", *pair, "--out", str(out), "--lr", "0.01", *options])

    return call


@pytest.fixture
def with_logits(
    write_rows: Callable[..., Path], answer_row: Callable[[int], dict[str, Any]]
) -> Path:
    """Answers whose target gives 0.7 to what it said and 0.3 to another token."""

    def row(number: int) -> dict[str, Any]:
        answer = answer_row(number)
        ids = answer["response_ids"]
        logits = [float(np.log(0.7)), float(np.log(0.3))]
        top = {"top_k_ids": [[x, (x + 1) % 300] for x in ids], "top_k_logits": [logits] * len(ids)}
        return answer | top

    return write_rows("with_logits.jsonl", *map(row, range(60)))


def test_an_untrained_head_says_the_drafters_own_probability() -> None:
    logits = 4 * torch.randn(50, 40)
    logits[0, 3] = 60.0  # as sure as can be
    said = AcceptanceHead(8)(torch.randn(50, 8), certainty_of(logits)).sigmoid()
    torch.testing.assert_close(said, logits.softmax(-1).amax(-1), rtol=1e-4, atol=2e-6)
    assert bool(((said > 0) & (said < 1)).all())


def test_a_weight_on_rejections_leaves_probabilities_honest() -> None:
    """The best prediction of labels that are 1 in seven of ten cases stays 0.7."""
    labels = torch.tensor([1.0] * 7 + [0.0] * 3)
    for weight in (1.0, 6.0):
        grid = torch.linspace(0.01, 0.99, 99)
        losses = [float(acceptance_loss(p.logit().repeat(10), labels, weight)) for p in grid]
        assert float(grid[int(np.argmin(losses))]) == pytest.approx(0.7, abs=1e-6)


def test_a_head_learns_and_the_drafter_stays_as_it_was(
    train: Callable[..., int], drafter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    assert train(out, "--epochs", "30") == 0
    names = {path.name for path in drafter.iterdir()}
    assert {path.name for path in out.iterdir()} == {*names, FILE, RECORD}
    for name in names:
        assert (out / name).read_bytes() == (drafter / name).read_bytes()
    record = json.loads((out / RECORD).read_text())
    everything = record["held_out"]["brier"]["all"]
    assert (
        everything["head"] < everything["own"] and everything["head"] < everything["running_mean"]
    )
    data = {Path(name).name for name in record["provenance"]["data_sha256"]}
    assert data == {"answers.jsonl", "config.json", "model.safetensors", "tokenizer.json"}


def test_the_same_seed_gives_the_same_head(train: Callable[..., int], tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert train(tmp_path / name, "--epochs", "2", "--seed", seed) == 0
    a, b, c = ((tmp_path / name / FILE).read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("changes_held_out", [True, False])
def test_what_held_out_answers_say_is_never_learned(
    train: Callable[..., int],
    write_rows: Callable[..., Path],
    answer_row: Callable[[int], dict[str, Any]],
    tmp_path: Path,
    changes_held_out: bool,
) -> None:
    rows = [answer_row(number) for number in range(60)]
    others = [
        row | {"response_ids": rows[0]["response_ids"]}
        if is_held_out(row["set"], row["row"]) == changes_held_out
        else row
        for row in rows
    ]
    assert others != rows
    for name, some in (("a", rows), ("b", others)):
        answers = write_rows(f"{name}.jsonl", *some)
        assert train(tmp_path / name, "--epochs", "2", answers=answers) == 0
    a, b = ((tmp_path / name / FILE).read_bytes() for name in "ab")
    assert (a == b) == changes_held_out


def test_a_head_is_trained_anew_on_a_folder_that_has_one(
    train: Callable[..., int],
    drafter: Path,
    answers_file: Path,
    target_folder: Path,
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(one, "--epochs", "2") == 0
    options = ["--epochs", "2", "--lr", "0.01", "--out", str(two)]
    pair = ["--drafter", str(one), "--answers", f"{answers_file}:{target_folder}"]
    assert main(["head", *pair, *options]) == 0
    assert (one / FILE).read_bytes() == (two / FILE).read_bytes()


def test_rows_are_what_rounds_compare(
    drafter: Path, answers: list[Answer], vocab_map_of: Callable[[Path], VocabMap]
) -> None:
    """As many drafted pieces are right as a simulation of the rounds finds."""
    model, vocab_map = load_drafter(drafter), vocab_map_of(drafter)
    simulator = Simulator(model, vocab_map)
    for answer in (a for a in answers if a.finished):
        rows = rows_of(model, answer, vocab_map).in_rounds()
        counts = count_rounds(simulator.drafts(answer), answer.response_ids)
        assert abs(int((rows.place == 0).sum()) - counts.rounds) <= 1  # the end is not spelled
        assert np.isnan(rows.chance).all(), "these answers hold no logits"


def test_rows_that_no_round_gets_to_are_left_out(
    drafter: Path, answers: list[Answer], vocab_map_of: Callable[[Path], VocabMap]
) -> None:
    """Those of pieces behind a wrong one of the same target token."""
    model, vocab_map = load_drafter(drafter), vocab_map_of(drafter)
    all_pieces = 0
    kept = 0
    for answer in (a for a in answers if a.finished):
        context = [p for token in answer.prompt_ids for p in vocab_map.spelling(token)]
        expected: list[bool] = []
        for token in answer.response_ids:
            pieces = vocab_map.spelling(token)
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*context, *pieces]])).logits[0]
            best = logits[len(context) - 1 :].argmax(-1).tolist()
            wrong = next((i for i, piece in enumerate(pieces) if best[i] != piece), len(pieces))
            expected += [best[i] == piece for i, piece in enumerate(pieces[: wrong + 1])]
            context += pieces
            all_pieces += len(pieces)
        assert rows_of(model, answer, vocab_map).right.tolist() == expected
        kept += len(expected)
    assert kept < all_pieces


def test_labels_are_what_became_of_a_piece_its_chance_or_the_ratio(
    drafter: Path, with_logits: Path, target: Target, vocab_map_of: Callable[[Path], VocabMap]
) -> None:
    model, vocab_map = load_drafter(drafter), vocab_map_of(drafter)
    answers = read_answers(with_logits, target)
    rows = Rows.join(rows_of(model, answer, vocab_map) for answer in answers[:20])
    right, chance, ratio = (rows.labels(kind) for kind in ("right", "chance", "ratio"))
    assert set(np.unique(right)) == {0.0, 1.0}
    assert (chance[right == 1] >= 0.7 - 1e-6).all() and (chance[right == 0] <= 0.3 + 1e-6).all()
    np.testing.assert_allclose(ratio, np.minimum(1, chance / rows.own))


def test_a_head_for_coupled_sampling_expects_the_targets_chances(
    train: Callable[..., int], with_logits: Path, tmp_path: Path
) -> None:
    for kind in ("right", "chance"):
        options = ["--labels", kind, "--epochs", "30"]
        assert train(tmp_path / kind, *options, answers=with_logits) == 0
    right, chance = (
        json.loads((tmp_path / kind / RECORD).read_text())["held_out"]
        for kind in ("right", "chance")
    )
    assert chance["coupled"]["head"] < right["coupled"]["head"]
    assert right["brier"]["all"]["head"] < chance["brier"]["all"]["head"]


def test_scores_are_those_of_the_definition() -> None:
    assert brier([0.5, 1.0, 0.0], [1, 1, 1]) == pytest.approx((0.25 + 0 + 1) / 3)
    assert brier([0.3], [0.6]) == pytest.approx(0.6 * 0.7**2 + 0.4 * 0.3**2), "an expectation"
    np.testing.assert_allclose(running_mean([1, 1, 0]), [0.5, 0.75, 2.5 / 3])
    table = reliability([0.01, 0.05, 1.0, 0.95], [0, 1, 1, 1])
    assert [x["count"] for x in table] == [2, 2]
    assert [x["came_true"] for x in table] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rejection-weight", "0"], "rejection_weight must be > 0, got 0.0"),
        (["--labels", "chance"], "--labels chance needs answers with top_k_ids"),
        (["--lr", "1e30", "--epochs", "30"], "choose a lower --lr"),
        (["--drafter", "nowhere"], "nowhere: no readable drafter"),
    ],
)
def test_a_wrong_wish_is_refused_in_one_line(
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert train(tmp_path / "head", *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("edgedraft-train: ") and message in error
    assert not (tmp_path / "head").exists()


def test_nothing_is_overwritten(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    assert train(tmp_path) == 2
    assert "has files in it" in capsys.readouterr().err


def test_a_head_of_another_drafter_is_refused(tmp_path: Path) -> None:
    save_head(AcceptanceHead(8), tmp_path)
    load_head(tmp_path, 8)
    with pytest.raises(TrainError, match="no acceptance head for hidden states of 9"):
        load_head(tmp_path, 9)
