"""The command line: streams, the JSON contract, exit statuses, the conversation."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgedraft.runtime import Engine, Piece, RunStats, plan
from edgedraft.runtime.cli import build_parser, main
from edgedraft.runtime.folder import open_model_folder
from edgedraft.runtime.plan import Plan
from edgedraft.runtime.plan_report import to_accept
from edgedraft.runtime.tokenizer_file import load_tokenizer
from graphs import write_target_folder
from tiny_drafter import tiny_drafter

STATS = set(RunStats().as_json())


@pytest.fixture
def target(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder())


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what puts lines into standard input."""

    def put(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return put


def generate(target: str, *options: str, prompt: str = "the sea and ") -> int:
    return main(
        ["generate", "--target", target, "--prompt", prompt, "--max-tokens", "12", *options]
    )


def test_the_answer_goes_to_stdout_and_the_statistics_to_stderr(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(target) == 0
    out, err = capsys.readouterr()
    answer = Engine.open(target).generate("the sea and ", _config(12))
    assert out == answer.text + "\n"
    (line,) = err.splitlines()
    assert line.startswith("[12 tokens, ") and "tokens per pass, about " in line


def _config(max_tokens: int) -> Any:
    from edgedraft.runtime import DecodeConfig

    return DecodeConfig(max_tokens=max_tokens)


def test_the_json_contract_of_outside_scripts(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(target, "--drafter", "none", "--json") == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(document) == {"token_ids", "text", "finish_reason", "stats"}
    assert len(document["token_ids"]) == 12
    assert document["finish_reason"] == "length"
    assert set(document["stats"]) == STATS
    assert document["stats"]["proposed"] == 0 and document["stats"]["rounds"] == 12
    assert generate(target, "--json") == 0
    speculative = json.loads(capsys.readouterr().out)
    assert speculative["token_ids"] == document["token_ids"]
    assert speculative["text"] == document["text"]


def test_every_decoding_option_reaches_the_request(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    stream = Engine.stream

    def watch(self: Engine, prompt: Any, config: Any = None) -> Iterator[Piece]:
        seen.append((config, self.target.config, self.target.folder))
        return stream(self, prompt, config)

    monkeypatch.setattr(Engine, "stream", watch)
    options = (
        "--max-draft-tokens 3 --temperature 0.7 --top-k 9 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --seed 5 "
        "--ignore-eos --threads 1 --provider cpu --stop END --stop ZZZ"
    )
    assert generate(target, *options.split()) == 0
    ((config, session, _),) = seen
    sampling = config.sampling
    assert (config.max_tokens, config.max_draft_tokens, config.ignore_eos) == (12, 3, True)
    assert config.stop == ("END", "ZZZ")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.7,
        9,
        0.9,
        0.1,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 0.2)
    assert (sampling.frequency_penalty, sampling.seed) == (0.3, 5)
    assert (session.threads, session.providers) == (1, ("cpu",))


def test_system_text_and_raw_text_change_the_prompt(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine.open(target)
    lengths = []
    for options in ([], ["--raw"], ["--system", "be brief"]):
        assert generate(target, "--json", *options) == 0
        lengths.append(json.loads(capsys.readouterr().out)["stats"]["prompt_tokens"])
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the sea and "},
    ]
    assert lengths == [
        len(engine.encode("the sea and ")),
        len(engine.encode("the sea and ", raw=True)),
        len(engine.encode(messages)),
    ]


def test_a_dash_reads_the_prompt_from_stdin(
    target: str, say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(target, "--json", prompt="the sea\nand a ring\n") == 0
    given = json.loads(capsys.readouterr().out)
    say("the sea", "and a ring")
    assert generate(target, "--json", prompt="-") == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == given["token_ids"]


def test_the_target_may_come_from_the_environment(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEDRAFT_TARGET", target)
    assert main(["generate", "--prompt", "a", "--max-tokens", "2"]) == 0
    capsys.readouterr()
    monkeypatch.delenv("EDGEDRAFT_TARGET")
    assert main(["generate", "--prompt", "a"]) == 2
    assert "give --target DIR or set EDGEDRAFT_TARGET" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("generate --target {target}/none --prompt a", "no such folder"),
        ("generate --target {target} --prompt a --temperature -1", "temperature must be >= 0"),
        ("generate --target {target} --prompt a --max-tokens 0", "max_tokens must be >= 1, got 0"),
        ("generate --target {target} --prompt a --threads 0", "threads must be >= 1"),
        ("generate --target {target} --prompt a --provider warp", "execution provider 'warp'"),
        ("generate --target {target} --prompt a --raw --system b", "--system needs"),
        ("generate --target {target} --prompt a --drafter magic", "magic: no such folder"),
        ("generate --target {target} --prompt a --seed x", "invalid int value"),
        ("generate --target {target}", "--prompt"),
        ("dance", "invalid choice: 'dance'"),
        ("", "COMMAND"),
        ("inspect {target}/none", "no such folder"),
        ("plan --target {target}/none", "no such folder"),
        ("chat --target {target}/none", "no such folder"),
        ("bench --target {target} --prompts {target}/none.jsonl", "cannot be read"),
    ],
)
def test_a_known_error_is_one_line_and_status_2(
    target: str, capsys: pytest.CaptureFixture[str], command: str, complaint: str
) -> None:
    assert main(command.format(target=target).split()) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("edgedraft: ") and complaint in line
    assert out == ""


def test_a_pair_whose_tokens_cannot_play_their_part_is_one_line(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(Path(target) / "tokenizer.json")
    text, size = tokenizer.token_to_id("a"), tokenizer.get_vocab_size()
    other = write_target_folder(tmp_path / "other", vocab_size=size + 1, eos_token_ids=[text, size])

    def refusal(status: int) -> str:
        (line,) = capsys.readouterr().err.splitlines()
        return line if status == 2 else ""

    complaint = f"end token must be one of its {size} and no text, got {text}; correct it in the"
    assert complaint in refusal(generate(target, "--drafter", str(other)))
    assert complaint in refusal(main(["inspect", target, "--pair", str(other)]))
    outside = f"end tokens must be in [0, {size}) to draft for it, got [{text}, {size}]; correct"
    assert outside in refusal(main(["inspect", str(other), "--pair", target]))


def test_a_bug_is_not_passed_off_as_a_users_error(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Engine, "encode", fail)
    with pytest.raises(ValueError, match="a bug"):
        generate(target)


def test_an_empty_prompt_is_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(target, "--raw", prompt="") == 2
    assert "the prompt holds no tokens" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["caf\udce9", "\ud83d"])  # from Latin-1; half an emoji
@pytest.mark.parametrize("options", [[], ["--raw"]])
def test_a_prompt_that_is_not_unicode_is_refused(
    target: str, capsys: pytest.CaptureFixture[str], prompt: str, options: list[str]
) -> None:
    assert generate(target, *options, prompt=prompt) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the prompt holds {prompt[-1]!a}, which is no character" in line


def test_ctrl_c_ends_with_130_and_without_a_traceback(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    assert generate(target) == 130
    assert capsys.readouterr().err == "\n"


def test_what_the_device_refuses_is_one_line(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(28, "No space left on device", "out")

    monkeypatch.setattr(Engine, "stream", refused)
    assert generate(target) == 2
    assert capsys.readouterr().err == "edgedraft: [Errno 28] No space left on device: 'out'\n"


@pytest.mark.parametrize("options", [[], ["--json"]])  # flushed at once, and at the end
def test_a_reader_that_goes_away_ends_the_command_quietly(target: str, options: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "edgedraft.runtime", "generate", "--target", target]
            + ["--prompt", "the sea", "--max-tokens", "8", *options],
            stdout=write_end,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(write_end)
    assert done.returncode == 141
    assert done.stderr == b""


def test_warnings_of_the_runtime_are_shown_once_each_time(
    tiny_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_folder(contract="genai", last_row_only=True))
    for _ in range(2):
        assert generate(folder) == 0
        warnings = [x for x in capsys.readouterr().err.splitlines() if "verified" in x]
        assert len(warnings) == 1 and warnings[0].startswith("edgedraft: ")


def chat(target: str, *options: str) -> int:
    return main(["chat", "--target", target, "--max-tokens", "8", *options])


def test_a_conversation_is_kept_and_reset(
    target: str, say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    say("the sea", "a ring", "/reset", "the sea", "", "/quit", "never read")
    assert chat(target, "--system", "be brief") == 0
    out, err = capsys.readouterr()

    engine, config = Engine.open(target), _config(8)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the sea"}]
    first = engine.generate(messages, config).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "a ring"}]
    second = engine.generate(messages, config).text
    assert out == f"{first}\n{second}\n{first}\n"
    assert err.count("tokens per pass, about") == 3


def test_a_new_conversation_does_not_cost_what_was_learned(
    target: str, say: Callable[..., None]
) -> None:
    def known() -> tuple[int, ...]:
        engine = Engine.open(target)
        assert engine.proposer is not None
        return engine.proposer.propose(engine.encode("the sea")[:-2], 4).tokens

    assert known() == ()
    say("the sea", "/reset", "/quit")
    assert chat(target) == 0
    assert known()


def test_chat_commands_answer_on_stderr(
    target: str, say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    say("/help", "/dance", "a", "b", "/stats")
    assert chat(target) == 0
    err = capsys.readouterr().err
    for command in ("/help", "/reset", "/stats", "/quit"):
        assert f"{command} " in err
    assert "no command /dance" in err
    assert err.splitlines()[-1].startswith("16 tokens, ")


def test_a_line_that_is_not_unicode_is_left_out_of_the_conversation(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.BytesIO(b"caf\xe9\nthe sea\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, "utf-8"))
    assert chat(target) == 0
    out, err = capsys.readouterr()
    refusal, *_, statistics = err.splitlines()
    assert "the prompt holds '\\udce9'" in refusal and "the message was left out" in refusal
    assert statistics.startswith("[8 tokens, ")
    assert out == Engine.open(target).generate("the sea", _config(8)).text + "\n"


def test_a_full_context_drops_the_oldest_turns_with_a_note(
    tiny_folder: Callable[..., Path], say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    say(*["a ring"] * 6, "x" * 200, "a ring", "/stats")
    assert chat(str(tiny_folder(context_length=128)), "--ignore-eos") == 0
    out, err = capsys.readouterr()
    assert "the oldest 2 messages are forgotten" in err
    assert "the context holds 127: shorten it; the message was left out" in err
    assert err.splitlines()[-1].startswith("56 tokens, ")  # seven answers, the long one refused


def test_ctrl_c_stops_the_answer_and_not_the_session(
    target: str,
    say: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream, interrupts = Engine.stream, iter([True])

    def interrupted(self: Engine, prompt: Any, config: Any = None) -> Iterator[Piece]:
        for piece in stream(self, prompt, config):
            if next(interrupts, False):
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(Engine, "stream", interrupted)
    before = signal.getsignal(signal.SIGINT)
    say("the sea", "a ring")
    assert chat(target, "--ignore-eos", "--drafter", "none") == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "(stopped)" and err[1].startswith("[2 tokens, ")
    assert err[-1].startswith("[8 tokens, ")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_says_how_to_leave(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = iter([KeyboardInterrupt, EOFError])

    def read(prompt: str = "") -> str:
        raise next(events)

    monkeypatch.setattr("builtins.input", read)
    assert chat(target) == 0
    assert "/quit or Ctrl-D" in capsys.readouterr().err


def test_chat_without_a_template_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(target, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["chat_template"] = None
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert chat(str(folder)) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_inspect_shows_the_facts_of_the_graph_and_the_manifest(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", target, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layers"], facts["kv_heads"], facts["head_dim"]) == (2, 2, 16)
    assert facts["cache_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert facts["checksums"] == "verified"
    assert facts["can_verify_drafts"] is True and facts["chat_template"] is True
    assert set(facts["files"]) == {
        "chat_template.jinja",
        "decoder.onnx",
        "manifest.json",
        "tokenizer.json",
    }
    assert main(["inspect", target]) == 0
    out = capsys.readouterr().out
    assert "layers                   2" in out and "decoder.onnx" in out


def test_inspect_lists_the_quality_that_was_measured(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "measured"
    shutil.copytree(target, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["quality"] = {"kl": 0.01234567, "pass_ms": {"1": 10.0}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert main(["inspect", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "kl 0.01235" in lines and "pass_ms 1 10" in lines


def test_inspect_says_which_file_is_damaged(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(target, folder)
    # As for large weights: their size alone is compared when a folder is opened.
    monkeypatch.setattr("edgedraft.runtime.folder._ALWAYS_HASHED_BYTES", 0)
    graph = folder / "decoder.onnx"
    content = bytearray(graph.read_bytes())
    content[-100] ^= 1
    graph.write_bytes(content)
    assert main(["inspect", str(folder)]) == 2
    assert "decoder.onnx: its checksum differs" in capsys.readouterr().err


def test_plan_prints_the_costs_and_what_follows(
    target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether the machine has got faster since is another test's question.
    monkeypatch.setattr(plan, "_fastest_s", lambda model: math.inf)
    state = tmp_path / "plans"
    command = ["plan", "--target", target, "--threads", "1", "--state", str(state)]
    assert main(command) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if re.match(r" +\d+ .* ms$", line)]
    assert rows == ["1", "2", "3", "4", "6", "8", "12", "16"]
    assert "The faster plain loop has" in out and "A draft of 8 costs" in out
    assert "0.5 KiB per token" in out

    (remembered,) = state.rglob("plans.json")
    before = remembered.read_text()
    assert main(command) == 0 and remembered.read_text() == before
    assert main([*command, "--remeasure"]) == 0 and remembered.read_text() != before


def test_plan_says_what_a_drafter_costs_and_draws_it(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "edgedraft[bench]"')
    drafter, plot = tiny_drafter(tmp_path / "small"), tmp_path / "plan.png"
    command = ["plan", "--target", target, "--threads", "1", "--state", str(tmp_path)]
    assert main([*command, "--drafter", str(drafter), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    name = open_model_folder(drafter).name
    assert re.search(rf"A step of {name} takes \d+\.\d\d ms, \d+\.\d\d of a plain pass", out)
    assert len(re.findall(r"A draft of \d+ tokens, in as many steps, costs", out)) == 5
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--drafter", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(("step_s", "needed"), [(0.0, 0.3), (0.002, 1.1)])
def test_what_has_to_be_accepted_is_what_the_round_takes_more_than_a_plain_pass(
    step_s: float, needed: float
) -> None:
    plan = Plan({1: 0.010, 2: 0.010, 4: 0.012, 8: 0.014}, {1: 0.0, 2: 0.0, 4: 0.0, 8: 0.0})
    assert to_accept(plan, 0.0005, 4, step_s) == pytest.approx(needed)


def test_plan_says_when_nothing_can_be_verified(
    tiny_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folder(contract="genai", last_row_only=True)
    assert main(["plan", "--target", str(folder)]) == 0
    assert "cannot verify several rows" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for command in ("generate", "chat", "bench", "inspect", "plan"):
        assert command in out


def test_drafting_trees_is_an_option_that_not_every_graph_allows(
    tiny_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(str(tiny_folder()), "--tree", "--json") == 0
    with_trees = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert generate(str(tiny_folder()), "--drafter", "none", "--json") == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert with_trees["token_ids"] == plain["token_ids"]
    assert generate(str(tiny_folder(contract="genai")), "--tree") == 2
    assert "trees need an fp32 graph" in capsys.readouterr().err
