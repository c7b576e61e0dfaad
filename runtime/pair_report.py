"""What two vocabularies have in common, and what a drafter can make of it: for people and scripts.

Shares of a vocabulary say little, since most tokens are rare: what counts is how many draft tokens
a target token takes in text. So short samples of several kinds are cut by the target and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from .vocab_map import VocabMap
from .vocabulary import Vocabulary

_MOST_PIECES = 5  # longer spellings are counted with these
_NUM_EXAMPLES = 10
_DRAFT = 6  # tokens of a usual draft
_HARD = 2.0  # draft tokens per target token
_SAMPLES = {
    "English": "The old harbour had been quiet for years, but that morning three boats came back "
    "at once. Nobody could remember who had painted the lighthouse, or why its windows always "
    "faced the mountains instead of the sea.",
    "arithmetic": "A shop sold 1,248 tickets in March and 37.5% more in April. That is 1248 * "
    "1.375 = 1716 tickets, so both months together brought in 2964 * $12 = $35,568.",
    "code": 'def read_scores(path):\n    """Return name and score of every line."""\n    with '
    "open(path) as file:\n        for line in file:\n            name, _, score = "
    'line.rstrip().partition("\\t")\n            if score.isdigit():\n                yield name, '
    "int(score)\n",
    "European": "Die Brücke wurde früher nur im Sommer geöffnet. À l’été suivant, les élèves ont "
    "vérifié chaque réponse. ¿Cuántos años después llegó el señor Núñez a Málaga?",
    "Asian": "今天的天气很好,我们去公园散步吧。 明日の会議は何時に始まりますか。 "
    "오늘은 도서관에서 책을 읽었어요.",
}


def describe_pair(draft: Vocabulary, target: Vocabulary, pair: VocabMap) -> dict[str, Any]:
    """Return what there is to know about a pair as a JSON object."""
    texts = [token for token, content in enumerate(target.pieces) if content]
    lengths = np.diff(pair.spelling_start.astype(np.int64))[texts]
    bounded = np.minimum(lengths, _MOST_PIECES)
    samples = {
        name: target.tokenizer.encode(text, add_special_tokens=False).ids
        for name, text in _SAMPLES.items()
    }
    return {
        "same_vocabulary": draft.fingerprint == target.fingerprint,
        "draft_tokens": _kind(draft),
        "target_tokens": _kind(target),
        "shared": len(draft.canonical.keys() & target.canonical.keys()),
        "shared_as_strings": _shared_strings(draft, target),
        "unusable_draft_tokens": int(np.count_nonzero(~pair.usable)),
        "target_tokens_by_pieces": {
            str(n): int(np.count_nonzero(bounded == n)) for n in range(1, _MOST_PIECES + 1)
        },
        "target_tokens_without_spelling": int(np.count_nonzero(lengths == 0)),
        "end_of_answer": pair.key.draft_end is not None and bool(pair.key.target_stop_ids),
        "marks_special_tokens": pair.key.draft_mark is not None,
        "samples": {name: _count(pair, tokens) for name, tokens in samples.items() if tokens},
        "examples": _examples(draft, target, pair, chain(*samples.values())),
    }


def pair_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield `describe_pair`'s facts line by line."""
    for side in ("draft", "target"):
        kind = facts[f"{side}_tokens"]
        yield (
            f"{side + ' vocabulary':18}{kind['text']:9,} tokens of text ({kind['alphabet']}), "
            f"{kind['special']:,} special"
        )
    yield (
        f"{'in both':18}{facts['shared']:9,} byte strings; "
        f"{facts['shared_as_strings']:,} if one compared printed strings"
    )
    yield f"{'never drafted':18}{facts['unusable_draft_tokens']:9,} of the drafter's tokens"
    yield f"\n{'draft tokens':18}target tokens"
    by_pieces = facts["target_tokens_by_pieces"] | {"none": facts["target_tokens_without_spelling"]}
    for pieces, count in by_pieces.items():
        label = f"{pieces} or more" if pieces == str(_MOST_PIECES) else pieces
        share = count / max(1, facts["target_tokens"]["text"])
        yield f"  {label:16}{count:9,}{share:8.1%}"
    yield f"\n{'in text':18}target tokens   draft tokens each   with one draft token"
    for name, sample in facts["samples"].items():
        each, single = _per_target_token(sample), sample["single"] / sample["target_tokens"]
        yield f"  {name:16}{sample['target_tokens']:9,}{each:20.2f}{single:23.0%}"
    if facts["examples"]:
        yield "\nexamples"
    yield from (f"  {example}" for example in facts["examples"])
    yield "\nwhat to expect"
    yield from (f"  {expectation}" for expectation in _expectations(facts))


def _expectations(facts: Mapping[str, Any]) -> Iterator[str]:
    samples = facts["samples"]
    if facts["same_vocabulary"]:
        yield "Both vocabularies are the same: drafts need no translation."
    elif facts["draft_tokens"] == facts["target_tokens"]:
        yield "As many tokens on both sides, but not the same ones: ids differ in meaning."
    reach = [f"{_DRAFT / _per_target_token(s):.1f} of {name}" for name, s in samples.items()]
    yield f"A draft of {_DRAFT} tokens proposes this many of the target's: {', '.join(reach)}."
    hard = [name for name, s in samples.items() if _per_target_token(s) >= _HARD]
    if hard:
        yield f"Little of {' and '.join(hard)} will be right: a token needs all of its pieces."
    if unspelled := facts["target_tokens_without_spelling"]:
        yield (
            f"{unspelled:,} target tokens cannot be written by the drafter: it never proposes them "
            "and does not see them."
        )
    if not facts["end_of_answer"]:
        yield "The end of an answer is never proposed: the drafter has no token for it."
    if not facts["marks_special_tokens"]:
        yield "The drafter does not see the target's special tokens: it has no mark for them."


def _per_target_token(sample: Mapping[str, int]) -> float:
    return max(1, sample["draft_tokens"]) / sample["target_tokens"]


def _count(pair: VocabMap, tokens: Sequence[int]) -> dict[str, int]:
    lengths = [len(pair.spelling(token)) for token in tokens]
    return {
        "target_tokens": len(lengths),
        "draft_tokens": sum(lengths),
        "single": lengths.count(1),
    }


def _examples(
    draft: Vocabulary, target: Vocabulary, pair: VocabMap, tokens: Iterable[int]
) -> list[str]:
    """Show how some of these tokens, or the vocabulary's first ones, are put together."""
    longer = (
        token
        for token in chain(tokens, range(len(target)))
        if target.pieces[token] and len(pair.spelling(token)) > 1
    )
    return [
        f"{_shown(target.pieces[token])} = "
        + " + ".join(_shown(draft.pieces[piece]) for piece in pair.spelling(token))
        for token in islice(_distinct(longer), _NUM_EXAMPLES)
    ]


def _distinct(tokens: Iterable[int]) -> Iterator[int]:
    seen: set[int] = set()
    for token in tokens:
        if token not in seen:
            seen.add(token)
            yield token


def _shown(content: bytes) -> str:
    try:
        return repr(content.decode())
    except UnicodeDecodeError:
        return repr(content)


def _kind(vocabulary: Vocabulary) -> dict[str, Any]:
    text = sum(1 for content in vocabulary.pieces if content)
    return {
        "text": text,
        "special": int(np.count_nonzero(vocabulary.special)),
        "alphabet": "byte-level" if vocabulary.is_byte_level else "SentencePiece",
    }


def _shared_strings(draft: Vocabulary, target: Vocabulary) -> int:
    """Count draft tokens that look like a target token once the sign for a leading space is
    exchanged: what comparing strings finds (OmniDraft, arXiv 2507.02659, table 8).
    """
    ours, theirs = ("\u0120" if v.is_byte_level else "\u2581" for v in (draft, target))
    strings = target.tokenizer.get_vocab(with_added_tokens=False)
    return sum(
        (theirs + string[1:] if string.startswith(ours) else string) in strings
        for string in draft.tokenizer.get_vocab(with_added_tokens=False)
    )
