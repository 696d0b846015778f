#!/usr/bin/env python3
"""Measures tokens per second of transformers' generate on CUDA, with its own caches and with kvlab.hf.evicting.

The model is a Llama of SmolLM2-135M's shape with random weights, or that of --model FOLDER, in bfloat16 with one
sequence. The time of the prompt is excluded: it cancels in the difference of two runs with different numbers of new
tokens. The result is the median of --repeats such differences.

    python3 tools/scripts/time_evicting.py --context 4096 --budget 512 1024
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import kvlab

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a checkpoint (default: random weights in SmolLM2-135M's shape)")
    parser.add_argument("--context", type=int, default=4096, help="number of tokens in the prompt")
    parser.add_argument("--budget", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--policy", nargs="+", default=["h2o", "sink", "knorm"])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--static", action="store_true", help="also time transformers' static cache, which compiles "
                        "the model first")
    return parser.parse_args()


def model_of(folder: str | None) -> Any:
    if folder:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMOLLM2)).bfloat16()
    return model.cuda().eval()


def seconds(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def milliseconds_a_token(generate: Callable[[int], Any], new_tokens: int, repeats: int) -> float:
    few = 4
    generate(new_tokens + few)
    whole = [seconds(lambda: generate(new_tokens + few)) - seconds(lambda: generate(few)) for _ in range(repeats)]
    return statistics.median(whole) / new_tokens * 1000


def main() -> None:
    options = arguments()
    model = model_of(options.model)
    rng = torch.Generator().manual_seed(5)
    ids = torch.randint(0, model.config.vocab_size, (1, options.context), generator=rng).cuda()
    words = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{model.num_parameters() / 1e6:.0f} M parameters, {options.context} tokens, bfloat16, batch 1", flush=True)

    def row(name: str, inside: Any, **more: Any) -> None:
        with torch.no_grad(), inside as caches:

            def generate(count: int) -> None:
                if caches:
                    caches.begin_anew()
                model.generate(ids, max_new_tokens=count, **words, **more)

            taken = milliseconds_a_token(generate, options.new_tokens, options.repeats)
            held = f"{caches.kv_bytes / 2**20:7.1f} MiB" if caches else ""
        print(f"{name:34} {taken:7.2f} ms a token {1000 / taken:8.1f} tokens/s {held}", flush=True)

    row("transformers, its own cache", contextlib.nullcontext())
    for budget in options.budget:
        for policy in options.policy:
            for graph in (False, True):
                name = f"{policy}, budget {budget}" + (", graph" if graph else "")
                row(name, kvlab.hf.evicting(model, policy, budget, graph=graph))
    row("full, graph", kvlab.hf.evicting(model, "full", length=options.context + options.new_tokens + 8, graph=True))
    if options.static:
        row("transformers, static, compiled", contextlib.nullcontext(), cache_implementation="static")


if __name__ == "__main__":
    main()
