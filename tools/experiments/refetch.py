#!/usr/bin/env python3
"""Which policy fetches least when evicted tokens return, and how large does the device buffer have to be?"""

import collections
import csv
import json
import math
import pathlib

from experiment import Experiment, main, name_of_model, number_with_error, table

QUESTION = """
This page measures which share of the selected tokens is fetched under each policy (*fetch rate*), and how much of the
gap between LRU and Belady's optimum a policy closes. A selector chooses a few tokens to which a query attends. Host
memory holds the keys and values of all tokens, and a buffer on the device holds some of them. A selected token that is
not in the buffer is fetched. [Let evicted tokens return](../guides/refetch.md) has the definitions.

The fetch rate is a mean over the KV heads of the replayed layers and over the texts, with its standard error. `belady`
knows the future, so it is a bound and not a policy. The gap closed is (LRU - policy) / (LRU - `belady`), in fetch
rates: 100% is the optimum, and a negative number is worse than LRU. A policy protects no tokens, unless its name in the
table has a setting for it (`sinks=4`). The head of a column gives the buffer size in tokens for each KV head.
"""
POLICIES = [
    "lru", "lru:preset=hisparse", "clock", "sieve", "lfu", "h2o", "a2sf", "a2sf:keep=0.9", "tova", "lru:sinks=4", "window",
]  # fmt: skip
PROTECT = {"lfu", "h2o", "a2sf", "a2sf:keep=0.9"}  # protect recent tokens by default
SELECTORS = {"top:64": 64, "top:128": 128, "page:16:64": 64}
RATES = [0.2, 0.1, 0.05, 0.02, 0.01]


def unprotected(policy):
    """The policy without the recent tokens that it protects by default."""
    return policy + ":recent=0" if policy in PROTECT else policy


def layers_of(experiment):
    """The layers to replay, at equal distances. An empty list stands for all layers."""
    config = json.loads((pathlib.Path(experiment.model) / "config.json").read_text())
    layers, count = config["num_hidden_layers"], experiment.arguments.layers
    return [] if not count or count >= layers else [(2 * i + 1) * layers // (2 * count) for i in range(count)]


def replayed(experiment, traces, selector, budgets):
    """The directory of the run."""
    policies = ",".join(map(unprotected, POLICIES))
    layers = layers_of(experiment)
    layers = ["--layers", ",".join(map(str, layers))] if layers else []
    return experiment.kvlab(
        ["replay"], *(word for trace in traces for word in ("--trace", trace)), "--refetch", selector, "--policy", policies,
        "--budget", ",".join(map(str, budgets)), *layers, device="cpu",
    )  # fmt: skip


def fetch_rates(rows, names):
    """Returns {(name, budget): (mean over the traces, standard error)}"""
    found = collections.defaultdict(list)
    for row in rows:
        if row["metric"] == "fetch_rate" and row["layer"] == "all" and row["policy"] != "full":
            found[row["policy"], row["params"], row["budget"]].append((float(row["value"]), float(row["stderr"] or "nan")))
    named = {}
    for (policy, params, budget), values in found.items():
        mean = sum(value for value, _ in values) / len(values)
        named[names[policy, params], budget] = mean, math.sqrt(sum(error**2 for _, error in values)) / len(values)
    return named


def names_of(rows):
    """Returns {(policy, params): name} in the order of POLICIES, which is also the order of a run's rows."""
    series = list(dict.fromkeys((row["policy"], row["params"]) for row in rows if row["policy"] not in ("belady", "full")))
    return dict(zip(series, POLICIES, strict=True)) | {("belady", ""): "belady"}


def gap_closed(rates, name, budget):
    lru, best = rates["lru", budget][0], rates["belady", budget][0]
    return (lru - rates[name, budget][0]) / (lru - best) if lru > best else math.nan


def percent(value, digits=3):
    return number_with_error(tuple(100 * number for number in value), digits)


def comparison(rates, budgets):
    """Returns a table with a row for each policy. Belady comes first, then the policies by how much of the gap they
    close, the largest share first."""
    budgets = [str(budget) for budget in budgets]

    def mean_gap(name):
        return sum(gap_closed(rates, name, budget) for budget in budgets) / len(budgets)

    lines = []
    for name in ["belady", *sorted(POLICIES, key=mean_gap, reverse=True)]:
        cells = [f"{percent(rates[name, budget])} | {100 * gap_closed(rates, name, budget):.0f}%" for budget in budgets]
        lines.append([f"`{name}`", *cells])
    header = ["policy", *(f"{budget}: fetched, % | gap closed" for budget in budgets)]
    text = table(header, lines)
    columns = 1 + 2 * len(budgets)
    first, _, *rest = text.splitlines()
    return "\n".join([first, "| " + " | ".join(["---"] * columns) + " |", *rest])


def buffers(run):
    """For each fetch rate, the smallest buffer with which LRU fetches at most this share. `kvlab replay` prints the
    same."""
    sums = collections.defaultdict(list)
    with open(pathlib.Path(run) / "lru_curve.csv", newline="") as file:
        for row in csv.DictReader(file):
            sums[int(row["budget_tokens"])].append(float(row["fetch_rate"]))
    traces = max(map(len, sums.values()))
    means = {budget: sum(own) / traces for budget, own in sorted(sums.items()) if len(own) == traces}
    return [next((str(budget) for budget, mean in means.items() if mean <= rate), "-") for rate in RATES]


def recall_of(rows):
    """The mean share of the full cache's attention that the selected tokens receive."""
    own = [float(row["value"]) for row in rows if row["policy"] == "full" and row["metric"] == "recall" and row["layer"] == "all"]
    return sum(own) / len(own)


def measure(experiment, directory, sizes):
    """Adds the section of one model. Adds rows to `sizes`, the table of buffers."""
    experiment.model = directory
    tokens = experiment.tokens
    traces = [
        experiment.kvlab(
            ["capture"], "--model", directory, "--prompt-file", text, "--teacher-forced", "--prompt-tokens", tokens // 4,
            "--max-tokens", tokens, device="cpu",
        )
        for text in experiment.arguments.text
    ]  # fmt: skip
    layers = ", ".join(map(str, layers_of(experiment)))
    layers = f"Layers {layers}." if layers else "All layers."
    experiment.section(f"## {name_of_model(directory)}\n\n{layers}")
    for selector, count in list(SELECTORS.items())[: experiment.quick(1, None)]:
        budgets = [2 * count, 3 * count, 4 * count]
        run = replayed(experiment, traces, selector, budgets)
        rows = experiment.rows(run / "results.csv")
        rates = fetch_rates(rows, names_of(rows))
        recall = 100 * recall_of(rows)
        experiment.section(
            f"### `{selector}`\n\nThe selected tokens and the query's own token receive {recall:.1f}% of the full cache's attention.\n\n"
            + comparison(rates, budgets)
        )
        sizes.append([name_of_model(directory), f"`{selector}`", *buffers(run)])


def add_arguments(parser):
    parser.add_argument("--layers", type=int, help="number of layers to replay, at equal distances (default: all)")


def refetch():
    experiment = Experiment(__doc__, models=True, arguments=add_arguments)
    sizes = []
    for directory in experiment.models:
        measure(experiment, directory, sizes)
    header = ["model", "selector", *(f"{100 * rate:.0f}%" for rate in RATES)]
    experiment.section(
        "## Which buffer size?\n\nThe table shows the smallest buffer, in tokens for each KV head, with which `lru` fetches at most "
        "the share of the selected tokens that the head of the column gives. One pass over the traces computes it from stack distances."
        "\n\n" + table(header, sizes)
    )
    experiment.write("Fetch rates of policies when tokens return", QUESTION)


main(refetch)
