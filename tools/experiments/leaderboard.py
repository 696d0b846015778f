#!/usr/bin/env python3
"""The leaderboard: every registered policy by KL and by pass key (docs/results/leaderboard.md)."""

import math
from types import SimpleNamespace

from experiment import Experiment, Refused, figure, main, name_of_policy, ranking, table, values

QUESTION = """
Every registered policy with its defaults, at several budgets, judged twice: how far do its predictions move from the
full cache's (KL, in nats), and does the model still find a number in the text (pass key)? The two need not agree.

A policy that compresses prompts (`once`) keeps all that it decodes: its memory grows. Such lines stand apart, beside
the same policy without. A policy that reads columns which no engine computes stands in the replay alone, at the end.
"""


def is_once(name):
    return "once" in name[1].split(":")


def by_kl(experiment, rows, budgets):
    found = values(rows, "kl")
    every = list(dict.fromkeys(key[:2] for key in found if key[2] != "all"))
    names = [name for name in every if not is_once(name)]
    least = {budget: min(found[(*name, str(budget))][0] for name in names) for budget in budgets}

    def times_the_least(name):
        logs = [math.log(max(found[(*name, str(budget))][0], 1e-9) / max(least[budget], 1e-9)) for budget in budgets]
        return math.exp(sum(logs) / len(logs))

    def ranked(names):
        names = sorted(names, key=times_the_least)
        ordered = {(*name, str(budget)): found[(*name, str(budget))] for name in names for budget in budgets}
        return ranking(ordered, budgets), [[name_of_policy(*name), f"{times_the_least(name):.2f}"] for name in names]

    kl, overall = ranked(names)
    experiment.section("## By KL\n\nThe best of all budgets first.\n\n" + kl)
    experiment.section(
        "KL as a multiple of the least at its budget, geometric mean:\n\n"
        + table(["policy", "times the least"], overall)
    )
    if len(names) < len(every):
        experiment.section("Prompts compressed once, all decoded tokens kept:\n\n" + ranked(set(every) - set(names))[0])


def by_pass_key(experiment, groups, budgets):
    words, depths = experiment.quick("150", "250,500"), experiment.quick("50%", "10%,50%,90%")
    rows = [
        row | {"stderr": ""}
        for device, policies in groups.items()
        for row in experiment.kvlab(
            ["task", "passkey"], "--model", experiment.arguments.model, "--words", words, "--depth", depths, "--draws",
            experiment.quick(2, 4), "--policy", ",".join(policies), "--budget", ",".join(map(str, budgets)),
            "--query-aware", "--query-agnostic", table="task.csv", device=device,
        )  # fmt: skip
        if row["words"] == row["depth"] == "all"
    ]
    for mode in ("query-aware", "query-agnostic"):
        asked = [row for row in rows if row["mode"] == mode]
        share = values(asked, "exact_match")
        full = figure(share["full", "", "all"], 2)
        if share["full", "", "all"][0] == 0:
            experiment.section(f"## Pass key, {mode}\n\nThe full cache finds none: there is nothing to lose.")
            continue
        experiment.section(
            f"## Pass key, {mode}\n\nThe share of right answers; the full cache has {full}.\n\n"
            + ranking(share, budgets, best=max)
        )


def by_replay(experiment, policies, columns, budgets):
    """All policies over a trace of the first text; returns why some could not be: {policy: reason}."""
    trace = experiment.capture(experiment.tokens)
    refused = {}
    for name, needed in columns.items():
        try:
            for column in needed:
                experiment.add_column(trace, column)
        except Refused as error:
            refused[name] = str(error)
    run = experiment.kvlab(
        ["replay"], "--trace", trace, "--policy", ",".join(name for name in policies if name not in refused),
        "--budget", ",".join(map(str, budgets)), "--no-references", "--model", experiment.arguments.model,
    )  # fmt: skip
    rows = [row for row in experiment.rows(run / "results.csv") if row["layer"] == row["head"] == "all"]
    found = {key: value for key, value in values(rows, "residual_error").items() if not is_once(key[:2])}
    experiment.section(
        "## By replay\n\nThe residual error, which orders policies nearly as KL does, over the first text alone, every"
        " policy beside every other.\n\n" + ranking(found, budgets)
    )
    return refused


def roster(experiment):
    """What is run: the policies in order, those of each device, and columns that only a trace brings."""
    every = [policy for policy in experiment.policies() if policy["evicts"]]
    chosen = SimpleNamespace(names=[], groups={}, columns={})
    for policy in every:
        names = [policy["name"]]
        if "once" in policy["modifiers"]:  # and without what it brings of its own
            names.append(":".join(names + ["once=no"] + ["smooth=0"] * any("smooth" in m for m in policy["modifiers"])))
        chosen.names += names
        if not policy["decodes"]:
            chosen.columns[policy["name"]] = policy["columns"]
            continue
        for name in names:
            device = None if experiment.refusal(name) is None else "cpu"
            chosen.groups.setdefault(device, []).append(name)
    return chosen


def leaderboard():
    experiment = Experiment(__doc__)
    budgets = experiment.quick([64, 256], [64, 128, 256, 512, 1024])
    chosen = roster(experiment)
    rows = [row for device, names in chosen.groups.items() for row in experiment.eval(names, budgets, device=device)]
    by_kl(experiment, rows, budgets)
    by_pass_key(experiment, chosen.groups, experiment.quick([64, 128], [64, 128, 256, 512]))
    refused = by_replay(experiment, chosen.names, chosen.columns, budgets)
    if "cpu" in chosen.groups and experiment.arguments.device != "cpu":
        names = ", ".join(f"`{name}`" for name in chosen.groups["cpu"])
        experiment.section(f"The device refuses {names}; they ran on the CPU.")
    if refused:
        reasons = [[f"`{name}`", why] for name, why in refused.items()]
        experiment.section("## Not run\n\n" + table(["policy", "why"], reasons))
    experiment.write("Leaderboard", QUESTION)


main(leaderboard)
