#!/usr/bin/env python3
"""Compares the time of one replay of a sweep of 40 configurations on a CUDA device with the time in which kvlab's
engine decodes these configurations token by token.

`kvlab bench` runs both, one after the other on the same device, with the shape of Llama-3.1-8B. The replay is timed
completely, except for reading its trace. For decoding, the step of each configuration is timed while its cache is full
(64 steps by default) and multiplied by the number of decoded tokens of the trace. The prompt (an eighth of the trace)
and loading the model are not counted. Early steps, when the cache is not full yet, may be faster. A second ratio
therefore gives every step the time of the fastest of all 40.
"""

import argparse
import json
import subprocess

POLICIES = ("lru", "window", "h2o", "sink", "streaming_h2o")
BUDGETS, MIN, MAX = 8, 5.0, 60.0  # percent of the trace, as in the replay's sweep


def run(command):
    """Runs a command and returns the JSON object that it prints."""
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlab", default="build/kvlab", help="the command, built with CUDA")
    parser.add_argument("--config", default="engine/models/configs/llama-3.1-8b.json", help="shape of the decoder")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the trace; an eighth of them is a prompt")
    parser.add_argument("--repeats", type=int, default=2, help="how often the replay runs; the least time counts")
    options = parser.parse_args()

    config = json.load(open(options.config))
    shape = {
        "--synthetic-layers": config["num_hidden_layers"],
        "--synthetic-query-heads": config["num_attention_heads"],
        "--synthetic-kv-heads": config["num_key_value_heads"],
        "--synthetic-head-size": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
    }
    replay = run(
        [options.kvlab, "bench", "replay", "--device", "cuda", "--json", "--sweep", "sweep"]
        + ["--tokens", str(options.tokens), "--repeats", str(options.repeats)]
        + [str(part) for pair in shape.items() for part in pair]
    )
    seconds = replay["sweeps"][0]["seconds"]
    print(f"replay of {replay['sweeps'][0]['configurations']} configurations, {options.tokens} tokens: {seconds:.3f} s")

    budgets = [int(options.tokens * (MIN + (MAX - MIN) * i / (BUDGETS - 1)) / 100) for i in range(BUDGETS)]
    steps = []  # milliseconds
    for policy in POLICIES:
        bench = run(
            [options.kvlab, "bench", "stream", "--random-weights", options.config, "--json"]
            + ["--policy", policy, "--budget", ",".join(map(str, budgets))]
        )
        policy_steps = [point["step_milliseconds"] for point in bench["points"]]
        steps += policy_steps
        print(f"decoding, {policy}: {min(policy_steps):.3f} to {max(policy_steps):.3f} ms a token")

    decoded = options.tokens - max(1, options.tokens // 8)
    for name, total in (("as timed", sum(steps)), ("at the fastest step", len(steps) * min(steps))):
        decoding = total * decoded * 1e-3
        print(f"decoding {len(steps)} x {decoded} tokens {name}: {decoding:.1f} s, {decoding / seconds:.0f} x the replay")


if __name__ == "__main__":
    main()
