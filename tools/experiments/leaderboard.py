#!/usr/bin/env python3
"""The leaderboard: every registered policy by KL and by pass key, on several models (docs/results/leaderboard.md)."""

import json
import math

from experiment import Experiment, main, name_of_model, ranking, table, values

QUESTION = """
This page ranks every registered policy, with its defaults, at several budgets and by two criteria. KL (in nats) says
how far predictions move from those of the full cache. The pass key says whether the model still finds a number in the
text when the question comes after the eviction. The two criteria may rank policies differently, and so may two models.
The last sections compare them.

A policy that compresses prompts (`once`) keeps all tokens that it decodes, so its memory grows. Such policies are
listed separately, and the same policy without `once` is in the main table. If the prompt fits into the budget, such a
policy evicts nothing, so its KL is 0. Budgets apply to the layers without a sliding window; a layer with a window keeps
its window under every policy.
"""
LENGTHS = (100, 200, 300, 400)  # words of a pass key's text
# For the table of which metric predicts.
FEW = "window,sink,lru,h2o,streaming_h2o,tova,snapkv:once=no:smooth=0,a2sf,h2o_mean,roco"


def is_once(name):
    return "once" in name[1].split(":")


def ranks(numbers):
    """Ranks of the numbers; 1 is the lowest. Equal numbers share the mean of their ranks."""
    order = sorted(numbers)
    return [order.index(number) + (order.count(number) + 1) / 2 for number in numbers]


def spearman(one, other):
    one, other = ranks(one), ranks(other)
    mean = (len(one) + 1) / 2
    both = sum((a - mean) * (b - mean) for a, b in zip(one, other))
    alone = [sum((a - mean) ** 2 for a in own) for own in (one, other)]
    return both / (alone[0] * alone[1]) ** 0.5 if all(alone) else float("nan")


class Board:
    """All results of one model."""

    def __init__(self, experiment, directory):
        experiment.model, self.experiment = directory, experiment
        self.name = name_of_model(directory)
        self.budgets = experiment.quick([64, 256], [64, 128, 256, 512, 1024])
        self.requested = experiment.quick([64, 128], [64, 128, 256])
        self.groups = policies_by_device(experiment)
        rows = [row for device, names in self.groups.items() for row in experiment.eval(names, self.budgets, device=device)]
        self.kl = values(rows, "kl")
        self.by_kl()
        self.by_pass_key()
        streamed = ["--prefill", "stream", "--queries", "all", "--positions", "cache"]
        sinks = experiment.eval([f"sink:sinks={count}" for count in (0, 1, 4)], [256], *streamed, tokens=min(1024, experiment.tokens))
        self.sinks = {key[1].split(":")[0]: value for key, (value, _) in values(sinks, "kl").items() if key[0] == "sink"}
        self.fidelity = self.predict()

    def names(self, once):
        every = dict.fromkeys(key[:2] for key in self.kl if key[2] != "all")
        return [name for name in every if is_once(name) == once]

    def ratio_to_lowest(self, name, once):
        """The geometric mean of its KL over the lowest KL of the table, at budgets where that is not 0."""
        logs = []
        for budget in map(str, self.budgets):
            least = min(self.kl[(*other, budget)][0] for other in self.names(once))
            if least > 0:  # a policy that keeps the whole prompt has a KL of 0
                logs.append(math.log(self.kl[(*name, budget)][0] / least))
        return math.exp(sum(logs) / len(logs)) if logs else 1

    def ranked(self, once):
        names = sorted(self.names(once), key=lambda name: self.ratio_to_lowest(name, once))
        ordered = {(*name, str(budget)): self.kl[(*name, str(budget))] for name in names for budget in self.budgets}
        lines = ranking(ordered, self.budgets).replace(" ± ", "±").split("\n")
        heads = ["times the lowest |", "--- |", *(f"{self.ratio_to_lowest(name, once):.2f} |" for name in names)]
        return "\n".join(f"{line} {more}" for line, more in zip(lines, heads))

    def by_kl(self):
        self.experiment.section(f"## {self.name}: KL\n\n\"times the lowest\" is a policy's KL relative to the lowest KL at "
            "the same budget, as a geometric mean over the budgets.\nThe table is sorted by it.\n\n" + self.ranked(once=False))
        if self.names(once=True):
            self.experiment.section("Policies that compress the prompt once and keep all decoded tokens:\n\n" + self.ranked(once=True))
        if "cpu" in self.groups and self.experiment.arguments.device != "cpu":
            names = ", ".join(f"`{name}`" for name in self.groups["cpu"])
            self.experiment.section(f"The device refuses {names}; they ran on the CPU.")

    def by_pass_key(self):
        """Pass keys at the shortest length at which the full cache is right in 80% or more, or the longest length."""
        for words in LENGTHS:
            share = self.right(words, {None: ["full"]}, self.requested[:1])["full", "", "all"][0]
            if share >= 0.8:
                break
        self.answers = self.right(words, self.groups, self.requested) if share > 0 else {}
        self.experiment.section(
            f"## {self.name}: pass key\n\nThe share of right answers in texts of {words} words. The full cache "
            f"reaches {share:.2f}.\n\n" + (ranking(self.answers, self.requested, best=max) if self.answers else "")
        )

    def right(self, words, groups, budgets):
        requested = (budgets, words, self.experiment.quick(4, 8), "--depth", "10%,50%,90%")
        found = {}
        for device, policies in groups.items():
            found |= self.experiment.pass_keys(policies, *requested, device=device)
        return found

    def predict(self):
        tokens = self.experiment.tokens
        out = self.experiment.kvlab(
            ["fidelity"], "--model", self.experiment.model, "--text", *self.experiment.arguments.text, "--max-tokens", tokens,
            "--prompt-tokens", tokens // 5, "--policy", FEW, "--budget", "64,256",
        )  # fmt: skip
        metrics = json.loads((out / "fidelity.json").read_text())["metrics"]
        return {name: [own["within"][budget] for budget in ("64", "256")] for name, own in metrics.items()}


def policies_by_device(experiment):
    """The policies of each device, in order."""
    groups = {}
    for policy in experiment.policies():
        if not policy["evicts"] or not policy["decodes"]:
            continue
        names = [policy["name"]]
        if "once" in policy["modifiers"]:  # also without its default modifier
            names.append(":".join(names + ["once=no"] + ["smooth=0"] * any("smooth" in m for m in policy["modifiers"])))
        for name in names:
            groups.setdefault(None if experiment.refusal(name) is None else "cpu", []).append(name)
    return groups


def best(found, budget, least):
    own = {key[:2]: value for key, (value, _) in found.items() if key[2] == str(budget) and not is_once(key[:2])}
    extreme = (min if least else max)(own.values())
    first = [name for name, value in own.items() if value == extreme]
    return f"`{first[0][0]}` ({extreme:.3g})" if len(first) == 1 else f"{len(first)} policies ({extreme:.3g})"


def agreement(boards, found_of, budget):
    """The lowest ρ between the first model's order of policies and another's."""
    names = [key for key in found_of(boards[0]) if key[2] == str(budget) and all(key in found_of(own) for own in boards)]
    orders = [[found_of(own)[name][0] for name in names] for own in boards]
    return f"rank correlation {min(spearman(orders[0], order) for order in orders[1:]):.2f}"


def findings(boards):
    """A row for each question, a column for each model, and whether they agree."""
    lines = []
    for budget in boards[0].budgets:
        lines.append([f"lowest KL at {budget}", *(best(own.kl, budget, True) for own in boards),
                      agreement(boards, lambda own: own.kl, budget)])  # fmt: skip
    for budget in boards[0].requested if all(own.answers for own in boards) else []:
        lines.append([f"highest share of pass keys at {budget}", *(best(own.answers, budget, False) for own in boards),
                      agreement(boards, lambda own: own.answers, budget)])  # fmt: skip
    for count, what in ((0, "no sink token"), (1, "one sink token")):
        times = [own.sinks[f"sinks={count}"] / own.sinks["sinks=4"] for own in boards]
        same = "yes" if min(times) > 1.1 or max(times) < 1.1 else "no"
        lines.append([f"KL of `sink` with {what}, relative to four", *(f"{one:.2f}" for one in times), same])
    predict = [max(own.fidelity, key=lambda name: sum(own.fidelity[name])) for own in boards]
    lines.append(["metric of a replay that predicts KL best", *(f"`{name}`" for name in predict),
                  "yes" if len(set(predict)) == 1 else "no"])  # fmt: skip
    return table(["question", *(own.name for own in boards), "do they agree?"], lines)


def predictors(boards):
    """A table of metrics. `-`: the model lacks the metric (no residual error with a norm after attention)."""
    names = list(dict.fromkeys(name for own in boards for name in own.fidelity))
    header = ["metric", *(f"{own.name} {budget}" for own in boards for budget in (64, 256))]
    rows = [
        [f"`{name}`", *(f"{rho:.2f}" if rho is not None else "-" for own in boards for rho in own.fidelity.get(name, [None] * 2))]
        for name in names
    ]
    return table(header, rows)


def leaderboard():
    experiment = Experiment(__doc__, models=True)
    boards = [Board(experiment, directory) for directory in experiment.models]
    if len(boards) > 1:
        what = "the two models" if len(boards) == 2 else "the first model and the one that differs most from it"
        note = f"The rank correlation compares the orders of all policies on {what}."
        experiment.section(f"## Findings for each model\n\n{note}\n\n" + findings(boards))
    experiment.section(
        "## Which metric of a replay predicts KL\n\nSpearman's ρ between a metric and the KL of the end-to-end evaluation, over ten "
        'policies at each budget. "-": the model has no such metric.\n\n' + predictors(boards)
    )
    experiment.write("Leaderboard", QUESTION)


main(leaderboard)
