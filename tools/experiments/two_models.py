#!/usr/bin/env python3
"""What one model says, asked of another: KL, sinks, pass key, and which figure of a replay predicts."""

import json
import pathlib

from experiment import Experiment, figure, main, name_of_policy, table, values

QUESTION = """
Most of what is known of policies was measured on one model. Here several models answer the same questions, by the same
commands. Budgets are of the layers that see everything: a layer with a window keeps its window, whatever the policy.
KL is to the model's own full cache, in nats.
"""
POLICIES = ["window", "sink", "lru", "h2o", "streaming_h2o", "tova", "snapkv", "a2sf", "h2o_mean", "roco"]
LENGTHS = (100, 200, 300)  # words of a pass key's text


def ranks(numbers):
    """1 is the least; equal numbers share the mean of their places."""
    order = sorted(numbers)
    return [order.index(number) + (order.count(number) + 1) / 2 for number in numbers]


def spearman(one, other):
    one, other = ranks(one), ranks(other)
    mean = (len(one) + 1) / 2
    both = sum((a - mean) * (b - mean) for a, b in zip(one, other))
    alone = [sum((a - mean) ** 2 for a in own) for own in (one, other)]
    return both / (alone[0] * alone[1]) ** 0.5 if all(alone) else float("nan")


class Model:
    """All that is asked of one model."""

    def __init__(self, experiment, directory, budgets):
        experiment.model, self.name = directory, f"`{pathlib.Path(directory).name}`"
        self.kl = values(experiment.eval(POLICIES, budgets), "kl")
        streamed = ["--prefill", "stream", "--span", "all", "--positions", "cache"]
        few = experiment.quick(1024, 2560)
        counts = [f"sink:sinks={count}" for count in (0, 1, 4)]
        self.sinks = values(experiment.eval(counts, [256], *streamed, tokens=min(few, experiment.tokens)), "kl")
        self.fidelity = json.loads((self.predict(experiment, budgets) / "fidelity.json").read_text())
        self.words, self.answers = self.ask(experiment, budgets)

    def predict(self, experiment, budgets):
        tokens = experiment.tokens
        return experiment.kvlab(
            ["fidelity"], "--model", experiment.model, "--text", *experiment.arguments.text, "--max-tokens", tokens,
            "--prompt-tokens", tokens // 5, "--policy", ",".join(POLICIES), "--budget", ",".join(map(str, budgets)),
        )  # fmt: skip

    def ask(self, experiment, budgets):
        """At the shortest length where the full cache is right in 80% or more, or the longest."""
        for words in LENGTHS:
            alone = self.right(experiment, words, ["full"], budgets[:1])
            if alone["full", "", "all"][0] >= 0.8:
                break
        return words, self.right(experiment, words, POLICIES, budgets)

    @staticmethod
    def right(experiment, words, policies, budgets):
        rows = experiment.kvlab(
            ["task", "passkey"], "--model", experiment.model, "--words", words, "--depth", "10%,50%,90%", "--draws",
            experiment.quick(4, 12), "--policy", ",".join(policies), "--budget", ",".join(map(str, budgets)),
            "--query-agnostic", table="task.csv",
        )  # fmt: skip
        rows = [row | {"stderr": ""} for row in rows if row["words"] == row["depth"] == "all"]
        return values(rows, "exact_match")


def best(found, budget, least):
    own = {key[:2]: value for key, (value, _) in found.items() if key[2] == str(budget)}
    extreme = (min if least else max)(own.values())
    first = [name for name, value in own.items() if value == extreme]
    return f"{name_of_policy(first[0][0], '')} ({extreme:.3g})" if len(first) == 1 else f"{len(first)} policies ({extreme:.3g})"


def side_by_side(models, budgets, found_of, error=True):
    """A line for each policy, a column for each model and budget."""
    names = list(dict.fromkeys(key[:2] for key in found_of(models[0]) if key[2] != "all"))
    header = ["policy", *(f"{model.name} {budget}" for model in models for budget in budgets)]
    cell = figure if error else (lambda pair: f"{pair[0]:.2f}")
    rows = [
        [f"`{name[0]}`", *(cell(found_of(model)[(*name, str(budget))]) for model in models for budget in budgets)]
        for name in names
    ]
    return table(header, rows)


def findings(models, budgets):
    """One line a question, one column a model, and whether they agree."""
    lines = []
    for budget in budgets:
        names = [key for key in models[0].kl if key[2] == str(budget)]
        orders = [[model.kl[name][0] for name in names] for model in models]
        agree = min(spearman(orders[0], order) for order in orders[1:])
        lines.append([f"least KL at {budget}", *(best(model.kl, budget, True) for model in models),
                      f"orders: ρ {agree:.2f}"])  # fmt: skip
    for budget in budgets:
        names = [key for key in models[0].answers if key[2] == str(budget)]
        orders = [[model.answers[name][0] for name in names] for model in models]
        agree = min(spearman(orders[0], order) for order in orders[1:])
        lines.append([f"most pass keys at {budget}", *(best(model.answers, budget, False) for model in models),
                      f"orders: ρ {agree:.2f}"])  # fmt: skip
    kl = [{key[1].split(":")[0]: value for key, (value, _) in model.sinks.items() if key[0] == "sink"} for model in models]
    gains = [own["sinks=0"] / own["sinks=4"] for own in kl]
    lines.append(["KL without a sink, times that with 4", *(f"{gain:.1f}" for gain in gains),
                  "yes" if min(gains) > 1.5 or max(gains) < 1.5 else "no"])  # fmt: skip
    ones = [own["sinks=1"] / own["sinks=4"] for own in kl]
    lines.append(["KL with one sink, times that with 4", *(f"{one:.2f}" for one in ones),
                  "yes" if max(ones) < 1.1 or min(ones) > 1.1 else "no"])  # fmt: skip
    means = [
        {name: sum(own["within"].values()) / len(own["within"]) for name, own in model.fidelity["metrics"].items()}
        for model in models
    ]
    predict = [max(own, key=own.get) for own in means]
    lines.append(["figure of a replay with the highest mean ρ",
                  *(f"`{name}` ({own[name]:.2f})" for name, own in zip(predict, means)),
                  "yes" if len(set(predict)) == 1 else "no"])  # fmt: skip
    return table(["question", *(model.name for model in models), "the same?"], lines)


def predictors(models, budgets):
    rows = []
    for metric in models[0].fidelity["metrics"]:
        own = [model.fidelity["metrics"][metric] for model in models]
        rows.append([f"`{metric}`", *(f"{each['within'][str(budget)]:.2f}" for each in own for budget in budgets)])
    header = ["figure", *(f"{model.name} {budget}" for model in models for budget in budgets)]
    return table(header, rows)


def two_models():
    experiment = Experiment(__doc__, models=True)
    budgets = experiment.quick([64, 256], [64, 256])
    models = [Model(experiment, directory, budgets) for directory in experiment.models]
    lengths = ", ".join(f"{model.name} {model.words} words, of which its full cache answers "
                        f"{model.answers['full', '', 'all'][0]:.0%}" for model in models)  # fmt: skip
    experiment.section("## What holds on each\n\n" + findings(models, budgets))
    experiment.section("## KL\n\n" + side_by_side(models, budgets, lambda model: model.kl))
    experiment.section(
        f"## Pass key, query-agnostic\n\nThe share of right answers: {lengths}.\n\n"
        + side_by_side(models, budgets, lambda model: model.answers, error=False)
    )
    experiment.section(
        "## Which figure of a replay predicts\n\nSpearman's ρ between a figure and the closed loop's KL, over the policies "
        "of a budget.\n\n" + predictors(models, budgets)
    )
    experiment.write("Two models", QUESTION)


main(two_models)
