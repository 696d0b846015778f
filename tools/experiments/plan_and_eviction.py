#!/usr/bin/env python3
"""Compares, at equal bytes: eviction alone, tiers by rank, formats by layer, and formats by layer with eviction."""

from experiment import Experiment, Refused, main, name_of_model, number_with_error, table, tier_plan_of, values

QUESTION = """
This page compares ways of saving cache memory at equal bytes. With a quarter of the bytes of the full cache, a cache
can hold a quarter of the tokens in 16 bit, four fifths of them in 4 bits with scales, or fewer than half of them in 8
bits. The ways are:

- **eviction**: a policy evicts tokens; the others stay in 16 bit;
- **tiers by rank**: a policy evicts fewer tokens, and stores the kept tokens of lower rank in fewer bits;
- **formats by layer**: no token is evicted; `kvlab plan` chooses a format for the keys and the values of each layer;
- **both**: formats by layer, and a policy evicts the tokens that do not fit in these formats.

Memory is a share of the bytes of the full cache in 16 bit at the end of the text. Formats by layer alone need at least
3 bits for each element, which is 19% of the memory. Tiers by rank cannot be combined with formats by layer. Plans are
computed from a trace of the first text, with residual error as the metric. KL is measured on the other texts, relative
to the full cache in 16 bit, in nats, with its standard error.
"""
MEMORY = ["6%", "12%", "25%", "50%"]
POLICIES = ["a2sf", "h2o_mean"]
BY_RANK = ["16:16t,4:100%", "8:25%,4:50%,k4v2:25%"]
BITS = [3.5, 5, 6, 9]  # of plans that are combined with eviction


def plan_of(experiment, trace, bits):
    """The tier plan of `kvlab plan`, in formats that kvlab also has on CUDA."""
    return experiment.plan(trace, f"{bits}bits", "cuda", "--metric", "residual_error")["plan"]["tiers"]


def measured(experiment, policies, memory, tier_plans):
    """Returns {(policy, tier plan, memory): (KL, standard error)} on the texts other than the first."""
    tiers = [word for tier_plan in tier_plans for word in ("--tiers", tier_plan)]
    rows = experiment.eval(policies, memory, *tiers, "--positions", "original", texts=experiment.arguments.text[1:])
    return {(policy, tier_plan_of(params)[1], budget): value for (policy, params, budget), value in values(rows, "kl").items()}


def lowest(found, memory, tier_plans):
    """Returns the lowest KL at `memory` as text, with its policy and its tier plan."""
    own = {key: value for key, value in found.items() if key[2] == memory and key[1] in tier_plans}
    if not own:
        return "-", None
    (policy, tier_plan, _), (kl, error) = min(own.items(), key=lambda item: item[1][0])
    return f"{number_with_error((kl, error))} (`{policy}`{tier_plans[tier_plan]})", kl


def compare(experiment, directory):
    """The table of one model."""
    experiment.model = directory
    memory, policies = experiment.quick((MEMORY[2:], POLICIES[:1]), (MEMORY, POLICIES))
    trace = experiment.capture(experiment.quick(256, 1024))
    combined = {plan_of(experiment, trace, bits): f", plan of {bits} bits" for bits in experiment.quick(BITS[1:2], BITS)}
    by_rank = {tier_plan: f", `{tier_plan}`" for tier_plan in BY_RANK}
    found = measured(experiment, policies, memory, ["16", *by_rank, *combined])
    lines = []
    for share in memory:
        bits = float(share.removesuffix("%")) / 100 * 16
        alone = ("-", None)
        if bits >= 3:
            tier_plan = plan_of(experiment, trace, bits)
            kl = measured(experiment, ["full"], ["100%"], [tier_plan])
            (value,) = [value for key, value in kl.items() if key[1] == tier_plan]
            alone = number_with_error(value), value[0]
        cells = [lowest(found, share, {"16": ""}), lowest(found, share, by_rank), alone, lowest(found, share, combined)]
        best = min(kl for _, kl in cells if kl is not None)
        lines.append([share, *(f"**{text}**" if kl == best else text for text, kl in cells)])
    return table(["memory", "eviction", "tiers by rank", "formats by layer", "both"], lines)


def plan_and_eviction():
    experiment = Experiment(__doc__, models=True)
    if len(experiment.arguments.text) < 2:
        raise Refused("--text: give at least two, one to plan from and others to measure")
    for directory in experiment.models:
        experiment.section(f"## {name_of_model(directory)}\n\n" + compare(experiment, directory))
    experiment.write("Eviction, tiers and plans at equal bytes", QUESTION)


main(plan_and_eviction)
