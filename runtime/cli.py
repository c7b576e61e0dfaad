"""The `edgedraft` command.

Answers go to stdout, progress and statistics to stderr; with --json the last line of stdout is one
JSON document. A known error is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from .adapter_command import add_adapter_command
from .bench_command import BenchRequest, measure
from .bench_output import check_picture, plot_plan, table_lines
from .chat import Chat
from .cli_options import (
    UsageError,
    add_decode_options,
    add_learning_option,
    add_target_options,
    decode_config,
    device_state,
    session_config,
    target_folder,
)
from .drafting import pair_roles
from .engine import Engine, Message
from .errors import EdgeDraftError
from .exit_status import INTERRUPTED, exit_status
from .folder import open_model_folder, open_target_folder
from .folder_report import cache_bytes_per_token, describe_folder, folder_lines
from .learn_bench_command import (
    add_learn_bench_options,
    learn_bench_request,
    measure_learning,
)
from .learn_bench_report import learning_lines
from .pair_report import describe_pair, pair_lines
from .peers import PEERS
from .plan import load_or_measure_plan
from .plan_report import measure_drafter, measure_rounds, plan_lines
from .state_command import add_state_command
from .tokenizer_file import load_tokenizer
from .vocab_map import VocabMap
from .vocabulary import Vocabulary


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every subcommand."""
    parser = _Parser(
        prog="edgedraft",
        description="Makes a local language model answer faster without changing its output.",
    )
    parser.add_argument("--version", action="version", version=version("edgedraft"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt")
    add_target_options(generate)
    add_decode_options(generate, max_tokens=128)
    add_learning_option(generate)
    generate.add_argument("--prompt", required=True, metavar="TEXT", help='"-" reads stdin')
    generate.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    generate.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON document")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk with the model")
    add_target_options(chat)
    add_decode_options(chat, max_tokens=512)
    add_learning_option(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    chat.set_defaults(run=_chat)

    bench = commands.add_parser("bench", help="measure against plain decoding")
    add_target_options(bench)
    add_decode_options(bench, max_tokens=128)
    bench.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        metavar="FILE",
        help="jsonl or txt files, or hub:NAME[:CONFIG][:SPLIT]",
    )
    bench.add_argument("--limit", type=int, metavar="N", help="first N prompts of every class")
    bench.add_argument("--trials", type=int, default=1, metavar="N", help="medians of N runs")
    bench.add_argument(
        "--warm-up", type=int, default=1, metavar="N", help="prompts to answer briefly beforehand"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    bench.add_argument("--plot", type=Path, metavar="FILE.png", help="write a picture here")
    bench.add_argument(
        "--versus",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME",
        help="other drafters to measure beside --drafter; repeatable",
    )
    bench.add_argument("--compare", nargs="+", default=[], choices=PEERS, help="other engines")
    bench.add_argument("--peer-model", metavar="DIR", help="Hugging Face folder for transformers")
    bench.add_argument(
        "--peer-drafter",
        metavar="DIR",
        help="Hugging Face folder of a drafter, for universal assisted generation in transformers",
    )
    add_learn_bench_options(bench)
    bench.set_defaults(run=_bench)

    inspect = commands.add_parser("inspect", help="show the facts of a target folder")
    inspect.add_argument("folder", metavar="DIR")
    inspect.add_argument(
        "--pair", metavar="DRAFTER", help="compare its vocabulary with that of a drafter's folder"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON document")
    inspect.set_defaults(run=_inspect)

    plan = commands.add_parser("plan", help="show this device's measured costs and what they mean")
    add_target_options(plan)
    plan.add_argument("--remeasure", action="store_true", help="do not use the remembered costs")
    plan.add_argument("--drafter", metavar="DIR", help="say what drafts of this drafter cost, too")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw what drafts cost")
    plan.set_defaults(run=_plan)

    add_adapter_command(commands).set_defaults(run=_print_lines)
    add_state_command(commands).set_defaults(run=_print_lines)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    log = logging.getLogger("edgedraft")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("edgedraft: %(message)s"))
    log.addHandler(handler)

    def run() -> int:
        args = build_parser().parse_args(argv)
        status: int = args.run(args)
        return status

    try:
        return exit_status("edgedraft", run)
    finally:
        log.removeHandler(handler)


def _open(args: argparse.Namespace) -> Engine:
    return Engine.open(
        target_folder(args),
        drafters=args.drafter,
        tree=args.tree,
        session=session_config(args),
        state_dir=args.state,
        learn=args.learn,
    )


def _generate(args: argparse.Namespace) -> int:
    config = decode_config(args)
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out")
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    engine = _open(args)
    messages: list[Message] = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    ids = engine.encode(prompt, raw=args.raw) if len(messages) == 1 else engine.encode(messages)
    if args.json:
        answer = engine.generate(ids, config)
        document = {
            "token_ids": list(answer.token_ids),
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "stats": answer.stats.as_json(),
        }
        print(json.dumps(document))
    else:
        for piece in engine.stream(ids, config):
            print(piece.text, end="", flush=True)
        print(flush=True)
    engine.save()
    plan = engine.plan
    _say(f"[{engine.stats.summary(plan.plain_s if plan else None)}]")
    return 0


def _chat(args: argparse.Namespace) -> int:
    config = decode_config(args)
    engine = _open(args)
    chat = Chat(engine, config, args.system, sys.stdout, sys.stderr)
    prompt = ""
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  # gives input() line editing and history
        except ImportError:
            pass
        prompt = "> "
        _say(f"{engine.target.folder.name} is ready. /help lists the commands.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # So a line that is not UTF-8 is one prompt refused, not the end of the conversation.
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        chat.run(lambda: input(prompt))
    finally:
        engine.save()
    return 0


def _bench(args: argparse.Namespace) -> int:
    try:
        request = BenchRequest(
            target=target_folder(args),
            prompts=tuple(args.prompts),
            limit=args.limit,
            config=decode_config(args),
            session=session_config(args),
            drafters=args.drafter and tuple(args.drafter),
            tree=args.tree,
            state_dir=args.state,
            trials=args.trials,
            warm_up=args.warm_up,
            versus=tuple(map(tuple, args.versus)),
            peers=tuple(dict.fromkeys(args.compare)),
            peer_model=args.peer_model,
            peer_drafter=args.peer_drafter,
            json_path=args.json,
            plot_path=args.plot,
        )
        learning = learn_bench_request(args, request)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if learning:
        document = measure_learning(learning, _say)
        lines = learning_lines(document)
    else:
        document = measure(request, _say)
        lines = table_lines(document)
    for line in lines:
        _say(line)
    if document["error"]:
        raise EdgeDraftError(f"{document['error']}; the result holds what came before")
    return INTERRUPTED if document["interrupted"] else 0


def _inspect(args: argparse.Namespace) -> int:
    target = open_target_folder(args.folder)
    if args.pair is None:
        facts = describe_folder(target)
        lines = folder_lines(facts)
    else:
        drafter = open_model_folder(args.pair)
        draft, own = (Vocabulary(load_tokenizer(f.tokenizer)) for f in (drafter, target))
        facts = describe_pair(draft, own, VocabMap.build(draft, own, **pair_roles(drafter, target)))
        lines = pair_lines(facts)
    print(json.dumps(facts) if args.json else "\n".join(lines))
    return 0


def _plan(args: argparse.Namespace) -> int:
    session = session_config(args)
    folder = open_target_folder(target_folder(args))
    drafter = open_model_folder(Path(args.drafter)) if args.drafter else None
    if args.plot:
        check_picture(args.plot)
    cache_bytes = cache_bytes_per_token(folder, session)
    engine = Engine.open(folder, session=session, state_dir=args.state)
    plan = engine.plan
    if plan is None or args.remeasure:
        plan = load_or_measure_plan(engine.target, device_state(args, folder), remeasure=True)
    costs = measure_drafter(drafter, engine) if drafter else None
    rounds = measure_rounds(engine)
    title = f"{folder.name}, {session.num_threads} threads that rest between passes"
    print(f"{title}\n")
    print("\n".join(plan_lines(plan, rounds, folder, cache_bytes, costs)))
    if args.plot and engine.target.max_rows > 1:
        plot_plan(plan, rounds.overhead_s_per_round, title, args.plot, costs)
    return 0


def _print_lines(args: argparse.Namespace) -> int:
    for line in args.lines(args):
        print(line)
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text ({error})") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
