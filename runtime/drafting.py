"""What drafts for a target: by name, or a folder with a model.

`lookup` copies what followed the present ending before, `ngram` predicts from counts of what the
target said so far, a folder holds a drafter (or any small model). Together they take turns
(`composite.py`); `none` decodes plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .composite import CompositeProposer
from .draft_model import DraftModel
from .errors import DrafterError
from .folder import ModelFolder, open_model_folder
from .interfaces import Proposer
from .onnx_model import OnnxModel
from .policy import DraftPolicy
from .suffix_lookup import SuffixLookup
from .tokenizer_file import load_tokenizer
from .vocab_map import VocabMap
from .vocabulary import Vocabulary

NAMES = ("lookup", "ngram", "none")
DEFAULT = ("lookup",)


def open_proposer(
    drafters: Sequence[str | Path],
    target: OnnxModel,
    tokenizer: Any,
    policy: DraftPolicy,
    tree: bool,
    state_dir: Path | None,
) -> Proposer:
    """Open every drafter that was named.

    `tokenizer` is the target's; `state_dir` keeps tables of vocabulary pairs, where there is one.
    Raises `DrafterError` or `FolderError` for what cannot be used.
    """
    names = [str(name) for name in drafters if str(name) in NAMES]
    folders = [Path(name) for name in drafters if str(name) not in NAMES]
    if "none" in names:
        raise DrafterError("'none' cannot be combined with other drafters")
    if len(folders) > 1:
        raise DrafterError(f"one drafter folder at a time, got {', '.join(map(str, folders))}")
    free: list[Proposer] = []
    if "lookup" in names:
        free.append(SuffixLookup(tree=tree))
    if "ngram" in names:
        from .ngram_model import NgramModel

        free.append(NgramModel())
    model = _open_model(folders[0], target, tokenizer, state_dir) if folders else None
    if len(free) == 1 and model is None:
        return free[0]
    return CompositeProposer(free, model, policy)


def _open_model(
    path: Path, target: OnnxModel, tokenizer: Any, state_dir: Path | None
) -> DraftModel:
    if not path.exists():
        raise DrafterError(
            f"{path}: no such folder, and no drafter of that name; a drafter is one of "
            f"{', '.join(NAMES)}, or a folder that edgedraft-export drafter made"
        )
    folder = open_model_folder(path)
    draft_vocabulary = Vocabulary(load_tokenizer(folder.tokenizer))
    model = OnnxModel(folder, target.config, tokenizer_size=len(draft_vocabulary))
    model.single_rows = True  # its bits decide nothing
    vocabularies = draft_vocabulary, Vocabulary(tokenizer)
    roles = pair_roles(folder, target.folder)
    vocab_map = (
        VocabMap.load_or_build(*vocabularies, state_dir / "pairs", **roles)
        if state_dir
        else VocabMap.build(*vocabularies, **roles)
    )
    return DraftModel(model, vocab_map)


def pair_roles(drafter: ModelFolder, target: ModelFolder) -> dict[str, Any]:
    """Return which tokens of a pair stand for what is no text, as `VocabMap.build` takes them."""
    return {
        "draft_end": next(iter(drafter.eos_token_ids), None),
        "draft_mark": drafter.mark_token_id,
        "target_stop_ids": target.eos_token_ids,
    }
