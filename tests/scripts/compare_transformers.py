#!/usr/bin/env python3
"""Compares kvlab's CUDA decoder with transformers, on the same GPU with the same weights.

    python3 tests/scripts/compare_transformers.py text --model DIR --prompt-file FILE [--prompt TEXT …] [--json]
    python3 tests/scripts/compare_transformers.py speed --model DIR | --config CONFIG.json [--json]

text: compares the texts that kvlab and transformers generate greedily, in the checkpoint's dtype and in float32. At the
first difference of two texts, transformers computes the logits again in a wider dtype. They give the margin between the
two ids, and the largest error of transformers' own logits. Logits with this error can choose another id only if the
margin is at most twice the error. This is called a near tie. Exits with 1 if two texts differ without a near tie.

speed: compares the tokens/s of transformers' generate (SDPA, batch 1, without the time of the prompt) with those of
kvlab. --config makes a model of that shape with random weights, which transformers and kvlab load. Needs kvlab[hf] (pip
install).
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import transformers

from kvlab.hf import Refused
from kvlab.hf.capture_command import encode
from kvlab.hf.models import load_config

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
NEAR_TIE = 2  # in units of the largest error
RANDOM_PROMPT = 64  # tokens, for speed
REPEATS = 3


def run_kvlab(arguments, *words):
    done = subprocess.run([arguments.kvlab, *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(f"{arguments.kvlab} {words[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def load(directory, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to("cuda").eval()


def generate(model, ids, count, ends):
    """The ids that the model generates greedily after `ids`."""
    settings = transformers.GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    tokens = torch.tensor([ids], device="cuda")
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    return output[0, len(ids) :].tolist()


# ---------------------------------------------------------------------------------------------
# text


def float32_copy(directory, to):
    """Saves the same weights in float32, because kvlab's decoder computes in the dtype of the checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.save_pretrained(to)
    shutil.copy(pathlib.Path(directory) / "tokenizer.json", to)
    return to


def last_logits(model, ids):
    return model(torch.tensor([ids], device="cuda")).logits[0, -1].double()


def parting(model, wider, ids, theirs, ours):
    """Returns the margin between the ids `theirs` and `ours` that follow `ids`, the error of the logits, and whether
    this is a near tie."""
    own, exact = last_logits(model, ids), last_logits(wider, ids)
    margin = float((exact[theirs] - exact[ours]).abs())
    error = float((own - exact).abs().max())
    return {
        "theirs": theirs,
        "ours": ours,
        "margin": margin,
        "their_margin": float((own[theirs] - own[ours]).abs()),
        "largest_error": error,
        "near_tie": margin <= NEAR_TIE * error,
    }


def compare_text(arguments, directory, dtype, prompts, config):
    model, wider = load(directory, dtype), load(directory, WIDER[dtype])
    for text in prompts:
        prompt = encode(str(directory), config, text)
        theirs = generate(model, prompt, arguments.new_tokens, config.eos_token_id)
        kvlab = run_kvlab(
            arguments,
            *("generate", "--model", directory, "--prompt", text, "--device", "cuda", "--json"),
            *("--max-new-tokens", arguments.new_tokens),
        )
        ours = kvlab["ids"]
        result = {"dtype": str(dtype).removeprefix("torch."), "prompt": text[:40], "tokens": len(theirs)}
        equal = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
        result["equal"] = equal
        if equal < len(theirs):
            result |= parting(model, wider, prompt + theirs[:equal], theirs[equal], ours[equal])
        yield result


def prompts_from(arguments):
    prompts = list(arguments.prompt or [])
    if arguments.prompt_file:
        text = pathlib.Path(arguments.prompt_file).read_text()
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
        prompts += [part for part in paragraphs if len(part) > 100][: arguments.prompts]
    if not prompts:
        raise Refused("--prompt: missing; give --prompt TEXT or --prompt-file FILE")
    return prompts


def run_text(arguments):
    config, prompts, rows = load_config(arguments.model), prompts_from(arguments), []
    with tempfile.TemporaryDirectory() as folder:
        own = load(arguments.model, "auto").dtype
        rows += compare_text(arguments, arguments.model, own, prompts, config)
        if own != torch.float32:
            copy = float32_copy(arguments.model, pathlib.Path(folder) / "float32")
            rows += compare_text(arguments, copy, torch.float32, prompts, config)
    if arguments.json:
        print(json.dumps(about(arguments) | {"texts": rows}, indent=1))
    else:
        print(f"{'dtype':<10}{'equal':>10}  {'margin':>9}{'theirs':>9}{'error':>9}  prompt")
        for row in rows:
            print(f"{row['dtype']:<10}{row['equal']:>5}/{row['tokens']:<4}", end="  ")
            if "margin" in row:
                print(f"{row['margin']:>9.2g}{row['their_margin']:>9.2g}{row['largest_error']:>9.2g}", end="  ")
                print("near-tie" if row["near_tie"] else "NO near-tie", end=": ")
            else:
                print(f"{'':>27}", end="  ")
            print(row["prompt"])
    return 0 if all(row.get("near_tie", True) for row in rows) else 1


# ---------------------------------------------------------------------------------------------
# speed


def random_model(config_file, to):
    """Makes a random model of that shape on the GPU and saves it, so that kvlab loads the same weights."""
    settings = json.loads(pathlib.Path(config_file).read_text())
    config = transformers.AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.save_pretrained(to)
    return model.eval()


def seconds_of(action):
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def transformers_seconds(model, arguments):
    """Seconds of one step of generate: the time of all tokens except the first, divided by their number. Times are
    medians."""
    ids = torch.randint(2, 1000, (RANDOM_PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    count = arguments.new_tokens

    def generate_tokens(more):
        found = generate(model, ids, more, None)
        assert len(found) == more, f"{len(found)} of {more} tokens"

    for _ in range(2):
        generate_tokens(32)  # warms up
    first = statistics.median(seconds_of(lambda: generate_tokens(1)) for _ in range(REPEATS))
    all_of_them = statistics.median(seconds_of(lambda: generate_tokens(count + 1)) for _ in range(REPEATS))
    return (all_of_them - first) / count


def run_speed(arguments):
    count, rows = arguments.new_tokens, []

    def note(name, seconds):
        rows.append({"engine": name, "tokens_per_second": 1 / seconds, "step_milliseconds": seconds * 1e3})

    with tempfile.TemporaryDirectory() as folder:
        if arguments.config:
            directory = pathlib.Path(folder) / pathlib.Path(arguments.config).stem
            model = random_model(arguments.config, directory)
        else:
            directory, model = arguments.model, load(arguments.model, "auto")
        note("transformers generate, SDPA", transformers_seconds(model, arguments))
        weights, dtype = model.num_parameters(), str(model.dtype).removeprefix("torch.")
        del model
        torch.cuda.empty_cache()
        settings = ["--model", directory, "--json"]
        bench = run_kvlab(
            arguments, "bench", "decode", *settings, "--context", RANDOM_PROMPT, "--steps", count
        )
        note("kvlab bench decode", bench["step_milliseconds"] * 1e-3)
        if arguments.model:
            text = ["--prompt", arguments.speed_prompt, "--max-new-tokens", count + 1, "--device", "cuda"]
            found = run_kvlab(arguments, "generate", *settings, *text)
            note(f"kvlab generate ({len(found['ids'])} tokens)", 1 / found["tokens_per_second"])
    result = about(arguments) | {
        "model": pathlib.Path(arguments.config or arguments.model).stem,
        "parameters": weights,
        "dtype": dtype,
        "new_tokens": count,
        "engines": rows,
        "ratio": rows[0]["step_milliseconds"] / bench["step_milliseconds"],
    }
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"{result['model']}, {weights / 1e6:.1f} M parameters, {dtype}, batch 1, {count} new tokens, {result['device']}")
    print(f"  {'':<48}{'tokens/s':>10}{'ms/token':>10}{'ratio':>8}")
    for row in rows:
        ratio = rows[0]["step_milliseconds"] / row["step_milliseconds"]
        print(
            f"  {row['engine']:<48}{row['tokens_per_second']:>10.1f}{row['step_milliseconds']:>10.4f}{ratio:>8.2f}"
        )
    return 0


# ---------------------------------------------------------------------------------------------


def about(arguments):
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def parse_arguments():
    parser = argparse.ArgumentParser(description="kvlab's CUDA decoder against transformers.")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--kvlab", default="build/kvlab", help="the command (default: %(default)s)")
    common.add_argument("--json", action="store_true", help="print one JSON object")
    text = commands.add_parser("text", parents=[common], help="greedy texts")
    text.add_argument("--model", metavar="DIR", required=True)
    text.add_argument("--prompt", metavar="TEXT", action="append", help="repeatable")
    text.add_argument("--prompt-file", metavar="FILE", help="each long paragraph is a prompt")
    text.add_argument("--prompts", metavar="N", type=int, default=8, help="of the file, at most (default: 8)")
    text.add_argument("--new-tokens", metavar="N", type=int, default=200, help="default: 200")
    speed = commands.add_parser("speed", parents=[common], help="tokens per second")
    which = speed.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="DIR")
    which.add_argument("--config", metavar="CONFIG.json", help="a shape, with random weights")
    speed.add_argument("--new-tokens", metavar="N", type=int, default=512, help="default: 512")
    speed.add_argument("--speed-prompt", metavar="TEXT", default="It was a dark and stormy night, and")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        raise Refused("there is no CUDA device that torch can use; both engines are measured on one")
    with torch.inference_mode():
        return run_text(arguments) if arguments.command == "text" else run_speed(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Refused, OSError) as error:
        print(f"compare_transformers.py: {error}", file=sys.stderr)
        sys.exit(2)
