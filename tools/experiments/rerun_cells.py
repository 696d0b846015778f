#!/usr/bin/env python3
"""Draws cells of docs/results/leaderboard.csv by lot, runs their commands again, and says whether the new values are
within the published 95% intervals. Exits with 1 if one is not.

    python3 tools/experiments/rerun_cells.py --count 10 --seed 1 [--model smollm2] [--device cpu]
"""

import argparse
import csv
import json
import pathlib
import random
import shlex
import subprocess
import sys
import tempfile

from experiment import ROOT, Refused, main, table
from leaderboard import Evaluation
from leaderboard_page import ACCURACY, number, read_rows, value_of


def is_loss(row):
    return row["metric"].partition(" ")[0] == "kl"


def measured(row, kvlab, device):
    """Runs the command of a row in the checkout, and returns the new value."""
    words = shlex.split(row["command"])
    if device:
        at = words.index("--device") if "--device" in words else len(words)
        words[at : at + 2] = ["--device", device]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        done = subprocess.run([kvlab, *words[1:], "--out", out], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise Refused(f"{' '.join(words)}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
        if is_loss(row):
            return Evaluation(json.loads((out / "eval.json").read_text())).kl(row["policy"])
        with open(out / "task.csv", newline="") as file:
            return next(
                float(own["value"]) for own in csv.DictReader(file) if own["metric"] == "exact_match"
                and own["policy"] == row["policy"].partition(":")[0] and own["words"] == own["depth"] == "all"
            )  # fmt: skip


def rerun():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlab", default=str(ROOT / "build/kvlab"), help="the command (default: build/kvlab)")
    parser.add_argument("--csv", default=str(ROOT / "docs/results/leaderboard.csv"), help="default: docs/results/leaderboard.csv")
    parser.add_argument("--count", type=int, default=10, help="number of cells (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
    parser.add_argument("--model", help="draw cells of this model alone (default: all models)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the device of the command")
    arguments = parser.parse_args()
    rows = [row for row in read_rows(arguments.csv) if is_loss(row) or row["metric"].startswith(ACCURACY)]
    rows = [row for row in rows if arguments.model in (None, row["model"]) and row["low"] and row["high"]]
    if not 0 < arguments.count <= len(rows):
        raise Refused(f"--count: {arguments.count} cells cannot be drawn from {len(rows)}")
    lines, outside = [], 0
    for row in random.Random(arguments.seed).sample(rows, arguments.count):
        print(row["command"], file=sys.stderr)
        value = measured(row, arguments.kvlab, arguments.device)
        is_within = float(row["low"]) <= value <= float(row["high"])
        outside += not is_within
        published = f"{number(value_of(row))} ({number(float(row['low']))} to {number(float(row['high']))})"
        lines.append([f"`{row['model']}`", f"`{row['policy'].partition(':')[0]}`", row["memory"], row["metric"], published, number(value),
                      "yes" if is_within else "no"])  # fmt: skip
    print(table(["model", "policy", "memory", "metric", "published, 95% CI", "again", "within"], lines))
    sys.exit(1 if outside else 0)


if __name__ == "__main__":
    main(rerun)
