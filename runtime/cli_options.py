"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from .config import DecodeConfig, SamplingConfig, Verification
from .errors import EdgeDraftError
from .folder import ModelFolder
from .learning import Learn
from .ort_session import SessionConfig
from .state import DeviceState, default_state_dir


class UsageError(EdgeDraftError):
    """A command line that cannot be carried out."""


def add_state_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which target's state on this device is meant."""
    parser.add_argument(
        "--target",
        metavar="DIR",
        default=os.environ.get("EDGEDRAFT_TARGET"),
        help="target folder (default: $EDGEDRAFT_TARGET)",
    )
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="device state (default: $EDGEDRAFT_STATE)"
    )


def add_action(
    actions: Any, name: str, lines: Callable[..., Iterator[str]], about: str
) -> argparse.ArgumentParser:
    """Add an action on a target's state; `args.lines(args)` carries it out and yields what is to be
    printed.
    """
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about)
    add_state_options(parser)
    parser.set_defaults(lines=lines)
    return parser


def device_state(args: argparse.Namespace, target: ModelFolder) -> DeviceState:
    """Return the state of a target that is meant."""
    return DeviceState(args.state or default_state_dir(), target.fingerprint)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which target runs where."""
    add_state_options(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per usable core")
    parser.add_argument(
        "--provider",
        nargs="+",
        metavar="NAME",
        help="execution providers in order of preference (default: cpu)",
    )


def add_decode_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add what says how an answer is decoded."""
    decode, sampling = DecodeConfig(), SamplingConfig()
    parser.add_argument(
        "--drafter",
        nargs="+",
        metavar="NAME",
        help="lookup, ngram or a drafter's folder, in any combination; or none (default: ngram). "
        "For comparison, k=N and gamma=X draft N tokens, or until it is likelier than X that one "
        "of them is wrong, whatever that costs",
    )
    parser.add_argument(
        "--tree", action="store_true", help="draft several continuations at once (fp32 graphs)"
    )
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    parser.add_argument(
        "--max-draft-tokens", type=int, default=decode.max_draft_tokens, metavar="N"
    )
    parser.add_argument("--temperature", type=float, default=sampling.temperature)
    parser.add_argument("--top-k", type=int, default=sampling.top_k)
    parser.add_argument("--top-p", type=float, default=sampling.top_p)
    parser.add_argument("--min-p", type=float, default=sampling.min_p)
    parser.add_argument("--repetition-penalty", type=float, default=sampling.repetition_penalty)
    parser.add_argument("--presence-penalty", type=float, default=sampling.presence_penalty)
    parser.add_argument("--frequency-penalty", type=float, default=sampling.frequency_penalty)
    parser.add_argument(
        "--verification",
        choices=get_args(Verification),
        default=sampling.verification,
        help="coupled: the text plain decoding gives; lattice: another of the same distribution",
    )
    parser.add_argument("--seed", type=int, default=sampling.seed)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def add_learning_option(parser: argparse.ArgumentParser) -> None:
    """Add what says when the drafter learns."""
    parser.add_argument(
        "--learn",
        choices=get_args(Learn),
        default="off",
        help="let the drafter learn from the answers: idle: while nobody waits; always: right "
        "after each answer, too",
    )


def decode_config(args: argparse.Namespace) -> DecodeConfig:
    """Return the checked configuration of a request; raise `UsageError` for a bad value."""
    try:
        sampling = SamplingConfig(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
            seed=args.seed,
            verification=args.verification,
        )
        return DecodeConfig(
            max_tokens=args.max_tokens,
            max_draft_tokens=args.max_draft_tokens,
            stop=tuple(args.stop),
            ignore_eos=args.ignore_eos,
            sampling=sampling,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def session_config(args: argparse.Namespace) -> SessionConfig:
    """Return where the graph is to run; raise `UsageError` for a bad value."""
    try:
        if args.provider:
            return SessionConfig(args.threads, tuple(args.provider))
        return SessionConfig(args.threads)
    except ValueError as error:
        raise UsageError(str(error)) from error


def target_folder(args: argparse.Namespace) -> str:
    """Return the folder that was named, here or in the environment; raise `UsageError` if none."""
    if not args.target:
        raise UsageError(
            "no target: give --target DIR or set EDGEDRAFT_TARGET; "
            "edgedraft-export target smollm2 --out DIR makes one"
        )
    target: str = args.target
    return target
