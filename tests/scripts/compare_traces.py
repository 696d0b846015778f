#!/usr/bin/env python3
"""Compares two traces of the same ids: q, k and v, and the results of replays of both.

    python3 tests/scripts/compare_traces.py OURS THEIRS [--reference TRACE] [--replay build/kvlab --model MODEL] [--json]

Differences are printed in two ways: relative (norm of the difference divided by the norm of THEIRS), and in units of
the last place of the largest element of a head's vector, in the traces' dtype. --reference: a trace of the same ids in
float32. The error of each trace against it is printed, and the error of OURS must be at most twice that of THEIRS.
--replay: replays both traces with every policy and oracle of kvlab. The difference of recall must be less than 0.002.
Exits with 1 if one of these limits is exceeded, and with 2 if the traces cannot be compared.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file

MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
MAX_OF_THEIR_ERROR = 2
MAX_RECALL_DIFFERENCE = 0.002
# The evictions of these policies depend on the order of earlier evictions. If rounding changes one request, all later
# evictions may change. Therefore their difference is printed and not limited.
UNLIMITED = ("clock", "sieve", "hisparse")


class Refused(Exception):
    """An error in the input. The message is one line that says what is wrong, where, and what is expected."""


class Trace:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        try:
            self.manifest = json.loads((self.path / "manifest.json").read_text())
            self.ids = load_file(self.path / "tokens.safetensors")["ids"]
            self.shards = [load_file(self.path / shard["file"]) for shard in self.manifest["shards"]]
        except (OSError, ValueError, KeyError) as error:
            raise Refused(f"{path}: {error}; a finished trace is expected") from None
        self.config = self.manifest["config"]

    def refuse_unlike(self, other):
        for key in ("layers", "query_heads", "kv_heads", "head_size"):
            if self.config[key] != other.config[key]:
                raise Refused(f"{self.path}: {key} is {self.config[key]}; {other.path} has {other.config[key]}")
        if not torch.equal(self.ids, other.ids):
            raise Refused(f"{self.path}: other ids than {other.path}; traces of the same text are expected")
        if self.manifest["segments"] != other.manifest["segments"]:
            raise Refused(f"{self.path}: other segments than {other.path}; as many prompt tokens are expected")

    def rows(self, layer, part):
        """The rows of `part` (q, k or v) of a layer, [heads, tokens, head_size] float32."""
        return torch.cat([shard[f"layers.{layer}.{part}"] for shard in self.shards], dim=1).float()


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def compare_part(layer, part, ours, theirs, reference):
    a, b = ours.rows(layer, part), theirs.rows(layer, part)
    largest = b.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    last_place = torch.exp2(largest.log2().floor() - MANTISSA_BITS[theirs.config["dtype"]])
    units = (a - b).abs() / last_place
    row = {
        "layer": layer,
        "part": part,
        "relative": relative(a, b),
        "units_mean": float(units.mean()),
        "units_max": float(units.max()),
        "equal": float((a == b).float().mean()),
    }
    if reference:
        exact = reference.rows(layer, part)
        row |= {"our_error": relative(a, exact), "their_error": relative(b, exact)}
    return row


def run_kvlab(kvlab, *arguments):
    done = subprocess.run([kvlab, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(f"{kvlab} {arguments[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def recall_of(arguments, trace, policies):
    """Replays a trace. Returns {(policy, parameters, budget): recall}, with the oracles."""
    kvlab = arguments.replay
    with tempfile.TemporaryDirectory() as folder:
        sweep = ["--policy", policies, "--budget", arguments.budget, "--device", "cpu", "--json"]
        sweep += ["--model", arguments.model] if arguments.model else []
        result = run_kvlab(kvlab, "replay", "--trace", trace.path, *sweep, "--out", pathlib.Path(folder) / "run")
    rows = [row for row in result["results"] if row["metric"] == "recall"]
    return {(row["policy"], row["params"], row["budget"]): row["value"] for row in rows}


def replays_alone(policy, model):
    """Whether the policy can be replayed with what is there: the trace and, if `model` is given, the model's
    weights."""
    return policy["decodes"] and (model or "value_out_norm1" not in policy["features"])


def compare_recall(arguments, ours, theirs):
    policies = arguments.policy
    if not policies:
        registered = run_kvlab(arguments.replay, "policies", "--json")["policies"]
        policies = ",".join(policy["name"] for policy in registered if replays_alone(policy, arguments.model))
    a, b = (recall_of(arguments, trace, policies) for trace in (ours, theirs))
    if a.keys() != b.keys():
        raise Refused(f"{arguments.replay} replay: the two replays have different rows")
    return [
        {"policy": key[0], "params": key[1], "budget": key[2], "ours": a[key], "theirs": b[key]} for key in a
    ]


def print_parts(rows, reference):
    print(f"{'layer':>5} {'part':<4} {'relative':>9} {'equal':>7} {'units mean':>10} {'largest':>6}", end="")
    print(f" {'our error':>10} {'their error':>11} {'ratio':>6}" if reference else "")
    for row in rows:
        print(
            f"{row['layer']:>5} {row['part']:<4} {row['relative']:>9.5f} {row['equal']:>7.1%}"
            f" {row['units_mean']:>10.3f} {row['units_max']:>6.1f}",
            end="",
        )
        if reference:
            ratio = f"{row['our_error'] / row['their_error']:.2f}" if row["their_error"] > 0 else "-"
            print(f" {row['our_error']:>10.5f} {row['their_error']:>11.5f} {ratio:>6}", end="")
        print()


def print_recall(rows):
    print(f"\n{'policy':<14} {'budget':>7} {'ours':>9} {'theirs':>9} {'difference':>11}")
    for row in rows:
        difference = row["ours"] - row["theirs"]
        print(
            f"{row['policy']:<14} {row['budget']:>7} {row['ours']:>9.5f} {row['theirs']:>9.5f} {difference:>+11.5f}"
            f"  {row['params']}"
        )
    largest = largest_difference(rows)
    print(f"largest difference in recall: {largest:.5f} (must be less than {MAX_RECALL_DIFFERENCE})")


def largest_difference(rows):
    return max((abs(row["ours"] - row["theirs"]) for row in rows if row["policy"] not in UNLIMITED), default=0)


def holds(result):
    near = all(
        row["our_error"] <= MAX_OF_THEIR_ERROR * row["their_error"]
        for row in result["parts"]
        if "our_error" in row
    )
    return near and largest_difference(result.get("recall", [])) < MAX_RECALL_DIFFERENCE


def parse_arguments():
    parser = argparse.ArgumentParser(description="Compares two traces of the same ids.")
    parser.add_argument("ours", metavar="OURS")
    parser.add_argument("theirs", metavar="THEIRS")
    parser.add_argument("--reference", metavar="TRACE", help="of the same ids, in float32")
    parser.add_argument("--replay", metavar="KVLAB", help="the kvlab command: compare recall, too")
    parser.add_argument("--policy", metavar="LIST", help="of the replays (default: every one)")
    parser.add_argument("--model", help="of the replays, for policies that read its output projections")
    parser.add_argument("--budget", default="64,128,10%,25%,50%", help="of the replays (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    ours, theirs = Trace(arguments.ours), Trace(arguments.theirs)
    reference = Trace(arguments.reference) if arguments.reference else None
    for other in filter(None, (theirs, reference)):
        other.refuse_unlike(ours)
    layers = range(ours.config["layers"])
    parts = [compare_part(layer, part, ours, theirs, reference) for layer in layers for part in "qkv"]
    result = {"ours": arguments.ours, "theirs": arguments.theirs, "tokens": len(ours.ids), "parts": parts}
    if arguments.replay:
        result["recall"] = compare_recall(arguments, ours, theirs)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{arguments.ours} and {arguments.theirs}: {len(ours.ids)} tokens")
        print_parts(parts, reference)
        if arguments.replay:
            print_recall(result["recall"])
    return 0 if holds(result) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as error:
        print(f"compare_traces.py: {error}", file=sys.stderr)
        sys.exit(2)
