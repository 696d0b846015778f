#!/usr/bin/env python3
"""Does `tune` deploy a policy with good task accuracy?

Tunes at some budgets, then measures KL and task accuracy of every policy that was evaluated, with new questions. The
deployed policy should be within 10 points of the best pass-key share among policies whose KL is at most 20% higher than
its own.
"""

import json

from experiment import Experiment, main, name_of_policy, table, values

QUESTION = """
`kvlab tune` deploys by two criteria: KL to the full cache, and task accuracy. This page measures all policies that it
evaluated again, with questions that `tune` has not seen and over the same texts. The deployed policy should be within
10 points of the best pass-key share among policies whose KL is at most 20% higher than its own. If a policy with a
higher KL has better accuracy, the policy file has to name it.
"""
POINTS, NEAR, SEED = 0.10, 1.2, 1000


def at_budget(experiment, budget):
    """Returns a row of the table, and whether the deployed policy is within the limit."""
    texts = ["--text", *experiment.arguments.text, "--max-tokens", experiment.tokens]
    sweep = ["--policy", "a2sf,h2o,window,lru"] if experiment.arguments.quick else []
    model = ["--model", experiment.arguments.model]
    out = experiment.kvlab(
        ["tune"], *model, *texts, "--prompt-tokens", experiment.tokens // 5, "--budget", budget,
        "--samples", experiment.quick(2, 8), *sweep,
    )  # fmt: skip
    run = json.loads(out.read_text())["run"]
    evaluated = list(dict.fromkeys(entry["policy"] for entry in run["rounds"][0]["ranking"]))
    kl = values(experiment.eval(evaluated, [budget]), "kl")
    words, samples = experiment.quick(30, 250), experiment.quick(2, 20)
    shares = experiment.pass_keys(evaluated, [budget], words, samples, "--seed", SEED)
    names = {f"{key[0]}:{key[1]}".rstrip(":"): key for key in kl if key in shares and key[0] != "full"}
    criteria = run["criteria"]
    deployed = names[criteria["deployed"]]
    near = [key for key in names.values() if kl[key][0] <= NEAR * kl[deployed][0]]
    best = max(near, key=lambda key: shares[key][0])
    anywhere = max(names.values(), key=lambda key: shares[key][0])
    met = shares[deployed][0] >= shares[best][0] - POINTS
    cell = lambda key: f"{name_of_policy(*key[:2])}: {kl[key][0]:.4f}, {100 * shares[key][0]:.0f}%"  # noqa: E731
    named = criteria["task_accuracy"] or "none"
    return [budget, cell(deployed), cell(best), cell(anywhere), f"`{named}`", "yes" if met else "**no**"], criteria["why"]


def both_criteria():
    experiment = Experiment(__doc__)
    rows, reasons = [], []
    for budget in (64, 128):
        row, why = at_budget(experiment, budget)
        rows.append(row)
        reasons.append(f"- {budget}: {why}.")
    header = ["budget", "deployed: KL, pass key", f"best within {NEAR}x its KL", "best of all evaluated",
              "the policy file's best by task accuracy", "within 10 points"]  # fmt: skip
    experiment.section("## Deployed and best\n\n" + table(header, rows))
    experiment.section("## Why\n\n" + "\n".join(reasons))
    experiment.write("Task accuracy of the policies that tune deploys", QUESTION)


main(both_criteria)
