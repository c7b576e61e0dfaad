"""The process in which a peer runs: JSON lines in, JSON lines out (`peers.py`).

    python -m edgedraft.runtime.peer_worker genai|transformers MODEL THREADS

Both engines stream text token by token, as ours does. Decoding is timed from the moment the first
token is there, which the prefill paid for.
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
        return _answer(tokens, 1, started, first, perf_counter())

    return answer, {"engine": f"onnxruntime-genai {og.__version__}"}


def open_transformers(model_dir: str, threads: int) -> tuple[Callable[[Request], Answer], Answer]:
    """Open a Hugging Face folder with transformers; see `open_genai`."""
    torch = need("torch", "--compare transformers", "edgedraft[export]")
    transformers = need("transformers", "--compare transformers", "edgedraft[export]")
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)

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
        ids = torch.tensor([request["ids"]])
        count = request["max_tokens"]
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": count}
        if request["ignore_eos"]:
            options["min_new_tokens"] = count
        if request["mode"] == "lookup":
            options["prompt_lookup_num_tokens"] = 10  # as in the method's own repository
        clock = Clock()
        started = perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, **options
            )
        tokens = out[0, ids.shape[1] :].tolist()
        return _answer(tokens, clock.first_count, started, clock.first, perf_counter())

    return answer, {"engine": f"transformers {transformers.__version__}", "dtype": str(model.dtype)}


def _answer(
    tokens: list[int], first_count: int, started: float, first: float, ended: float
) -> Answer:
    return {
        "token_ids": tokens,
        "prefill_s": first - started,
        "decode_s": ended - first,
        "timed_tokens": len(tokens) - first_count,
    }


def main(argv: list[str]) -> None:
    """Serve requests until standard input ends."""
    name, model_dir, threads = argv
    # Whatever the libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: Answer) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        opener = {"genai": open_genai, "transformers": open_transformers}[name]
        answer, facts = opener(model_dir, int(threads))
        send(facts)
        for line in sys.stdin:
            send(answer(json.loads(line)))
    except Exception as error:  # reported to the parent, whatever it is
        send({"error": f"{name}: {' '.join(str(error).split())[:300]}"})


if __name__ == "__main__":
    main(sys.argv[1:])
