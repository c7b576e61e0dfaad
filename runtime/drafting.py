"""What drafts for a target: by name, or a folder with a model.

`lookup` copies what followed the present ending before, `ngram` predicts from counts of what the
target said so far, a folder holds a drafter (or any small model). Together they take turns
(`composite.py`); `none` decodes plainly. The counts start from a seed: a file named with
`ngram=FILE`, else the one that the drafter's folder has for this target. A drafter that has learned
for this target drafts with its active adapter (`adapter_store.py`).

How long drafts are follows from what they cost here. For comparison, `k=4` drafts four tokens, and
`gamma=0.4` until it is likelier than that that something in the draft is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .composite import CompositeProposer
from .draft_model import DraftModel
from .errors import DrafterError
from .folder import SEED_SUFFIX, ModelFolder, file_sha256, open_model_folder
from .interfaces import Proposer
from .learned_ngrams import LearnedNgrams
from .learning_translator import LearningTranslator
from .merged_drafter import open_current_drafter
from .onnx_model import OnnxModel
from .policy import ConstantPolicy, DraftPolicy, GammaPolicy, PassCosts
from .suffix_lookup import SuffixLookup
from .tokenizer_file import TokenIds, load_tokenizer
from .vocab_map import PairKey, VocabMap
from .vocabulary import Vocabulary

NAMES = ("lookup", "ngram", "none")
# Lookup beside the n-grams costs time and brings nothing (docs/experiments.md).
DEFAULT = ("ngram",)
_SEED, _LENGTH, _GAMMA = "ngram=", "k=", "gamma="


def open_policy(
    drafters: Sequence[str | Path],
    costs: PassCosts | None,
    default: Sequence[str | Path] = DEFAULT,
) -> tuple[list[str | Path], DraftPolicy]:
    """Return the drafters that were named, those by `default` where nothing but the length of
    drafts was, and how long these are to be; raise `DrafterError` where that is not said as it can
    be.
    """
    rules = [str(name) for name in drafters if str(name).startswith((_LENGTH, _GAMMA))]
    others = [name for name in drafters if str(name) not in rules]
    if not rules:
        return others, DraftPolicy(costs)
    others = others or list(default)
    if len(rules) > 1:
        raise DrafterError(f"one length of drafts at a time, got {' and '.join(rules)}")
    kind, value = rules[0].split("=", 1)
    try:
        if kind == "k" and (length := int(value)) >= 1:
            return others, ConstantPolicy(length)
        if kind == "gamma" and 0 <= (gamma := float(value)) <= 1:
            return others, GammaPolicy(gamma)
    except ValueError:
        pass
    raise DrafterError(
        f"{rules[0]}: k is a number of tokens, such as k=4, and gamma a probability, such as "
        "gamma=0.4"
    )


def open_proposer(
    drafters: Sequence[str | Path],
    target: OnnxModel,
    ids: TokenIds,
    policy: DraftPolicy,
    *,
    tree: bool = False,
    pairs: Path | None = None,
    kept: Path | None = None,
) -> Proposer:
    """Open every drafter that was named.

    `ids` are the target's. Tables of vocabulary pairs are kept in the folder `pairs`, what is
    learned of this target's texts in the folder `kept`; None keeps nothing. Raises `DrafterError`
    or `FolderError` for what cannot be used.
    """
    seeds = [Path(str(name)[len(_SEED) :]) for name in drafters if str(name).startswith(_SEED)]
    others = [name for name in drafters if not str(name).startswith(_SEED)]
    names = [str(name) for name in others if str(name) in NAMES]
    folders = [Path(name) for name in others if str(name) not in NAMES]
    for seed in seeds:
        if not seed.is_file():
            raise DrafterError(f"{seed}: no such file; ngram=FILE names a seed of n-gram counts")
    if "none" in names or not drafters:
        raise DrafterError("'none' cannot be combined with other drafters")
    if len(folders) > 1:
        raise DrafterError(f"one drafter folder at a time, got {', '.join(map(str, folders))}")
    drafter = _open_folder(folders[0]) if folders else None
    free: list[Proposer] = []
    if "lookup" in names:
        free.append(SuffixLookup(tree=tree))
    if "ngram" in names or seeds:
        if not seeds and drafter is not None:
            seeds = [drafter.path / seed_name(ids.fingerprint)]
        file = kept / "ngrams.bin" if kept else None
        free.append(LearnedNgrams(ids.fingerprint, seed=seeds[0] if seeds else None, kept=file))
    if drafter is None:
        return free[0] if len(free) == 1 else CompositeProposer(free, None, policy)
    model = _open_model(drafter, target, ids, policy, pairs, kept, tree)
    return CompositeProposer(free, model, policy)


def pair_roles(drafter: ModelFolder, target: ModelFolder) -> dict[str, Any]:
    """Return which tokens of a pair stand for what is no text, as `VocabMap.build` and `PairKey`
    take them.
    """
    return {
        "draft_end": next(iter(drafter.eos_token_ids), None),
        "draft_mark": drafter.mark_token_id,
        "target_stop_ids": target.eos_token_ids,
    }


def seed_name(ids: str) -> str:
    """Return the name of a drafter's n-gram seed for targets whose ids have this fingerprint."""
    return f"{ids[:16]}{SEED_SUFFIX}"


def _open_folder(path: Path) -> ModelFolder:
    if not path.exists():
        raise DrafterError(
            f"{path}: no such folder, and no drafter of that name; a drafter is one of "
            f"{', '.join(NAMES)}, or a folder that edgedraft-export drafter made"
        )
    return open_model_folder(path)


def _open_model(
    folder: ModelFolder,
    target: OnnxModel,
    ids: TokenIds,
    policy: DraftPolicy,
    pairs: Path | None,
    kept: Path | None,
    trees: bool,
) -> DraftModel:
    vocab_map = _open_pair(folder, target.folder, pairs)
    model = open_current_drafter(folder, target.config, vocab_map, ids, kept)
    cache = kept / f"spellings-{folder.fingerprint[:16]}.bin" if kept else None
    return DraftModel(
        model,
        vocab_map,
        LearningTranslator(vocab_map, kept=cache),
        policy,
        target_vocab_size=target.vocab_size,
        trees=trees and target.supports_trees,
    )


def _open_pair(drafter: ModelFolder, target: ModelFolder, pairs: Path | None) -> VocabMap:
    def vocabularies() -> tuple[Vocabulary, Vocabulary]:
        draft, own = (Vocabulary(load_tokenizer(f.tokenizer)) for f in (drafter, target))
        return draft, own

    roles = pair_roles(drafter, target)
    if pairs is None:
        return VocabMap.build(*vocabularies(), **roles)
    key = PairKey(file_sha256(drafter.tokenizer), file_sha256(target.tokenizer), **roles)
    return VocabMap.load_or_build(key, vocabularies, pairs)
