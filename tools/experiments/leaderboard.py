#!/usr/bin/env python3
"""The leaderboard: every registered policy by KL and by pass key (docs/results/leaderboard.md)."""

import math

from experiment import Experiment, figure, main, name_of_policy, ranking, table, values

QUESTION = """
Every registered policy with its defaults, at five budgets, judged twice: how far do its predictions move from the full
cache's (KL, in nats), and does the model still find a number in the text (pass key)? The two need not agree: choose by
what you need. Policies that the engine cannot run by themselves are below, with its reason.
"""


def by_kl(experiment, policies, budgets):
    rows = experiment.eval(policies, budgets)
    found = values(rows, "kl")
    names = list(dict.fromkeys(key[:2] for key in found if key[2] != "all"))
    least = {budget: min(found[(*name, str(budget))][0] for name in names) for budget in budgets}

    def times_the_least(name):
        logs = [math.log(max(found[(*name, str(budget))][0], 1e-9) / max(least[budget], 1e-9)) for budget in budgets]
        return math.exp(sum(logs) / len(logs))

    names.sort(key=times_the_least)
    ordered = {(*name, str(budget)): found[(*name, str(budget))] for name in names for budget in budgets}
    lines = [[name_of_policy(*name), f"{times_the_least(name):.2f}"] for name in names]
    overall = table(["policy", "times the least"], lines)
    experiment.section("## By KL\n\nThe best of all budgets first.\n\n" + ranking(ordered, budgets))
    experiment.section("KL as a multiple of the least at its budget, geometric mean:\n\n" + overall)


def by_pass_key(experiment, policies, budgets):
    words, depths = experiment.quick("150", "250,500"), experiment.quick("50%", "10%,50%,90%")
    rows = experiment.kvlab(
        ["task", "passkey"], "--model", experiment.arguments.model, "--words", words, "--depth", depths, "--draws",
        experiment.quick(2, 4), "--policy", ",".join(policies), "--budget", ",".join(map(str, budgets)),
        table="task.csv",
    )  # fmt: skip
    rows = [row | {"stderr": ""} for row in rows if row["words"] == row["depth"] == "all"]
    for mode in ("query-aware", "query-agnostic"):
        asked = [row for row in rows if row["mode"] == mode]
        share, likelihood = values(asked, "exact_match"), values(asked, "log_likelihood")
        full = figure(share["full", "", "all"], 2), figure(likelihood["full", "", "all"])
        experiment.section(
            f"## Pass key, {mode}\n\nThe share of right answers; the full cache has {full[0]}.\n\n"
            + ranking(share, budgets, best=max)
            + f"\n\nThe mean log-likelihood of the right answer, nats; the full cache has {full[1]}.\n\n"
            + ranking(likelihood, budgets, best=max)
        )


def leaderboard():
    experiment = Experiment(__doc__)
    budgets = experiment.quick([64, 256], [64, 128, 256, 512, 1024])
    names = [policy["name"] for policy in experiment.policies() if policy["evicts"]]
    refused = {name: why for name in names if (why := experiment.refusal(name))}
    policies = [name for name in names if name not in refused]
    by_kl(experiment, policies, budgets)
    by_pass_key(experiment, policies, experiment.quick([64, 128], [64, 128, 256, 512]))
    if refused:
        reasons = [[f"`{name}`", why] for name, why in refused.items()]
        experiment.section("## Not run\n\n" + table(["policy", "why"], reasons))
    experiment.write("Leaderboard", QUESTION)


main(leaderboard)
