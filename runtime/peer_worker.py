"""The process in which a peer runs: JSON lines in, JSON lines out (`peers.py`).

    python -m edgedraft.runtime.peer_worker genai|transformers MODEL THREADS [DRAFTER]

Both engines stream text token by token, as ours does. Decoding is timed from the moment the first
token is there, which the prefill paid for. Passes of the target are counted, the one over the
prompt included: it gives the first token.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeAlias

from .extras import need

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]

# How long a drafter of transformers drafts: as it is shipped, written out so that the result tells;
# and its other rule, two tokens more after a draft accepted whole, one fewer after any other. The
# library remembers that length from call to call, unless it is told that it is transient.
_DRAFTING = {
    "as_shipped": {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    },
    "adaptive": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "heuristic_transient",
        "assistant_confidence_threshold": 0.4,
    },
}


def open_genai(model_dir: str, threads: int) -> tuple[Callable[[Request], Answer], Answer]:
    """Open a folder with onnxruntime-genai; return what answers a request, and facts about it."""
    og = need("onnxruntime_genai", "--compare genai", "onnxruntime-genai")

    def open_model(options: Mapping[str, Any]) -> Any:
        config = og.Config(model_dir)
        session = {"intra_op_num_threads": threads, **options}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        return og.Model(config)

    # As it is shipped, its threads spin between operators: best on an idle machine, bad on a busy
    # one. Both ways are measured, so that it is judged by its better one.
    models = {
        "greedy": open_model({}),
        "resting": open_model({"session.intra_op.allow_spinning": "0"}),
    }
    tokenizer = og.Tokenizer(models["greedy"])

    def answer(request: Request) -> Answer:
        model = models[request["mode"]]
        length = len(request["ids"]) + request["max_tokens"]
        params = og.GeneratorParams(model)
        params.set_search_options(
            do_sample=False, max_length=length, min_length=length if request["ignore_eos"] else 0
        )
        generator = og.Generator(model, params)
        text = tokenizer.create_stream()
        started = perf_counter()
        generator.append_tokens(request["ids"])
        generator.generate_next_token()  # chooses from the prefill's logits, no pass of its own
        tokens = [int(generator.get_next_tokens()[0])]
        first = perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            text.decode(tokens[-1])
        return _answer(tokens, 1, len(tokens), started, first, perf_counter())

    return answer, {"engine": f"onnxruntime-genai {og.__version__}"}


def open_transformers(
    model_dir: str, threads: int, drafter_dir: str | None = None
) -> tuple[Callable[[Request], Answer], Answer]:
    """Open a Hugging Face folder, and a drafter's, with transformers; see `open_genai`."""
    torch = need("torch", "--compare transformers", "edgedraft[export]")
    transformers = need("transformers", "--compare transformers", "edgedraft[export]")
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    assist = _assistants(transformers, model, tokenizer, drafter_dir) if drafter_dir else {}
    passes = 0

    def count_pass(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(count_pass)
    base: Any = transformers.TextStreamer

    class Clock(base):  # type: ignore[misc]  # transformers is not typed here
        """A text streamer that notes when the first tokens came."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True)
            self.calls, self.first, self.first_count = 0, 0.0, 0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 1:
                super().put(value)  # the prompt
                return
            if self.calls == 2:
                self.first, self.first_count = perf_counter(), value.numel()
            for token in value.flatten().split(1):  # several at once would count as a batch
                super().put(token)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            """Show nothing."""

    def answer(request: Request) -> Answer:
        nonlocal passes
        ids = torch.tensor([request["ids"]])
        count = request["max_tokens"]
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": count}
        if request["ignore_eos"]:
            options["min_new_tokens"] = count
        if request["mode"] == "lookup":
            options["prompt_lookup_num_tokens"] = 10  # as in the method's own repository
        elif request["mode"] != "greedy":
            options |= assist[request["mode"]]()
        clock, passes = Clock(), 0
        started = perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, **options
            )
        tokens = out[0, ids.shape[1] :].tolist()
        return _answer(tokens, clock.first_count, passes, started, clock.first, perf_counter())

    facts = {"engine": f"transformers {transformers.__version__}", "dtype": str(model.dtype)}
    return answer, facts | ({"drafting": _DRAFTING} if assist else {})


def _assistants(
    transformers: Any, model: Any, tokenizer: Any, drafter_dir: str
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what makes the options of universal assisted generation, by mode."""

    base: Any = transformers.PreTrainedTokenizerFast

    class InOrder(base):  # type: ignore[misc]  # transformers is not typed here
        """A tokenizer whose vocabulary comes in the order of its ids.

        Intersection cuts the drafter's output layer in the order of this dict, and takes the logits
        for those of tokens in the order of their ids: as it is shipped (5.24), where the order of
        the dict is arbitrary, 3 of 13,215 shared tokens are weighed with their own probability.
        """

        def get_vocab(self) -> dict[str, int]:
            return dict(sorted(super().get_vocab().items(), key=lambda entry: entry[1]))

    def load() -> dict[str, Any]:
        return {
            "assistant_model": transformers.AutoModelForCausalLM.from_pretrained(
                drafter_dir, dtype=model.dtype
            ).eval(),
            "tokenizer": tokenizer,
            "assistant_tokenizer": InOrder(tokenizer_file=f"{drafter_dir}/tokenizer.json"),
        }

    # Intersection cuts the output layer of the drafter it is given: each has a drafter of its own.
    reencode = {**load(), "do_sample": False}
    # It comes with sampling only; of one token, that gives the greedy text. Every draft looks
    # certain then and none is ended by its confidence: hence the other rule as well.
    intersection = {**load(), "do_sample": True, "top_k": 1}

    def options(pair: dict[str, Any], rule: str) -> dict[str, Any]:
        pair["assistant_model"].generation_config.update(**_DRAFTING[rule])
        return pair

    return {
        "reencode": lambda: options(reencode, "as_shipped"),
        "intersection": lambda: options(intersection, "as_shipped"),
        "intersection, adaptive": lambda: options(intersection, "adaptive"),
    }


def _answer(
    tokens: list[int], first_count: int, passes: int, started: float, first: float, ended: float
) -> Answer:
    return {
        "token_ids": tokens,
        "prefill_s": first - started,
        "decode_s": ended - first,
        "timed_tokens": len(tokens) - first_count,
        "passes": passes,
    }


def main(argv: list[str]) -> None:
    """Serve requests until standard input ends."""
    name, model_dir, threads, *drafter = argv
    # Whatever the libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: Answer) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        openers: dict[str, Any] = {"genai": open_genai, "transformers": open_transformers}
        answer, facts = openers[name](model_dir, int(threads), *drafter)
        send(facts)
        for line in sys.stdin:
            send(answer(json.loads(line)))
    except Exception as error:  # reported to the parent, whatever it is
        send({"error": f"{name}: {' '.join(str(error).split())[:300]}"})


if __name__ == "__main__":
    main(sys.argv[1:])
