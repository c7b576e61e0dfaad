"""What an acceptance head says may end a draft, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import numpy as np
import pytest

from edgedraft.runtime import DecodeConfig, OnnxModel, Proposal, SamplingConfig, SpeculativeDecoder
from edgedraft.runtime.composite import CompositeProposer
from edgedraft.runtime.datatypes import FloatArray
from edgedraft.runtime.draft_model import DraftModel
from edgedraft.runtime.policy import DraftPolicy, PassCosts
from edgedraft.runtime.suffix_lookup import SuffixLookup
from fakes import TableModel, random_table, run
from graphs import TINY_VOCAB_SIZE
from toy_vocabularies import byte_level, pair

DRAFT, TARGET = 270, 380
UNUSABLE = 1  # the mark, which no target token is
NAN = float("nan")
PROMPT = tuple(byte_level(TARGET).encode("The quick brown fox", add_special_tokens=False).ids)
COSTS = PassCosts({2: 0.010, 8: 0.013})
COUPLED = SamplingConfig(temperature=0.9, seed=3)
LATTICE = SamplingConfig(temperature=0.9, seed=3, verification="lattice")


class Opinionated(TableModel):
    """A drafter with a head that says the same numbers again and again, whatever it sees."""

    def __init__(self, table: FloatArray, opinions: Sequence[float] = ()) -> None:
        super().__init__(table, max_rows=1)
        self._opinions: Iterator[float] | None = cycle(opinions) if opinions else None

    def forward(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        rows = super().forward(tokens, parents)
        if self._opinions is not None:
            told = [next(self._opinions) for _ in tokens]
            self.acceptance = np.array(told, np.float32)
        return rows


class Remembering(DraftModel):
    """Keeps every proposal."""

    def begin(self, sampling: SamplingConfig) -> None:
        super().begin(sampling)
        self.proposals: list[Proposal] = []

    def propose(self, committed: Sequence[int], budget: int) -> Proposal:
        self.proposals.append(super().propose(committed, budget))
        return self.proposals[-1]


def drafted(opinions: Sequence[float], table: FloatArray | None = None) -> Proposal:
    """Return the draft of one round, which may have twelve tokens."""
    model = Opinionated(random_table(DRAFT, 1) if table is None else table, opinions)
    return DraftModel(model, pair(), policy=DraftPolicy(COSTS)).propose(PROMPT, 12)


ERRING = {
    "never": [0.0],
    "always": [1.0],
    "nothing": [NAN],
    "no probability": [-3.0, 7.0, float("inf"), -float("inf")],
    "now this, now that": [1.0, NAN, 0.0, 1e-30, 1 - 1e-7],
}


@pytest.mark.parametrize("opinions", ERRING.values(), ids=ERRING)
@pytest.mark.parametrize("sampling", [SamplingConfig(), COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("with_price", [True, False])
def test_a_head_that_always_errs_changes_no_token(
    opinions: Sequence[float], sampling: SamplingConfig, with_price: bool
) -> None:
    config = DecodeConfig(max_tokens=60, sampling=sampling)

    def target() -> TableModel:
        return TableModel(random_table(TARGET, 0))

    policy = DraftPolicy(COSTS if with_price else None)
    drafter = DraftModel(Opinionated(random_table(DRAFT, 1), opinions), pair(), policy=policy)
    proposer = CompositeProposer([SuffixLookup()], drafter, policy)
    plain = run(target(), config, prompt=PROMPT)
    decoder = SpeculativeDecoder(target(), proposer, policy)
    output = run(target(), config, prompt=PROMPT, decoder=decoder)
    assert output.tokens == plain.tokens
    np.testing.assert_array_equal(output.rows, plain.rows)


@pytest.mark.parametrize("opinions", ERRING.values(), ids=ERRING)
@pytest.mark.parametrize("trees", [True, False], ids=["lattice", "line"])
def test_a_head_has_no_say_in_drafts_that_are_drawn(opinions: Sequence[float], trees: bool) -> None:
    """What ends them must not have looked at the draw: they are the same as without a head."""
    config = DecodeConfig(max_tokens=40, sampling=LATTICE)

    def proposals(says: Sequence[float]) -> list[tuple[object, ...]]:
        policy = DraftPolicy(COSTS)
        model = Opinionated(random_table(DRAFT, 1), says)
        drafter = Remembering(model, pair(), policy=policy, target_vocab_size=TARGET, trees=trees)
        # Steps that take no time: when to stop must not depend on the clock here.
        drafter._step_s = 0.0
        target = TableModel(random_table(TARGET, 0), supports_trees=trees)
        decoder = SpeculativeDecoder(target, drafter, DraftPolicy())
        tokens = run(target, config, prompt=PROMPT, decoder=decoder).tokens
        return [tokens, *((p.tokens, p.confidence, p.draft) for p in drafter.proposals)]

    assert proposals(opinions) == proposals(())


def test_a_draft_ends_where_the_head_expects_a_rejection() -> None:
    flat = np.zeros((DRAFT, DRAFT), np.float32)  # the drafter itself is sure of nothing
    sharp = flat.copy()
    sharp[:, 40] = 50.0
    for table in (flat, sharp):
        hopeless, hopeful = drafted([0.01], table), drafted([0.99], table)
        assert hopeless.draft is not None and hopeful.draft is not None
        assert len(hopeless.draft.tokens) <= 4
        assert len(hopeful.draft.tokens) == 12
    doubtful = drafted([0.99, 0.99, 0.99, 0.01], sharp)
    assert doubtful.draft is not None and len(doubtful.draft.tokens) == 4


def test_the_confidence_of_a_token_is_what_the_head_said_of_its_pieces() -> None:
    proposal = drafted([0.8, 0.9, 0.7])
    assert proposal.draft is not None
    said = [
        np.float32(p) for p, _ in zip(cycle([0.8, 0.9, 0.7]), proposal.draft.tokens, strict=False)
    ]
    assert proposal.draft.probs == tuple(map(float, said))


def test_what_is_no_probability_gives_way_to_the_drafters_own() -> None:
    # One of them only: a step's time decides over the rest.
    own = drafted(()).draft
    for opinion in (NAN, -0.1, 1.5):
        other = drafted([opinion]).draft
        assert own is not None and other is not None and other.probs[0] == own.probs[0]


def test_a_head_speaks_of_the_likeliest_piece_and_of_no_other() -> None:
    table = np.zeros((DRAFT, DRAFT), np.float32)
    table[:, UNUSABLE] = 50.0
    table[:, 40] = 5.0
    model = Opinionated(table, [0.999])
    model._memory = 0.0
    draft = DraftModel(model, pair()).propose(PROMPT, 1).draft
    assert draft is not None and draft.tokens[0] == 40
    assert draft.probs[0] < 0.5, "its own, among what can be drafted"


Make = Callable[..., OnnxModel]


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 20])
def test_a_graphs_head_speaks_of_every_row(tiny_model: Make, rows: int) -> None:
    model = tiny_model(acceptance=True)
    tokens = np.random.default_rng(0).integers(TINY_VOCAB_SIZE, size=60).tolist()
    model.extend(tokens[:40])
    assert model.acceptance is None, "nobody asked for a row"
    logits = model.forward(tokens[40 : 40 + rows])
    assert model.acceptance is not None and model.acceptance.shape == (rows,)
    np.testing.assert_allclose(model.acceptance, 1 / (1 + np.exp(-logits.max(-1) / 10)), rtol=1e-6)


@pytest.mark.parametrize("single_rows", [True, False])
def test_what_was_said_of_a_row_is_not_that_of_a_dummy_beside_it(
    tiny_model: Make, single_rows: bool
) -> None:
    model = tiny_model(acceptance=True)
    model.single_rows = single_rows
    model.extend(range(20))
    said = []
    for token in (5, 9, 5):
        model.rollback(20)
        model.forward([token])
        assert model.acceptance is not None and model.acceptance.shape == (1,)
        said.append(float(model.acceptance[-1]))
    assert said[0] == said[2] != said[1]


@pytest.mark.parametrize("contract", ["own", "genai", "concat"])
def test_a_graph_without_a_head_says_nothing(tiny_model: Make, contract: str) -> None:
    model = tiny_model(contract=contract)
    model.forward([1, 2])
    assert model.acceptance is None
