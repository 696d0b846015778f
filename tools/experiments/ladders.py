#!/usr/bin/env python3
"""Ladders: how exactly should tokens be kept, at equal bytes? Closed loop, pass key, and codes alone (rungs)."""

import numpy
from codes import coded, rotated
from experiment import Experiment, figure, main, name_of_model, table, values

from kvlab import Trace

QUESTION = """
A budget of bytes holds few tokens exactly, or more in fewer bits. Which is better, for which policy, and from where on?
Budgets are the bytes of so many tokens in 16 bit, in the layers that see everything; words are those of
[precision tiers](../guides/precision-tiers.md). KL is to the model's own full cache, in nats, over the texts together.
"""
POLICIES = ["a2sf:keep=0.99:sinks=4:recent=11", "h2o:sinks=4:recent=11", "sink:sinks=4"]
LADDERS = ["16", "fp8", "8", "4", "2", "16:16t,4:100%", "16:16t,k4v2:100%", "8:25%,4:50%,k4v2:25%"]
BUDGETS = [32, 64, 128, 256, 512, 768]
ASKED = [LADDERS[0], LADDERS[3], LADDERS[5], LADDERS[7]]  # for the pass key
KEYS_AT = [32, 64, 128, 256]
WAYS = {  # what is coded: bits of keys and values
    "keys and values": (4, 4), "keys": (4, 16), "values": (16, 4), "values in 2": (16, 2), "keys in 2": (2, 16),
}  # fmt: skip
FORMS = [("keys and values", 32, "yes"), ("keys and values", 64, "yes"), ("keys and values", 32, "no")] + [
    (way, 32, "yes") for way in list(WAYS)[1:]
]


def attend(query, key, value, scale):
    logits = query @ key.T * scale
    logits[~numpy.tri(len(logits), dtype=bool)] = -numpy.inf
    logits = numpy.exp(logits - logits.max(axis=1, keepdims=True))
    return logits / logits.sum(axis=1, keepdims=True) @ value


def codes_alone(trace):
    """Relative error of attention's output with every token coded and none gone, by way, block and turning."""
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
                codes = [coded(key, key_bits, block, turned == "yes"), coded(value, value_bits, block, turned == "yes")]
                own = attend(query, *codes, row["scale"])
                error = (numpy.linalg.norm(own - exact, axis=1) / size).mean()
                errors.setdefault((way, block, turned), []).append(error)
    return {way: float(numpy.mean(own)) for way, own in errors.items()}


def ladder_of(params):
    """`keep=0.99:…:ladder=16@16t+4@100%` -> (without the ladder, the ladder)."""
    parts = params.split(":")
    ladder = [part[7:] for part in parts if part.startswith("ladder=")]
    rest = ":".join(part for part in parts if not part.startswith("ladder="))
    return rest, (ladder[0].replace("@", ":").replace("+", ",") if ladder else "16")


def by_ladder(found):
    """{(policy, ladder, budget): (value, error)}."""
    return {(key[0], ladder_of(key[1])[1], key[2]): own for key, own in found.items()}


def options_of(ladders):
    return [word for ladder in ladders for word in ("--ladder", ladder)]


def choices(experiment):
    """Policies, ladders and budgets; fewer in a CPU's minutes: a coded configuration costs ten plain ones there."""
    return experiment.quick((POLICIES[:2], LADDERS[:1] + LADDERS[2:], [64, 256]), (POLICIES, LADDERS, BUDGETS))


def closed_loop(experiment):
    """{(policy, ladder, budget): KL}"""
    policies, ladders, budgets = choices(experiment)
    rows = experiment.eval(policies, budgets, "--positions", "original", *options_of(ladders))
    return {key: max(value, 1e-9) for key, (value, _) in by_ladder(values(rows, "kl")).items()}


def pass_keys(experiment, words):
    options = ["--depth", "10%,50%,90%", *options_of(ASKED)]
    draws = experiment.quick(4, 12)
    found = experiment.pass_keys(["h2o:sinks=4"], KEYS_AT, words, draws, *options)
    return {key: value for key, (value, _) in by_ladder(found).items()}


def digits(values):
    """Three digits of each."""
    return ", ".join(figure((value, float("nan"))) for value in values)


def best_of(experiment, found):
    """By budget: the least KL in 16 bit and at all, of each model."""
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


def ladders():
    experiment = Experiment(__doc__, models=True)
    names = [name_of_model(directory) for directory in experiment.models]
    found, asked, errors = [], {}, []
    for directory, name in zip(experiment.models, names, strict=True):
        experiment.model = directory
        found.append(closed_loop(experiment))
        keys = pass_keys(experiment, 100 if "small" in name else 200)
        if keys["full", "16", "all"] >= 0.8:
            asked[name] = keys
        errors.append(codes_alone(Trace(experiment.capture(512))))
    policies, ladders, budgets = choices(experiment)
    policy = policies[0].split(":")[0]
    rows = [
        [f"`{ladder}`", *(digits(own[policy, ladder, str(budget)] for own in found) for budget in budgets)]
        for ladder in ladders
    ]
    experiment.section(
        f"## Which ladder\n\nKL under `{policies[0]}`, of {', '.join(names)}:\n\n"
        + table(["ladder", *map(str, budgets)], rows)
    )
    others = ", ".join(f"`{own}`" for own in policies)
    experiment.section(
        f"## Ladder and policy\n\nThe least KL of {others}: in 16 bit; on any ladder.\n\n"
        + table(["bytes of", *names], best_of(experiment, found))
    )
    rows = [
        [f"`{ladder}`"]
        + [", ".join(f"{keys['h2o', ladder, str(budget)]:.2f}" for keys in asked.values()) for budget in KEYS_AT]
        for ladder in ASKED
    ]
    experiment.section(
        "## Pass key\n\nAsked after the prompt is cut, `h2o:sinks=4`: the share of right answers of "
        f"{', '.join(asked)}; of other models the full cache answers less than 80%.\n\n"
        + table(["ladder", *map(str, KEYS_AT)], rows)
    )
    rows = [
        [*(f"{part}" for part in way), *(f"{own[way]:.4f}" for own in errors)] for way in errors[0]
    ]
    experiment.section(
        "## Codes alone\n\nEvery token in 4 bits where nothing else is said, nobody gone: the error of attention's "
        "output relative to its size, 512 tokens of the first text, up to six layers without a window. Blocks of 64 channels "
        "take a tenth fewer bytes.\n\n" + table(["coded", "block", "butterflies", *names], rows)
    )
    experiment.write("Which ladder, at which bytes", QUESTION)


main(ladders)
