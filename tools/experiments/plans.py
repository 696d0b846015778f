#!/usr/bin/env python3
"""Compares plans of storage formats by layer with single formats in as many bytes (docs/results/plans.md)."""

import json
import pathlib
import subprocess
import sys

import numpy
from experiment import Experiment, Refused, main, name_of_model, table, values

QUESTION = """
`kvlab plan` chooses a storage format for the keys and the values of each layer from one trace
([guide](../guides/precision-tiers.md#formats-by-layer-from-a-trace)). This page asks three things. Does its plan lose
less than the best single format for all layers, keys and values apart, in as many bits? Is the loss what the plan
predicts? And does the prediction order plans as the end-to-end evaluation does?

The plans come from a trace of the first text. KL is measured on the other texts, which the plans have not seen, against
the model's own full cache in 16 bit, in nats, with its standard error. Bits are means over all elements, with scales and
minima.
"""
BITS = [3.5, 4, 4.5, 5, 6, 9]
CENTRES = ["none", "prompt"]
SAMPLES = 4  # of the gradients


def trace_with_gradients(experiment):
    trace = experiment.capture(experiment.quick(512, 1024))
    command = ["-m", "kvlab.hf", "sensitivities", trace, "--model", experiment.model, "--samples", SAMPLES]
    done = subprocess.run([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise Refused(f"gradients: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return trace


def plan_of(experiment, trace, bits, centre):
    """The plan file of `kvlab plan` as a dictionary."""
    options = ["--trace", trace, "--budget", f"{bits}bits", "--formats", "kvlab", "--centre", centre]
    return json.loads(pathlib.Path(experiment.kvlab(["plan"], *options, device="")).read_text())


def kl_of(experiment, tier_plans, centre):
    """{tier plan: (KL, standard error)} on the texts other than the first."""
    given = [word for tier_plan in tier_plans for word in ("--tiers", tier_plan)]
    all_texts = experiment.arguments.text
    experiment.arguments.text = all_texts[1:]
    try:
        rows = experiment.eval(["full"], ["100%"], *given, "--centre", centre)
    finally:
        experiment.arguments.text = all_texts
    found = {}
    for (_, params, _), value in values(rows, "kl").items():
        tiers = [part.removeprefix("tiers=") for part in params.split(":") if part.startswith("tiers=")]
        found[tiers[0].replace("@", ":").replace("+", ",") if tiers else "16"] = value
    return found


def rank_correlation(one, other):
    """Spearman's."""
    ranks = [numpy.argsort(numpy.argsort(values)) for values in (one, other)]
    return float(numpy.corrcoef(*ranks)[0, 1])


def shown(value, error=None):
    text = f"{value:.3g}" if value >= 1e-3 else f"{value:.2g}"
    return text if error is None else f"{text} ± {error:.1g}"


def of_centre(experiment, trace, centre):
    """The lines of the table, and (predicted, measured) of every plan."""
    plans = {bits: plan_of(experiment, trace, bits, centre) for bits in experiment.quick(BITS[::2], BITS)}
    predicted = {}  # by the sum of losses, which all plans of the frontier have
    for plan in plans.values():
        for choice in (plan["plan"], plan["uniform"]):
            predicted[choice["tiers"]] = choice["sum_of_losses"]
    frontier = [choice for choice in next(iter(plans.values()))["frontier"] if choice["bits"] <= 9.5]
    for choice in frontier[:: experiment.quick(4, 1)]:
        predicted.setdefault(choice["tiers"], choice["sum_of_losses"])
    measured = kl_of(experiment, list(predicted), centre)
    lines = []
    for bits, plan in plans.items():
        own, uniform = measured[plan["plan"]["tiers"]], measured[plan["uniform"]["tiers"]]
        lines.append([
            bits, centre, f"{plan['plan']['bits']:.2f}", shown(plan["plan"]["loss"], plan["plan"]["stderr"] or 0), shown(*own),
            f"{own[0] / plan['plan']['loss']:.2f}", f"`{plan['uniform']['tiers']}`", shown(*uniform), f"{own[0] / uniform[0]:.2f}",
        ])  # fmt: skip
    return lines, [(value, measured[tiers][0]) for tiers, value in predicted.items() if tiers != "16"]


def plans():
    experiment = Experiment(__doc__, models=True)
    if len(experiment.arguments.text) < 2:
        raise Refused("--text: give at least two, one to plan from and others to measure")
    for directory in experiment.models:
        experiment.model = directory
        trace = trace_with_gradients(experiment)
        lines, correlations = [], []
        for centre in CENTRES:
            own, pairs = of_centre(experiment, trace, centre)
            lines += own
            correlations.append(f"{rank_correlation(*zip(*pairs, strict=True)):.3f} over {len(pairs)} plans with centre={centre}")
        header = ["bits", "centre", "plan's bits", "predicted", "measured", "measured / predicted", "best single format",
                  "its KL", "plan / single"]  # fmt: skip
        experiment.section(
            f"## {name_of_model(directory)}\n\n"
            + table(header, lines)
            + "\n\nRank correlation (Spearman) of the sums of losses and the measured KL, also of plans of other sizes: "
            + "; ".join(correlations)
            + "."
        )
    experiment.write("Plans of formats by layer", QUESTION)


main(plans)
