"""The command line `edgedraft-train`: tokenizer, prompts, corpus, drafter, lora, head, evaluate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from edgedraft.runtime.exit_status import exit_status
from edgedraft.runtime.extras import need
from edgedraft.runtime.progress_log import progress_on_stderr

_EXTRA = "edgedraft[train]"
_LOSSES = ("ce", "forward-kl", "reverse-kl", "tv", "lk")  # losses.py imports torch
_MODULES = (*(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")), "lm_head")
_LABELS = ("right", "chance", "ratio")  # head_rows.py imports torch
_ANSWERS = "FILE:TARGET_FOLDER"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `edgedraft-train`."""
    parser = argparse.ArgumentParser(
        prog="edgedraft-train", description="Train drafters on a workstation."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    tokenizer = commands.add_parser("tokenizer", help="learn a drafter's vocabulary")
    tokenizer.add_argument("text", type=Path, nargs="+", metavar="TEXT", help="files or folders")
    tokenizer.add_argument("--vocab-size", type=int, default=16_384, metavar="N")
    tokenizer.add_argument("--out", type=Path, required=True, metavar="DIR")
    tokenizer.set_defaults(run=_tokenizer)

    prompts = commands.add_parser("prompts", help="let a target write what it expects to be asked")
    prompts.add_argument("--target", type=Path, required=True, metavar="DIR")
    prompts.add_argument(
        "--out", type=Path, required=True, metavar="FILE",
        help="prompts; where there are some already, the run goes on",
    )  # fmt: skip
    prompts.add_argument("--count", type=int, default=1000, metavar="N")
    prompts.add_argument("--max-tokens", type=int, default=160, metavar="N")
    prompts.add_argument("--temperature", type=float, default=1.0)
    prompts.add_argument("--top-p", type=float, default=0.98)
    prompts.add_argument("--seed", type=int, default=0, metavar="N")
    prompts.add_argument("--batch", type=int, default=32, metavar="N", help="prompts at once")
    prompts.add_argument("--max-minutes", type=float, metavar="M", help="stop after this time")
    prompts.set_defaults(run=_prompts)

    corpus = commands.add_parser("corpus", help="let a target answer prompts, to learn from")
    corpus.add_argument("--target", type=Path, required=True, metavar="DIR")
    corpus.add_argument(
        "--prompts", type=Path, nargs="+", required=True, metavar="FILE",
        help="data sets known by name, or .jsonl with a 'prompt' in every row",
    )  # fmt: skip
    corpus.add_argument(
        "--out", type=Path, required=True, metavar="FILE",
        help="answers; where there are some already, the run goes on",
    )  # fmt: skip
    corpus.add_argument("--max-tokens", type=int, default=256, metavar="N")
    corpus.add_argument("--temperature", type=float, default=0.0)
    corpus.add_argument("--top-p", type=float, default=1.0)
    corpus.add_argument("--seed", type=int, default=0, metavar="N")
    corpus.add_argument(
        "--samples", type=int, default=1, metavar="N", help="answers to each prompt"
    )
    corpus.add_argument(
        "--top-k-logits", type=int, default=0, metavar="K",
        help="keep the K best tokens' logits, for the losses that need a teacher",
    )  # fmt: skip
    corpus.add_argument("--batch", type=int, default=32, metavar="N", help="answers at once")
    corpus.add_argument("--limit", type=int, metavar="N", help="only the first prompts of a file")
    corpus.add_argument("--max-minutes", type=float, metavar="M", help="stop after this time")
    corpus.set_defaults(run=_corpus)

    drafter = commands.add_parser("drafter", help="train a drafter on text and targets' answers")
    drafter.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    drafter.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE",
        help="files or folders to read before the answers",
    )  # fmt: skip
    drafter.add_argument(
        "--text-tokens", type=int, metavar="N", help="read about N tokens of them, by chance"
    )
    drafter.add_argument("--answers", nargs="+", default=[], metavar=_ANSWERS)
    drafter.add_argument("--out", type=Path, required=True, metavar="DIR")
    for name, default in (("layers", 3), ("hidden", 384), ("heads", 6), ("mlp", 1024)):
        drafter.add_argument(f"--{name}", type=int, default=default, metavar="N")
    drafter.add_argument(
        "--start", type=Path, metavar="DIR", help="go on from this drafter, whatever its shape"
    )
    drafter.add_argument("--loss", choices=_LOSSES, default="ce")
    drafter.add_argument("--epochs", type=int, default=3, metavar="N", help="over the answers")
    drafter.add_argument(
        "--max-minutes", type=float, metavar="M", help="train for a shorter time if need be"
    )
    drafter.add_argument("--seed", type=int, default=0, metavar="N")
    drafter.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    drafter.set_defaults(run=_drafter)

    lora = commands.add_parser("lora", help="train what a drafter should learn for one target")
    lora.add_argument(
        "--drafter", type=Path, required=True, metavar="DIR",
        help="as edgedraft-train made it; it is not changed",
    )  # fmt: skip
    lora.add_argument("--answers", nargs="+", required=True, metavar=_ANSWERS)
    lora.add_argument(
        "--out", type=Path, required=True, metavar="DIR",
        help="folder that PEFT opens and edgedraft-export adapter reads",
    )  # fmt: skip
    lora.add_argument("--rank", type=int, default=32, metavar="N")
    lora.add_argument("--alpha", type=float, default=32.0, metavar="X", help="added: alpha/rank BA")
    lora.add_argument(
        "--modules", nargs="+", choices=_MODULES, default=_MODULES, metavar="NAME",
        help=f"{', '.join(_MODULES)} (default: all)",
    )  # fmt: skip
    lora.add_argument("--loss", choices=_LOSSES, default="ce")
    lora.add_argument("--lr", type=float, default=1e-3, metavar="X", help="full learning rate")
    lora.add_argument("--epochs", type=int, default=3, metavar="N", help="over the answers")
    lora.add_argument(
        "--max-minutes", type=float, metavar="M", help="train for a shorter time if need be"
    )
    lora.add_argument("--seed", type=int, default=0, metavar="N")
    lora.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    lora.set_defaults(run=_lora)

    head = commands.add_parser(
        "head", help="train what tells a drafter how likely its next piece is to be accepted"
    )
    head.add_argument(
        "--drafter", type=Path, required=True, metavar="DIR",
        help="as edgedraft-train made it; it is copied, not changed",
    )  # fmt: skip
    head.add_argument("--answers", nargs="+", required=True, metavar=_ANSWERS)
    head.add_argument("--out", type=Path, required=True, metavar="DIR")
    head.add_argument(
        "--labels", choices=_LABELS, default="right",
        help="whether a piece is right; the chance that the target gives it, for coupled sampling; "
        "or, for comparison, that chance over the drafter's own",
    )  # fmt: skip
    head.add_argument(
        "--rejection-weight", type=float, default=1.0, metavar="X",
        help="how much more a rejected piece counts in the loss",
    )  # fmt: skip
    head.add_argument("--lr", type=float, default=3e-3, metavar="X", help="full learning rate")
    head.add_argument("--epochs", type=int, default=3, metavar="N", help="over the answers")
    head.add_argument("--seed", type=int, default=0, metavar="N")
    head.set_defaults(run=_head)

    evaluate = commands.add_parser("evaluate", help="tokens per target pass on held-out answers")
    evaluate.add_argument("drafter", type=Path, metavar="DRAFTER_DIR")
    evaluate.add_argument("--answers", nargs="+", required=True, metavar=_ANSWERS)
    evaluate.add_argument(
        "--every", action="store_true",
        help="every answer, as of test sets, not only those that no training sees",
    )  # fmt: skip
    evaluate.set_defaults(run=_evaluate)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, or 2 for an error the user can mend."""
    options = build_parser().parse_args(argv)
    with progress_on_stderr():
        return exit_status("edgedraft-train", lambda: options.run(options), ValueError)


def _tokenizer(options: argparse.Namespace) -> None:
    from .texts import read_texts
    from .tokenizer import save_tokenizer, train_tokenizer

    tokenizer = train_tokenizer(read_texts(options.text), options.vocab_size)
    save_tokenizer(tokenizer, options.out)
    print(f"{options.out}: {tokenizer.get_vocab_size()} tokens")


def _prompts(options: argparse.Namespace) -> None:
    need("onnx", "edgedraft-train", _EXTRA)
    from .imagined_prompts import PromptOptions, imagine_prompts

    names = (field.name for field in fields(PromptOptions))
    imagine_prompts(PromptOptions(**{name: getattr(options, name) for name in names}))


def _corpus(options: argparse.Namespace) -> None:
    need("onnx", "edgedraft-train", _EXTRA)
    from .corpus import CorpusOptions, make_corpus

    names = (field.name for field in fields(CorpusOptions))
    chosen = {name: getattr(options, name) for name in names}
    make_corpus(CorpusOptions(**chosen | {"prompts": tuple(options.prompts)}))


def _drafter(options: argparse.Namespace) -> None:
    _need_torch()
    from .answer_sources import AnswerSource
    from .drafter_command import DrafterOptions, train_drafter
    from .model import DrafterShape

    train_drafter(
        DrafterOptions(
            tokenizer=options.tokenizer,
            texts=tuple(options.text),
            answers=tuple(map(AnswerSource.parse, options.answers)),
            out=options.out,
            shape=DrafterShape(options.layers, options.hidden, options.heads, options.mlp),
            start=options.start,
            loss=options.loss,
            text_tokens=options.text_tokens,
            epochs=options.epochs,
            max_minutes=options.max_minutes,
            seed=options.seed,
            resume=options.resume,
        )
    )


def _lora(options: argparse.Namespace) -> None:
    _need_torch()
    need("peft", "edgedraft-train", _EXTRA)
    from .answer_sources import AnswerSource
    from .lora_command import LoraOptions, train_lora

    train_lora(
        LoraOptions(
            drafter=options.drafter,
            answers=tuple(map(AnswerSource.parse, options.answers)),
            out=options.out,
            modules=tuple(options.modules),
            rank=options.rank,
            alpha=options.alpha,
            loss=options.loss,
            learning_rate=options.lr,
            epochs=options.epochs,
            max_minutes=options.max_minutes,
            seed=options.seed,
            resume=options.resume,
        )
    )


def _head(options: argparse.Namespace) -> None:
    _need_torch()
    from .answer_sources import AnswerSource
    from .head_command import HeadOptions, train_head

    train_head(
        HeadOptions(
            drafter=options.drafter,
            answers=tuple(map(AnswerSource.parse, options.answers)),
            out=options.out,
            labels=options.labels,
            rejection_weight=options.rejection_weight,
            learning_rate=options.lr,
            epochs=options.epochs,
            seed=options.seed,
        )
    )


def _evaluate(options: argparse.Namespace) -> None:
    _need_torch()
    from .answer_sources import AnswerSource
    from .drafter_command import evaluate_drafter
    from .simulate import table

    sources = [AnswerSource.parse(argument) for argument in options.answers]
    print(table(evaluate_drafter(options.drafter, sources, every=options.every)))


def _need_torch() -> None:
    for module in ("torch", "transformers", "accelerate"):
        need(module, "edgedraft-train", _EXTRA)
