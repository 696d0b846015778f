#!/usr/bin/env python3
"""Compares plans of storage formats by layer with single formats in as many bytes (docs/results/plans.md)."""


import numpy
from experiment import Experiment, Refused, main, name_of_model, spearman, table, tier_plan_of, values

from kvlab import Trace

QUESTION = """
`kvlab plan` chooses a storage format for the keys and the values of each layer from one trace
([guide](../guides/precision-tiers.md#formats-by-layer-from-a-trace)). This page answers three questions. Does the plan
lose less than the best choice of one format for the keys of all layers and one for the values of all layers, in at most
as many bits as the plan?
Is the measured loss equal to the loss that the plan predicts? Do the predictions put plans in the same order as the
end-to-end evaluation?

The plans are made from a trace of the first text. KL is measured on the other texts, relative to the model's own full
cache in 16 bit, in nats, with its standard error. Bits are means over all elements, including scales and minima. The
column "calibrated" is "measured / predicted" of a plan, divided by "measured / predicted" of the plan of 4.5 bits. On
some texts, all losses exceed the predictions by about the same factor. A single end-to-end run measures this factor,
and "calibrated" shows how good the predictions are after they are multiplied by it. `kvlab` stands for all of kvlab's
own formats, and `cuda` for the ones among them that work on CUDA.
"""
BITS = [3.5, 4, 4.5, 5, 6, 9]
CALIBRATED = 4.5  # the bits of the one plan whose measured KL calibrates the others
SETS = [("kvlab", "none"), ("kvlab", "prompt"), ("cuda", "none")]  # formats and centre
SAMPLES = 4  # of the gradients
ROWS = {"16": 64, "fp8": 33, "8": 36, "4": 20, "3": 16, "2": 12}  # bytes of 32 channels


def kl_of(experiment, tier_plans, centre, first=False):
    """Returns {tier plan: (KL, standard error)} on the texts other than the first, or on the first."""
    given = [word for tier_plan in tier_plans for word in ("--tiers", tier_plan)]
    texts = experiment.arguments.text
    rows = experiment.eval(["full"], ["100%"], *given, "--centre", centre, texts=texts[:1] if first else texts[1:])
    return {tier_plan_of(params)[1]: value for (_, params, _), value in values(rows, "kl").items()}


def shown(value, error=None):
    text = f"{value:.3g}" if value >= 1e-3 else f"{value:.2g}"
    return text if error is None else f"{text} ± {error:.1g}"


def load_set(experiment, trace, formats, centre, others=()):
    """Returns the lines of the table, (predicted, measured) of every plan, and {tier plan: measured} of every plan and
    of `others`."""
    plans = {bits: experiment.plan(trace, f"{bits}bits", formats, "--centre", centre) for bits in experiment.quick(BITS[::2], BITS)}
    predicted = {}  # {tier plan: sum of losses}, which every plan of the frontier has
    for plan in plans.values():
        for choice in (plan["plan"], plan["uniform"]):
            predicted[choice["tiers"]] = choice["sum_of_losses"]
    frontier = [choice for choice in next(iter(plans.values()))["frontier"] if choice["bits"] <= 9.5]
    for choice in frontier[:: experiment.quick(4, 1)]:
        predicted.setdefault(choice["tiers"], choice["sum_of_losses"])
    measured = kl_of(experiment, list(dict.fromkeys([*predicted, *others])), centre)
    ratios = {bits: measured[plan["plan"]["tiers"]][0] / plan["plan"]["loss"] for bits, plan in plans.items()}
    lines = []
    for bits, plan in plans.items():
        own, uniform = measured[plan["plan"]["tiers"]], measured[plan["uniform"]["tiers"]]
        lines.append([
            formats, centre, bits, shown(plan["plan"]["loss"], plan["plan"]["stderr"] or 0), shown(*own),
            f"{ratios[bits]:.2f}", f"{ratios[bits] / ratios[CALIBRATED]:.2f}", f"`{plan['uniform']['tiers']}`", shown(*uniform), f"{own[0] / uniform[0]:.2f}",
        ])  # fmt: skip
    return lines, [(value, measured[tiers][0]) for tiers, value in predicted.items() if tiers != "16"], measured


def runs_of(formats):
    """Writes the (key, value) formats of all layers as a tier plan, such as 16x3-4/16x1-16x26."""
    names = ["k4v2" if (key, value) == ("4", "2") else key if key == value else f"{key}/{value}" for key, value in formats]
    runs = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return runs[0][0] if len(runs) == 1 else "-".join(f"{name}x{count}" for name, count in runs)


def knapsack(losses, max_bytes):
    """Chooses a format for each part, so that the sum of losses is the lowest possible in at most `max_bytes` bytes.
    `losses`: [part][format]."""
    sizes = [ROWS[name] for name in ROWS]
    best = numpy.zeros(max_bytes + 1)
    chosen = []
    for part in losses:
        options = numpy.full((len(sizes), max_bytes + 1), numpy.inf)
        for f, size in enumerate(sizes):
            options[f, size:] = best[: max_bytes + 1 - size] + part[f]
        chosen.append(options.argmin(axis=0))
        best = options.min(axis=0)
    formats, left = [], max_bytes
    for choice in reversed(chosen):
        formats.append(int(choice[left]))
        left -= sizes[formats[-1]]
    return formats[::-1]


def by_brute_force(experiment, layers):
    """Returns {bits: tier plan}. Each evaluation quantizes the keys or the values of one layer; all others are in 16
    bit."""
    names = list(ROWS)
    alone = {}
    for layer in range(layers):
        for kv in range(2):
            for name in names[1:]:
                formats = [["16", "16"] for _ in range(layers)]
                formats[layer][kv] = name
                alone[layer, kv, name] = runs_of(formats)
    measured = kl_of(experiment, list(alone.values()), "none", first=True)
    losses = [
        [0.0] + [measured[alone[layer, kv, name]][0] for name in names[1:]] for layer in range(layers) for kv in range(2)
    ]
    found = {}
    for bits in experiment.quick(BITS[::2], BITS):
        formats = [names[f] for f in knapsack(losses, int(bits * 4 * 2 * layers))]
        found[bits] = runs_of(list(zip(formats[::2], formats[1::2], strict=True)))
    return found, len(alone)


def compared(brute, lines, measured):
    """The table of brute force beside the plans of the first set."""
    rows = []
    for line, (bits, tiers) in zip(lines, brute.items(), strict=True):
        rows.append([bits, line[4], shown(*measured[tiers]), f"{float(line[4].split()[0]) / measured[tiers][0]:.2f}"])
    return table(["bits", "KL of `kvlab plan`", "KL of brute force", "ratio"], rows)


def plans():
    experiment = Experiment(__doc__, models=True)
    if len(experiment.arguments.text) < 2:
        raise Refused("--text: give at least two, one to plan from and others to measure")
    for directory in experiment.models:
        experiment.model = directory
        trace = experiment.capture(experiment.quick(512, 1024))
        experiment.add_gradients(trace, SAMPLES)
        layers = sum(not row.get("span") for row in Trace(trace).rows)  # without a window
        brute, passes = by_brute_force(experiment, layers)
        lines, correlations, first = [], [], None
        for formats, centre in SETS:
            own, pairs, measured = load_set(experiment, trace, formats, centre, brute.values() if first is None else ())
            first = first or (own, measured)
            lines += own
            correlations.append(f"{spearman(*zip(*pairs, strict=True)):.3f} over {len(pairs)} plans of `{formats}` with centre={centre}")
        header = ["formats", "centre", "bits", "predicted", "measured", "measured / predicted", "calibrated",
                  "best single format", "its KL", "plan / single"]  # fmt: skip
        experiment.section(
            f"## {name_of_model(directory)}\n\n"
            + table(header, lines)
            + "\n\nThe rank correlation (Spearman) between the predicted sums of losses and the measured KL, over these plans and plans "
            + "of other sizes: "
            + "; ".join(correlations)
            + "."
        )
        experiment.section(
            "Brute force measures each loss by an end-to-end evaluation on the first text, with one layer's keys or values in one "
            f"format and all others in 16 bit. This takes {passes} evaluations of a whole text. Brute force then chooses formats by these "
            f"losses in the same way as `kvlab plan`, which needs only one capture and {SAMPLES} samples of gradients:\n\n"
            + compared(brute, *first)
        )
    experiment.write("Plans of formats by layer", QUESTION)


main(plans)
