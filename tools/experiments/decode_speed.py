#!/usr/bin/env python3
"""The leaderboard's decode speeds: tokens per second with each policy on one GPU, for the shape of a model with random
weights (docs/results/leaderboard.md).

    python3 tools/experiments/decode_speed.py --config engine/models/configs/smollm2.json --out docs/results/leaderboard.md

Reads the CSV beside the page, and replaces the decode speeds of this model and memory on this GPU. Then writes both.
"""

import json
import pathlib
import re
import sys

from experiment import Experiment, Refused, checkout_path, main
from leaderboard_page import COLUMNS, SPEED, gpu_of, read_rows, write_page

MAX_TOKENS = 8192  # length of the sequences, if the model's context is not shorter. Half of them are the prompt.


def add_arguments(parser):
    parser.add_argument("--config", required=True, metavar="CONFIG.json", help="a model's config.json, such as those in "
                        "engine/models/configs")
    parser.add_argument("--name", metavar="MODEL", help="the model's name on the page (default: the file's name without .json)")
    parser.add_argument("--memory", nargs="+", default=["25%"], metavar="SHARE", help="shares of the full cache's memory (default: 25%%)")


def policies_of(model, rows):
    """The policies, with their settings, whose KL was measured on a GPU: on this model, or else on any model."""
    rows = [row for row in rows if row["metric"] == "kl" and "--device cpu" not in row["command"]]
    own = [row for row in rows if row["model"] == model]
    return list(dict.fromkeys(row["policy"] for row in own or rows))


def tokens_of(config):
    """Length of the sequences."""
    try:
        return min(json.loads(config.read_text()).get("max_position_embeddings", MAX_TOKENS), MAX_TOKENS)
    except (ValueError, AttributeError, TypeError) as error:
        raise Refused(f"--config: {config} is not a model's config.json: {error}") from error


def measure(experiment, config, policies, share):
    """Returns what `kvlab bench evict` found, and a function from a policy to the command that measures it alone."""
    half = tokens_of(config) // 2
    options = ["--budget", share, "--prompt-tokens", half, "--max-new-tokens", half, "--batch", 1]
    found, failure = experiment.bench("evict", "--random-weights", config, "--policy", ",".join(policies), *options)
    if failure:
        raise Refused(f"kvlab bench evict at {share}: {failure}")

    def command(policy):
        return " ".join(map(str, ["kvlab bench evict --random-weights", checkout_path(config), "--policy", policy, *options]))

    return found, command


def rows_of(model, found, share, command, has_full):
    """Returns the rows of one measurement. `has_full`: with those of the full cache."""
    rows = []

    def add(policy, memory, runs, own):
        for run in {run["batch"]: run for run in runs}.values():  # the largest batch may be 1
            metric = f"{SPEED}{run['batch']} on {found['device']} in {found['dtype']}"
            rows.append(dict(zip(COLUMNS, [model, policy, memory, "16", metric, run["tokens_per_second"], None, None, 1, own])))

    for own in found["configurations"]:
        policy = own["policy"]
        if "refused" in own:
            print(f"decode_speed.py: {policy} at {share} was not measured: {own['refused']}", file=sys.stderr)
            continue
        if has_full and not rows:
            add("full", "100%", (found["full"], found["largest_full"]), command(policy))
        add(policy, share, (own["evicting"], own["largest_evicting"]), command(policy))
    return rows


def updated(known, measured):
    """Returns the rows of the CSV with the measured ones, which replace all speeds of the model on this GPU at the measured memory."""
    cells = {(row["model"], row["memory"], gpu_of(row)) for row in measured}
    return [row for row in known if not (row["metric"].startswith(SPEED) and (row["model"], row["memory"], gpu_of(row)) in cells)] + measured


def decode_speed():
    experiment = Experiment(__doc__, models=None, arguments=add_arguments)
    arguments = experiment.arguments
    path, config = pathlib.Path(arguments.out), pathlib.Path(arguments.config)
    wrong = [share for share in arguments.memory if not re.fullmatch(r"\d+(\.\d+)?%", share)]
    if wrong:
        raise Refused(f"--memory: {wrong[0]} is not a share; give for example 25%")
    known = read_rows(path.with_suffix(".csv"))
    model = arguments.name or config.stem
    policies = policies_of(model, known)
    if not policies:
        raise Refused(f"{path.with_suffix('.csv')}: has no policy whose KL was measured on a GPU; run leaderboard.py on a GPU first")
    measured = []
    for share in dict.fromkeys(arguments.memory):
        found, command = measure(experiment, config, policies, share)
        measured += rows_of(model, found, share, command, has_full=not measured)
    write_page(path, updated(known, measured))


if __name__ == "__main__":
    main(decode_speed)
