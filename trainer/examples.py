"""What the drafter trains on: token sequences with a weight for every prediction.

The context is exactly the runtime's: the spellings of the target's prompt and answer, one after
the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from edgedraft.runtime.vocab_map import VocabMap

from .answers import Answer
from .tokenizer import END_ID
from .trie_marginal import trie_marginal

# One prompt token in ten is learned: the rest need no head, which is half of a step's cost.
_PROMPT_STRIDE = 10
_TEXT_LENGTH = 512
_MAX_LENGTH = 1024
_LOOP_TOKENS = 16
# Passes over an answer per epoch, where a data set has few: mathematics would drown the rest.
_REPEATS: Mapping[str, int] = {"llms_from_scratch": 3, "mbpp": 3, "self_instruct": 3}


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """What should come at every position, as a distribution over few draft tokens."""

    ids: npt.NDArray[np.int64]  # (length, K)
    probs: npt.NDArray[np.float32]  # (length, K), padded with 0


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence; `weights[i]` is how much the prediction of `tokens[i]` counts."""

    tokens: npt.NDArray[np.int64]  # (length,)
    weights: npt.NDArray[np.float32]  # (length,)
    teacher: Teacher | None = None


def text_examples(texts: Iterable[str], tokenizer: Tokenizer) -> list[Example]:
    """Return texts, joined by the end token, as examples of one length."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch_fast(list(texts)):
        stream += [END_ID, *encoding.ids]
    cuts = (stream[i : i + _TEXT_LENGTH] for i in range(0, len(stream), _TEXT_LENGTH))
    return [
        Example(np.array(cut, np.int64), np.ones(len(cut), np.float32))
        for cut in cuts
        if len(cut) > 1
    ]


def answer_examples(
    answers: Iterable[Answer], vocab_map: VocabMap, *, teach: bool = False
) -> list[Example]:
    """Return one epoch of answers as examples: small data sets several times, held-out answers
    never.

    With `teach`, answers that hold the target's logits get a teacher.
    """
    examples: list[Example] = []
    for answer in answers:
        if answer.is_held_out:
            continue
        example = answer_example(answer, vocab_map, teach=teach)
        examples += [example] * _REPEATS.get(answer.data_set, 1)
    return examples


def answer_example(answer: Answer, vocab_map: VocabMap, *, teach: bool = False) -> Example:
    """Return prompt and answer as the drafter will read them."""
    prompt = [piece for token in answer.prompt_ids for piece in vocab_map.spelling(token)]
    spelled = [vocab_map.spelling(token) for token in worth_learning(answer)]
    tokens = np.array([*prompt, *(piece for pieces in spelled for piece in pieces)], np.int64)
    weights = np.ones(len(tokens), np.float32)
    weights[: len(prompt)] = np.arange(len(prompt)) % _PROMPT_STRIDE == answer.row % _PROMPT_STRIDE
    teacher = _teacher(answer, vocab_map, tokens, spelled) if teach and answer.top_k else None
    return Example(tokens[:_MAX_LENGTH], weights[:_MAX_LENGTH], teacher)


def worth_learning(answer: Answer) -> Sequence[int]:
    """Return the response, without the loop that an unfinished one may end in.

    It is cut where its latest tokens have been said before in the same order: what follows is
    copying, which needs no model.
    """
    tokens = answer.response_ids
    if answer.finished:
        return tokens
    seen: set[tuple[int, ...]] = set()
    for end in range(_LOOP_TOKENS, len(tokens) + 1):
        ending = tokens[end - _LOOP_TOKENS : end]
        if ending in seen:
            return tokens[:end]
        seen.add(ending)
    return tokens


def _teacher(
    answer: Answer,
    vocab_map: VocabMap,
    tokens: npt.NDArray[np.int64],
    spelled: Sequence[Sequence[int]],
) -> Teacher:
    """Spread the target's distribution over pieces; all on the true one where it is not known."""
    assert answer.top_k is not None
    ids = np.tile(tokens[:, None], answer.top_k.ids.shape[1])
    probs = np.zeros(ids.shape, np.float32)
    probs[:, 0] = 1.0
    at = len(tokens) - sum(map(len, spelled))
    for pieces, top_ids, logits in zip(
        spelled, answer.top_k.ids, answer.top_k.logits, strict=False
    ):
        likely = np.exp(logits - logits.max())
        spellings = [vocab_map.spelling(int(token)) for token in top_ids]
        for marginal in trie_marginal(spellings, likely / likely.sum(), pieces):
            ids[at, : len(marginal)] = list(marginal)
            probs[at] = 0.0
            probs[at, : len(marginal)] = list(marginal.values())
            at += 1
    return Teacher(ids[:_MAX_LENGTH], probs[:_MAX_LENGTH])
