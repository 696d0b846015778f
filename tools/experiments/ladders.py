#!/usr/bin/env python3
"""Ladders: how exactly should tokens be kept, at equal bytes? Closed loop, pass key, and codes alone (rungs)."""

import numpy
from experiment import Experiment, figure, main, name_of_model, table, values

from kvlab import Trace

QUESTION = """
A budget of bytes holds few tokens exactly, or more in fewer bits. Which is better, for which policy, and from where on?
Budgets are the bytes of so many tokens in 16 bit, in the layers that see everything; words are those of
[ladders](../ladders.md). KL is to the model's own full cache, in nats, over the texts together.
"""
POLICIES = ["a2sf:keep=0.99:sinks=4:recent=11", "h2o:sinks=4:recent=11", "sink:sinks=4"]
LADDERS = ["16", "fp8", "8", "4", "2", "16:16t,4:100%", "16:16t,k4v2:100%", "8:25%,4:50%,k4v2:25%"]
BUDGETS = [32, 64, 128, 256, 512, 768]
ASKED = [LADDERS[0], LADDERS[3], LADDERS[5], LADDERS[7]]  # for the pass key
WAYS = [("keys and values", 4, 4), ("keys alone", 4, 16), ("values alone", 16, 4), ("values in 2", 16, 2), ("keys in 2", 2, 16)]


def hadamard(size):
    matrix = numpy.ones((1, 1))
    while len(matrix) < size:
        matrix = numpy.block([[matrix, matrix], [matrix, -matrix]])
    return matrix.astype(numpy.float32) / numpy.sqrt(numpy.float32(size))


def coded(rows, bits, block, turned):
    """[token, dim] as codes of `bits` give it back: a fp16 scale and minimum for each block of channels."""
    if bits == 16:
        return rows
    own = rows.reshape(len(rows), -1, block)
    turn = hadamard(block) if turned else numpy.eye(block, dtype=numpy.float32)
    own = own @ turn
    least = own.min(axis=2, keepdims=True).astype(numpy.float16).astype(numpy.float32)
    scale = ((own.max(axis=2, keepdims=True) - least) / (2**bits - 1)).astype(numpy.float16).astype(numpy.float32)
    scale = numpy.maximum(scale, numpy.float32(6e-8))
    own = numpy.clip(numpy.rint((own - least) / scale), 0, 2**bits - 1) * scale + least
    return (own @ turn.T).reshape(rows.shape)


def rotated(rows, inv_freq):
    """[token, dim], by RoPE."""
    half = len(inv_freq)
    angle = numpy.arange(len(rows))[:, None] * inv_freq[None]
    low, high = rows[:, :half], rows[:, half : 2 * half]
    turned = [low * numpy.cos(angle) - high * numpy.sin(angle), high * numpy.cos(angle) + low * numpy.sin(angle)]
    return numpy.concatenate([*turned, rows[:, 2 * half :]], axis=1).astype(numpy.float32)


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
            for name, key_bits, value_bits in WAYS:
                for block in (32, 64):
                    for turned in (True, False):
                        own = attend(query, coded(key, key_bits, block, turned), coded(value, value_bits, block, turned),
                                     row["scale"])  # fmt: skip
                        error = (numpy.linalg.norm(own - exact, axis=1) / size).mean()
                        errors.setdefault((name, block, turned), []).append(error)
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
    policies, ladders, budgets = choices(experiment)
    rows = experiment.eval(policies, budgets, "--positions", "original", *options_of(ladders))
    rows = by_ladder(values(rows, "kl"))
    return {key: (max(value, 1e-9), error) for key, (value, error) in rows.items()}


def pass_keys(experiment, words):
    options = ["--depth", "10%,50%,90%", *options_of(ASKED)]
    draws = experiment.quick(4, 12)
    return by_ladder(experiment.pass_keys(["h2o:sinks=4"], [32, 64, 128, 256], words, draws, *options))


def of_model(experiment, directory):
    experiment.model = directory
    name = name_of_model(directory)
    found = closed_loop(experiment)
    written, ladders, budgets = choices(experiment)
    policies = [policy.split(":")[0] for policy in written]
    lines = []
    for budget in map(str, budgets):
        own = {key: value for key, (value, _) in found.items() if key[2] == budget}
        exact = {key: value for key, value in own.items() if key[1] == "16"}
        best, plain = min(own, key=own.get), min(exact, key=exact.get)
        # How much is chosen by either: the worst of good choices by the best, all else the best.
        by_policy = max(min(own[policy, ladder, budget] for ladder in ladders) for policy in policies) / own[best]
        of_ladders = [min(own[policy, ladder, budget] for policy in policies) for ladder in ladders if ladder != "2"]
        lines.append([budget, figure(found[plain]), f"`{plain[0]}`", figure(found[best]), f"`{best[0]}`, `{best[1]}`",
                      f"{by_policy:.1f}", f"{max(of_ladders) / own[best]:.1f}"])  # fmt: skip
    header = ["bytes of", "16 bit: least KL", "by", "any: least KL", "by", "worst policy, times", "worst ladder but 2, times"]
    experiment.section(f"## {name}: which ladder\n\n" + table(header, lines))
    policy = policies[0]
    rows = [
        [f"`{ladder}`", *(figure(found[policy, ladder, str(budget)]) for budget in budgets)] for ladder in ladders
    ]
    experiment.section(f"KL under `{written[0]}`:\n\n" + table(["ladder", *map(str, budgets)], rows))
    asked = pass_keys(experiment, 100 if "small" in name else 200)
    rows = [[f"`{ladder}`", *(f"{asked['h2o', ladder, str(budget)][0]:.2f}" for budget in (32, 64, 128, 256))]
            for ladder in ASKED]  # fmt: skip
    full = asked["full", "16", "all"][0]
    experiment.section(
        f"Pass key, query-agnostic, `h2o:sinks=4`; the full cache answers {full:.0%}:\n\n"
        + table(["ladder", "32", "64", "128", "256"], rows)
    )
    return codes_alone(Trace(experiment.capture(512)))


def ladders():
    experiment = Experiment(__doc__, models=True)
    errors = [of_model(experiment, directory) for directory in experiment.models]
    rows = [
        [name, block, "yes" if turned else "no", *(f"{own[name, block, turned]:.4f}" for own in errors)]
        for name, _, _ in WAYS
        for block in (32, 64)
        for turned in (True, False)
    ]
    experiment.section(
        "## Codes alone\n\nEvery token in 4 bits where nothing else is said, nobody gone: the error of attention's output "
        "relative to its size, 512 tokens of the first text, up to six layers without a window. Blocks of 64 channels "
        "take a tenth fewer bytes.\n\n"
        + table(["coded", "block", "butterflies", *map(name_of_model, experiment.models)], rows)
    )
    experiment.write("Which ladder, at which bytes", QUESTION)


main(ladders)
