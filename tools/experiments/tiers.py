#!/usr/bin/env python3
"""Compares tier plans at equal bytes (docs/results/tiers.md): end-to-end evaluation, pass key, quantization alone."""

import numpy
from quantize import quantize, rotated
from experiment import Experiment, number_with_error, main, name_of_model, table, tier_plan_of, values

from kvlab import Trace

QUESTION = """
This page compares tier plans at equal bytes. The same bytes can hold few tokens in 16 bit, or more tokens in fewer
bits. The page shows which is better, for each policy and budget.

A budget of N tokens stands for the bytes of N tokens in 16 bit, in the layers without a sliding window. [Precision
tiers](../guides/precision-tiers.md) defines the terms. KL is relative to the model's own full cache, in nats, as a mean
over all texts.
"""
POLICIES = ["a2sf:keep=0.99:sinks=4:recent=11", "h2o:sinks=4:recent=11", "sink:sinks=4"]
TIER_PLANS = ["16", "fp8", "8", "4", "2", "16:16t,4:100%", "16:16t,k4v2:100%", "8:25%,4:50%,k4v2:25%"]
BUDGETS = [32, 64, 128, 256, 512, 768]
ASKED = [TIER_PLANS[0], TIER_PLANS[3], TIER_PLANS[5], TIER_PLANS[7]]  # for the pass key
KEYS_AT = [32, 64, 128, 256]
WAYS = {  # what is quantized: bits of keys and values
    "keys and values": (4, 4), "keys": (4, 16), "values": (16, 4), "values in 2 bits": (16, 2), "keys in 2 bits": (2, 16),
}  # fmt: skip
FORMS = [("keys and values", 32, "yes"), ("keys and values", 64, "yes"), ("keys and values", 32, "no")] + [
    (way, 32, "yes") for way in list(WAYS)[1:]
]


def attend(query, key, value, scale):
    logits = query @ key.T * scale
    logits[~numpy.tri(len(logits), dtype=bool)] = -numpy.inf
    logits = numpy.exp(logits - logits.max(axis=1, keepdims=True))
    return logits / logits.sum(axis=1, keepdims=True) @ value


def quantization_alone(trace):
    """Relative error of attention's output with every token quantized and none evicted, by bits, block and rotation."""
    layers = [layer for layer, row in enumerate(trace.rows) if not row.get("span")][:6]
    errors = {}
    for layer in layers:
        row = trace.rows[layer]
        tables = trace.inv_freq.reshape(-1, trace.inv_freq.shape[-1])
        inv_freq = tables[row.get("rope", 0)]
        group = trace.query_heads // trace.kv_heads
        for head in range(trace.kv_heads):
            query = rotated(trace.read("q", layer, head * group), inv_freq)
            key, value = rotated(trace.read("k", layer, head), inv_freq), trace.read("v", layer, head)
            exact = attend(query, key, value, row["scale"])
            size = numpy.linalg.norm(exact, axis=1)
            for way, block, turned in FORMS:
                key_bits, value_bits = WAYS[way]
                quantized_parts = [quantize(key, key_bits, block, turned == "yes"), quantize(value, value_bits, block, turned == "yes")]
                own = attend(query, *quantized_parts, row["scale"])
                error = (numpy.linalg.norm(own - exact, axis=1) / size).mean()
                errors.setdefault((way, block, turned), []).append(error)
    return {way: float(numpy.mean(own)) for way, own in errors.items()}


def by_tier_plan(found):
    """{(policy, tier plan, budget): (value, error)}, from {(policy, params, budget): (value, error)}."""
    return {(key[0], tier_plan_of(key[1])[1], key[2]): own for key, own in found.items()}


def options_of(tier_plans):
    return [word for tier_plan in tier_plans for word in ("--tiers", tier_plan)]


def choices(experiment):
    """Policies, tier plans and budgets. With --quick there are fewer, because on a CPU a quantized configuration takes
    as long as ten in 16 bit."""
    return experiment.quick((POLICIES[:2], TIER_PLANS[:1] + TIER_PLANS[2:], [64, 256]), (POLICIES, TIER_PLANS, BUDGETS))


def end_to_end(experiment):
    """{(policy, tier plan, budget): KL}"""
    policies, tier_plans, budgets = choices(experiment)
    rows = experiment.eval(policies, budgets, "--positions", "original", *options_of(tier_plans))
    return {key: max(value, 1e-9) for key, (value, _) in by_tier_plan(values(rows, "kl")).items()}


def pass_keys(experiment, words):
    options = ["--depth", "10%,50%,90%", *options_of(ASKED)]
    samples = experiment.quick(4, 12)
    found = experiment.pass_keys(["h2o:sinks=4"], KEYS_AT, words, samples, *options)
    return {key: value for key, (value, _) in by_tier_plan(found).items()}


def digits(values):
    """The values as text, with three digits each."""
    return ", ".join(number_with_error((value, float("nan"))) for value in values)


def best_of(experiment, found):
    """A row for each budget: the lowest KL of each model in 16 bit and with any plan."""
    _, _, budgets = choices(experiment)
    lines = []
    for budget in map(str, budgets):
        line = [budget]
        for own in found:
            at = {key: value for key, value in own.items() if key[2] == budget}
            exact = min((key for key in at if key[1] == "16"), key=at.get)
            best = min(at, key=at.get)
            line.append(f"`{exact[0]}` {digits([at[exact]])}; `{best[0]}`, `{best[1]}` {digits([at[best]])}")
        lines.append(line)
    return lines


def tier_plans():
    experiment = Experiment(__doc__, models=True)
    names = [name_of_model(directory) for directory in experiment.models]
    found, requested, errors = [], {}, []
    for directory, name in zip(experiment.models, names, strict=True):
        experiment.model = directory
        found.append(end_to_end(experiment))
        keys = pass_keys(experiment, 100 if "small" in name else 200)
        if keys["full", "16", "all"] >= 0.8:
            requested[name] = keys
        errors.append(quantization_alone(Trace(experiment.capture(512))))
    policies, tier_plans, budgets = choices(experiment)
    policy = policies[0].split(":")[0]
    rows = [
        [f"`{tier_plan}`", *(digits(own[policy, tier_plan, str(budget)] for own in found) for budget in budgets)]
        for tier_plan in tier_plans
    ]
    experiment.section(
        f"## Which tier plan\n\nEach cell has the KL under `{policies[0]}` for {', '.join(names)}, in this order:\n\n"
        + table(["tier plan", *map(str, budgets)], rows)
    )
    others = ", ".join(f"`{own}`" for own in policies[:-1]) + f" and `{policies[-1]}`"
    experiment.section(
        f"## Tier plan and policy\n\nEach cell has the lowest KL among {others}: first in 16 bit, then with any tier plan.\n\n"
        + table(["budget", *names], best_of(experiment, found))
    )
    rows = [
        [f"`{tier_plan}`"]
        + [", ".join(f"{keys['h2o', tier_plan, str(budget)]:.2f}" for keys in requested.values()) for budget in KEYS_AT]
        for tier_plan in ASKED
    ]
    experiment.section(
        f"## Pass key\n\nThe share of right answers of {', '.join(requested)} under `h2o:sinks=4`. The question comes "
        "after the eviction. Models whose full cache has less than 80% right answers are left out.\n\n"
        + table(["tier plan", *map(str, KEYS_AT)], rows)
    )
    rows = [
        [*(f"{part}" for part in way), *(f"{own[way]:.4f}" for own in errors)] for way in errors[0]
    ]
    experiment.section(
        "## Quantization alone\n\nThe table has the error of attention's output, relative to the size of this output, if no token is "
        "evicted and every token is quantized. Tokens are quantized to 4 bits unless the row says otherwise. The error is measured on "
        "512 tokens of the first text, in up to six layers without a sliding window. Blocks of 64 channels take a tenth fewer bytes.\n\n"
        + table(["quantized", "block", "Hadamard rotation", *names], rows)
    )
    experiment.write("Tier plans at equal bytes", QUESTION)


main(tier_plans)
