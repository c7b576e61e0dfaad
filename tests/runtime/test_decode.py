"""Requests one after the other on one decoder: cancelling, giving up, errors, cache reuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from edgedraft.runtime import (
    DecodeConfig,
    OnnxModel,
    PromptError,
    Proposal,
    Proposer,
    RoundTrace,
    SamplingConfig,
    SpeculativeDecoder,
    SuffixLookup,
)
from edgedraft.runtime.datatypes import FloatArray
from fakes import PROMPT, OracleProposer, RandomTreeProposer, TableModel, random_table, run

VOCAB = 23
TABLE = random_table(VOCAB, 11)
CONTRACTS = ("own", "genai", "concat")


def tokens_of(traces: Iterable[RoundTrace]) -> list[int]:
    return [token for trace in traces for token in trace.emitted]


def prompts_that_share(length: int = 40) -> list[list[int]]:
    """Return prompts that share, diverge from, shorten and repeat the ones before them."""
    rng = np.random.default_rng(5)
    first = rng.integers(VOCAB, size=length).tolist()
    other = rng.integers(VOCAB, size=length).tolist()
    return [
        first,
        first,
        [*first, 1, 2, 3],
        [*first[:25], *other[:10]],
        first[:12],
        first[:1],
        other,
        [other[0]],
        [*other, *first],
        first,
    ]


@pytest.mark.parametrize("model", ["table", *CONTRACTS])
def test_every_request_equals_a_fresh_decoders(
    tiny_model: Callable[..., OnnxModel], model: str
) -> None:
    def fresh() -> Any:
        return TableModel(TABLE) if model == "table" else tiny_model(contract=model)

    config = DecodeConfig(max_tokens=12)
    used = SpeculativeDecoder(fresh(), SuffixLookup())
    target = fresh()
    previous: list[int] = []
    for prompt in prompts_that_share():
        alone = SpeculativeDecoder(target)
        alone.forget()
        target.rollback(0)
        expected = run(target, config, prompt=prompt, decoder=alone)
        output = run(target, config, prompt=prompt, decoder=used)
        assert output.tokens == expected.tokens
        shared = 0
        while shared < min(len(prompt) - 1, len(previous)) and prompt[shared] == previous[shared]:
            shared += 1
        assert used.reused_tokens == shared
        previous = [*prompt, *output.tokens][:-1]


def test_only_the_part_of_a_prompt_that_is_new_is_computed() -> None:
    model = TableModel(TABLE)
    decoder = SpeculativeDecoder(model)
    first = list(range(20))
    answer = tokens_of(decoder.rounds(first, DecodeConfig(max_tokens=5)))
    assert model.extended == [19]
    # A chat sends the whole conversation again.
    list(decoder.rounds([*first, *answer, 7, 8], DecodeConfig(max_tokens=2)))
    assert decoder.reused_tokens == 24
    assert model.extended == [19, 2]


def test_a_long_prompt_is_computed_in_pieces() -> None:
    model = TableModel(TABLE)
    prompt = [i % VOCAB for i in range(300)]
    list(SpeculativeDecoder(model).rounds(prompt, DecodeConfig(max_tokens=1)))
    assert model.extended == [128, 128, 43]
    assert model.cache == prompt


@pytest.mark.parametrize("closed_after", [0, 1, 3])
@pytest.mark.parametrize("model", ["table", *CONTRACTS])
def test_a_request_given_up_early_does_not_disturb_the_next(
    tiny_model: Callable[..., OnnxModel], model: str, closed_after: int
) -> None:
    target = TableModel(TABLE) if model == "table" else tiny_model(contract=model)
    config = DecodeConfig(max_tokens=30)
    expected = run(target, config)
    truth = (*PROMPT, *expected.tokens)
    decoder = SpeculativeDecoder(target, OracleProposer(truth, VOCAB, mistakes=0.3))
    request = decoder.rounds(PROMPT, config)
    list(islice(request, closed_after))
    request.close()
    assert run(target, config, decoder=decoder).tokens == expected.tokens
    given_up = decoder.rounds([4, 4, 9], config)
    list(islice(given_up, closed_after))
    del given_up
    assert run(target, config, decoder=decoder).tokens == expected.tokens


class _Failing(TableModel):
    """Fails when told, half of the work done."""

    fail_at = -1

    def _append(self, tokens: Sequence[int]) -> None:
        super()._append(tokens)
        if len(self.cache) >= self.fail_at > 0:
            raise RuntimeError("the device is gone")


@pytest.mark.parametrize("fail_at", [3, 130, 150, 299, 305])
def test_an_error_in_the_middle_does_not_disturb_the_next_request(fail_at: int) -> None:
    prompt = [i * i % VOCAB for i in range(300)]
    config = DecodeConfig(max_tokens=20)
    expected = run(TableModel(TABLE), config, prompt=prompt)
    target = _Failing(TABLE)
    oracle = OracleProposer((*prompt, *expected.tokens), VOCAB, mistakes=0.2)
    decoder = SpeculativeDecoder(target, oracle)
    run(target, config, prompt=prompt[:100], decoder=decoder)
    target.fail_at = fail_at
    with pytest.raises(RuntimeError, match="the device is gone"):
        for _ in range(2):
            list(decoder.rounds(prompt, config))
            list(decoder.rounds(prompt[::-1], config))
    target.fail_at = -1
    assert run(target, config, prompt=prompt, decoder=decoder).tokens == expected.tokens


def test_an_error_of_the_proposer_or_the_caller_does_not_disturb_the_next_request() -> None:
    expected = run(TableModel(TABLE), DecodeConfig(max_tokens=20))
    target = TableModel(TABLE)
    tree = RandomTreeProposer((*PROMPT, *expected.tokens), VOCAB, 1)
    decoder = SpeculativeDecoder(target, tree)
    for moment in range(1, 12):
        seen: list[int] = []

        def is_last(token: int, seen: list[int] = seen, moment: int = moment) -> bool:
            seen.append(token)
            if len(seen) == moment:
                raise KeyError("a bug of the caller")
            return False

        with pytest.raises(KeyError):
            list(decoder.rounds(PROMPT, DecodeConfig(max_tokens=20), is_last))
        assert run(target, DecodeConfig(max_tokens=20), decoder=decoder).tokens == expected.tokens


def test_two_interleaved_requests_of_one_decoder_are_noticed() -> None:
    decoder = SpeculativeDecoder(TableModel(TABLE))
    first = decoder.rounds(PROMPT, DecodeConfig(max_tokens=20))
    next(first)
    list(decoder.rounds([1, 2, 3, 4, 5, 6, 7, 8, 9], DecodeConfig(max_tokens=20)))
    with pytest.raises(AssertionError, match="trails the committed tokens"):
        next(first)


def test_cancelling_ends_a_request_after_its_round() -> None:
    decoder = SpeculativeDecoder(TableModel(TABLE))
    traces = []
    for trace in decoder.rounds(PROMPT, DecodeConfig(max_tokens=50)):
        traces.append(trace)
        if len(traces) == 3:
            decoder.cancel()
    # The third round was finished before the word was heard.
    assert [t.finish_reason for t in traces] == [None, None, None, "cancelled"]
    *_, last = decoder.rounds(PROMPT, DecodeConfig(max_tokens=50))
    assert last.finish_reason == "length"


def test_cancelling_when_nothing_runs_does_not_touch_the_next_request() -> None:
    decoder = SpeculativeDecoder(TableModel(TABLE))
    decoder.cancel()
    assert run(TableModel(TABLE), DecodeConfig(max_tokens=5), decoder=decoder).finish == "length"


class _Slow(TableModel):
    """Tells another thread when a pass runs, and waits until it has acted."""

    def __init__(self, table: FloatArray, wait_in: str) -> None:
        super().__init__(table)
        self._wait_in = wait_in
        self.inside, self.go_on = threading.Event(), threading.Event()

    def extend(self, tokens: Sequence[int]) -> None:
        self._meet("extend")
        super().extend(tokens)

    def forward(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._meet("forward")
        return super().forward(tokens, parents)

    def _meet(self, where: str) -> None:
        if where == self._wait_in:
            self.inside.set()
            assert self.go_on.wait(10)


@pytest.mark.parametrize("where", ["extend", "forward"])
def test_another_thread_can_cancel_during_prefill_and_decode(where: str) -> None:
    prompt = [i % VOCAB for i in range(500)]
    target = _Slow(TABLE, where)
    decoder = SpeculativeDecoder(target)
    traces: list[RoundTrace] = []
    worker = threading.Thread(
        target=lambda: traces.extend(decoder.rounds(prompt, DecodeConfig(max_tokens=100)))
    )
    worker.start()
    assert target.inside.wait(10)
    decoder.cancel()
    target.go_on.set()
    worker.join(10)
    assert not worker.is_alive()
    if where == "extend":
        assert traces == []
        assert len(target.cache) == 128  # the pass that ran was finished, no other was begun
    else:
        assert [t.finish_reason for t in traces] == ["cancelled"]
    # What was computed is true and reused.
    expected = run(TableModel(TABLE), DecodeConfig(max_tokens=9), prompt=prompt)
    output = run(target, DecodeConfig(max_tokens=9), prompt=prompt, decoder=decoder)
    assert output.tokens == expected.tokens
    assert decoder.reused_tokens == (128 if where == "extend" else 499)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "holds no tokens"),
        ([3, VOCAB], "outside the vocabulary of 23"),
        ([3, -1], "outside the vocabulary of 23"),
        ([-(10**9)], "outside the vocabulary of 23"),
        ([1] * 31, "has 31 tokens, the context holds 30"),
    ],
)
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(repetition_penalty=1.2)])
def test_a_prompt_that_cannot_be_served_is_refused_in_one_line(
    prompt: list[int], message: str, sampling: SamplingConfig
) -> None:
    decoder = SpeculativeDecoder(TableModel(TABLE, context_length=30))
    with pytest.raises(PromptError, match=message) as caught:
        list(decoder.rounds(prompt, DecodeConfig(sampling=sampling)))
    assert "\n" not in str(caught.value)
    assert len(run(TableModel(TABLE), DecodeConfig(3), decoder=decoder).tokens) == 3


def test_the_statistics_of_a_trace_count_what_was_compared() -> None:
    truth = [1, 2, 3, 4, 5, 6]
    table = np.full((VOCAB, VOCAB), -5, np.float32)
    for a, b in zip(truth, truth[1:], strict=False):
        table[a, b] = 5

    class Fixed(Proposer):
        def propose(self, committed: Sequence[int], budget: int) -> Proposal:
            # 2 and its rival; behind 2 only wrong guesses
            return Proposal((9, 2, 7, 8), (-1, -1, 1, 1), (0.5,) * 4, "fixed")

    decoder = SpeculativeDecoder(TableModel(table, memory=0), Fixed())
    trace = next(iter(decoder.rounds([1], DecodeConfig(max_tokens=9))))
    assert trace.emitted == (2, 3)
    assert trace.verdict.path == (1,)
    assert trace.num_evaluated == 2
