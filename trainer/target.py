"""What training needs of a target: how it reads a prompt, and its tokens in the drafter's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgedraft.runtime.folder import open_target_folder
from edgedraft.runtime.prefix import common_prefix
from edgedraft.runtime.prompt_encoding import encode_prompt
from edgedraft.runtime.tokenizer_file import load_tokenizer
from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.runtime.vocabulary import Vocabulary

from .errors import TrainError
from .tokenizer import END_ID, MARK_ID


class Target:
    """A target folder, of which the model itself is not needed."""

    def __init__(self, path: Path) -> None:
        self.folder = open_target_folder(path)
        self._tokenizer: Any = load_tokenizer(self.folder.tokenizer)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return the token ids of one user message, exactly as the runtime's engine does."""
        return tuple(encode_prompt(self.folder, self._tokenizer, prompt))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def user_opening(self) -> tuple[int, ...]:
        """Return the token ids of a chat up to where the user's message begins.

        Raises `TrainError` for a target that is not asked in a chat template.
        """
        ids = self.encode("Yes")
        opening = ids[: common_prefix(ids, self.encode("No"))]
        if self.folder.chat_template is None or not opening:
            raise TrainError(
                f"{self.folder.path}: has no chat template, so nobody asks it anything"
            )
        return opening

    def vocab_map(self, drafter: Tokenizer) -> VocabMap:
        """Return the map between the drafter's tokens and the target's."""
        return VocabMap.build(
            Vocabulary(drafter),
            Vocabulary(self._tokenizer),
            draft_end=END_ID,
            draft_mark=MARK_ID,
            target_stop_ids=self.folder.eos_token_ids,
        )
