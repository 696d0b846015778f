#!/usr/bin/env python3
"""The leaderboard: every registered policy at equal memory, by KL and by task accuracy (docs/results/leaderboard.md).

Also writes leaderboard.csv beside the page, from which every number of the page comes.
"""

import concurrent.futures
import csv
import json
import math
import os
import pathlib

from experiment import Experiment, Refused, checkout_path, main, name_of_model, spearman, table, tier_plan_of

QUESTION = """
This page ranks every registered policy, with its defaults, at equal memory and by two criteria. KL (in nats) says how
far predictions move from those of the full cache; lower is better. Task accuracy is the share of right answers to
questions that come after the eviction, pooled over tasks and lengths; higher is better.

Memory is a share of the bytes of the full cache in 16 bit. In 16 bit, a budget is that share of the tokens. Quantized,
the same bytes hold more tokens. Policies with cache positions are ranked in 16 bit alone, because quantized keys cannot
get new positions. `snapkv` and `nacl` would keep all decoded tokens; for KL they evict as other policies do
(`once=no`). Budgets apply to the layers without a sliding window; a layer with a window keeps its window under every
policy.

**Bold** is the best of a column. `=` marks a policy whose KL does not differ significantly from it, by the paired 95%
interval of `kvlab eval` over all texts. Brackets are 95% intervals: of KL, the interval of `kvlab eval`; of accuracy,
Clopper and Pearson's. Every number is in `leaderboard.csv`, with the command that measured it.
"""
COLUMNS = ["model", "policy", "memory", "format", "metric", "value", "low", "high", "count", "command"]
# Name on the page, and words of the command. A task that the full cache answers in fewer than 80% is left out.
TASKS = {
    "pass key": ["passkey"],
    "needle": ["needle", "--kind", "single"],
    "one needle of four": ["needle", "--kind", "multi-key"],
}
# The policies of the table that shows which metric predicts KL.
FEW = "window,sink,lru,h2o,streaming_h2o,tova,snapkv:once=no:smooth=0,a2sf,h2o_mean,roco"


def clopper_pearson(right, count):
    """The 95% interval of a share, (low, high)."""

    def at_most(k, p):  # probability of k or fewer right answers
        return sum(math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in range(k + 1))

    def where(holds):  # the end of [0, p] in which `holds`, by bisection
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    low = where(lambda p: 1 - at_most(right - 1, p) < 0.025) if right else 0.0
    high = where(lambda p: at_most(right, p) > 0.025) if right < count else 1.0
    return low, high


class Board:
    """All results of one model."""

    def __init__(self, experiment, directory):
        experiment.model, self.experiment = directory, experiment
        self.name = pathlib.Path(directory).name
        self.model = checkout_path(directory)
        self.texts = " ".join(map(checkout_path, experiment.arguments.text))
        self.lines = []  # of the CSV, as dictionaries
        self.ties = {}  # {(memory, format): names of policies that do not differ significantly from the best}
        memory = experiment.quick(["12%", "50%"], ["6%", "12%", "25%", "50%"])
        self.memory, self.plans = memory, [tiers_of(word) for word in experiment.arguments.tiers]
        self.decode, self.answer, self.refused = policies_of(experiment)
        with concurrent.futures.ThreadPoolExecutor(experiment.arguments.jobs) as pool:
            losses = [pool.submit(self.kl, share, plan) for plan in self.plans for share in memory]
            self.tasks = [task for task, share in zip(TASKS, pool.map(self.full_accuracy, TASKS.values())) if share >= 0.8]
            answers = [pool.submit(self.accuracy, task, share, plan) for task in self.tasks for share in memory for plan in self.plans]
            for job in losses + answers:
                job.result()
        self.pool_tasks()

    def runnable(self, policies, plan):
        """The policies that run in a format. Quantized keys cannot get new positions, so they need original positions."""
        moves = {policy["name"] for policy in self.experiment.policies() if policy["positions"] == "cache"}
        return [name for name in policies if plan == "16" or name.partition(":")[0] not in moves]

    def add(self, policy, memory, tiers, metric, value, low, high, count, command):
        row = [self.name, policy, memory, tiers, metric, value, low, high, count, command]
        self.lines.append(dict(zip(COLUMNS, row)))

    def kl(self, share, plan):
        """One evaluation of all policies, so that their differences are paired."""
        tokens = self.experiment.tokens
        out = self.experiment.kvlab(
            ["eval"], "--model", self.experiment.model, "--text", *self.experiment.arguments.text, "--window", tokens,
            "--max-tokens", 2 * tokens, "--prompt-tokens", tokens // 5, "--policy", ",".join(self.runnable(self.decode, plan)), "--budget", share,
            "--tiers", plan,
        )  # fmt: skip
        found = json.loads((out / "eval.json").read_text())
        command = f"kvlab eval --model {self.model} --text {self.texts} --window {tokens} --max-tokens {2 * tokens} --prompt-tokens {tokens // 5}"
        names = {}
        for pair in found["pairs"]:
            if pair["b_policy"] != "full":
                continue
            name, tiers = tier_plan_of(pair["a_policy"])
            names[pair["a"]] = name
            own = f"{command} --policy {name} --budget {share} --tiers {tiers}"
            kl = pair["kl"]
            self.add(name, share, tiers, "kl", kl["mean"], kl["low"], kl["high"], found["tokens"], own)
            peak = found["configurations"][pair["a"]]["kv_bytes_peak"]
            self.add(name, share, tiers, "kv_bytes_peak", peak, None, None, 1, own)
        lowest = min(names, key=lambda index: found["configurations"][index]["kl"])
        differs = {pair[end] for pair in found["pairs"] if pair["kl"]["significantly_different"]
                   for here, end in (("a", "b"), ("b", "a")) if pair[here] == lowest}  # fmt: skip
        self.ties[share, plan] = {name for index, name in names.items() if index != lowest and index not in differs}

    def task(self, words, policies, budget, plan):
        samples = self.experiment.quick(2, 12)
        requested = ["--words", self.experiment.quick("40", "250,500"), "--depth", "10%,50%,90%", "--samples", samples]
        rows = self.experiment.kvlab(
            ["task", *words], "--model", self.experiment.model, *requested, "--policy", ",".join(policies), "--budget",
            budget, "--tiers", plan, "--query-agnostic", table="task.csv",
        )  # fmt: skip
        command = " ".join(map(str, ["kvlab task", *words, f"--model {self.model}", *requested, "--query-agnostic"]))
        return [row for row in rows if row["metric"] == "exact_match" and row["words"] == row["depth"] == "all"], command

    def full_accuracy(self, words):
        rows, _ = self.task(words, ["full"], "100%", "16")
        return float(rows[0]["value"]) if not self.experiment.arguments.quick else 1

    def accuracy(self, task, share, plan):
        rows, command = self.task(TASKS[task], self.runnable(self.answer, plan), share, plan)
        for row in rows:
            if row["policy"] == "full":
                continue
            params, tiers = tier_plan_of(row["params"])
            name = f"{row['policy']}:{params}" if params else row["policy"]
            own = f"{command} --policy {name} --budget {share} --tiers {tiers}"
            count = int(row["count"])
            self.add(name, share, tiers, f"accuracy: {task}", float(row["value"]), float(row["low"]), float(row["high"]), count, own)

    def pool_tasks(self):
        """Adds the accuracy over all tasks."""
        pooled = {}
        for line in self.lines:
            if line["metric"].startswith("accuracy: "):
                pooled.setdefault((line["policy"], line["memory"], line["format"]), []).append(line)
        for key, own in pooled.items():
            count = sum(line["count"] for line in own)
            right = round(sum(line["value"] * line["count"] for line in own))
            self.add(*key, "accuracy", right / count, *clopper_pearson(right, count), count, "pooled over the tasks")

    def values(self, metric, plan):
        """Returns {policy: {memory: line}}"""
        found = {}
        for line in self.lines:
            if line["metric"] == metric and line["format"] == plan:
                found.setdefault(line["policy"], {})[line["memory"]] = line
        return found

    def section(self):
        text = [f"## `{self.name}`"]
        if self.refused:
            text.append("Not ranked: " + "; ".join(f"`{name}` ({reason})" for name, reason in self.refused.items()) + ".")
        for plan in self.plans:
            kls = self.values("kl", plan)
            order = sorted(kls, key=lambda name: sum(math.log(max(line["value"], 1e-9)) for line in kls[name].values()))
            text.append(f"### KL, {label(plan)}")
            if label(plan) == "plan":
                text.append(f"The plan of `kvlab plan`, in runs of layers: `{plan}`.")
            text.append(self.ranked(kls, order, min, self.ties))
        for plan in self.plans:
            answers = self.values("accuracy", plan)
            if answers:
                order = sorted(answers, key=lambda name: -sum(line["value"] for line in answers[name].values()))
                count = next(iter(answers[order[0]].values()))["count"]
                text += [
                    f"### Accuracy, {label(plan)}",
                    f"Share of right answers to {count} questions of {', '.join(self.tasks)}.",
                    self.ranked(answers, order, max, {}),
                ]
        return "\n\n".join(text)

    def ranked(self, found, order, best, ties):
        lines = [[f"`{name.partition(':')[0]}`"] for name in order]
        for share in self.memory:
            first = best(own[share]["value"] for own in found.values() if share in own)
            for line, name in zip(lines, order):
                cell = found[name].get(share)
                line.append(cell_text(cell, cell["value"] == first, name in ties.get((share, cell["format"]), ())) if cell else "-")
        return table(["policy", *(f"{share} of the memory" for share in self.memory)], lines)


def tiers_of(word):
    """A tier plan as text, also if it is given as @FILE of `kvlab plan`."""
    if not word.startswith("@"):
        return word
    try:
        tiers = json.loads(pathlib.Path(word[1:]).read_text())["plan"]["tiers"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        tiers = None
    if not isinstance(tiers, str):
        raise Refused(f"--tiers: {word[1:]} is not a file of `kvlab plan`; give a tier plan or @FILE of `kvlab plan`")
    return tiers


def label(plan):
    return "16 bit" if plan == "16" else "plan" if "x" in plan else f"format `{plan}`"


def number(value):
    return f"{value:.3g}" if value >= 1e-3 else f"{value:.1g}"


def cell_text(line, is_best, is_tied):
    text = f"**{number(line['value'])}**" if is_best else number(line["value"])
    if line["low"] is not None:
        text += f" ({number(max(line['low'], 0))} to {number(line['high'])})"
    return text + " =" * (is_tied and not is_best)


def policies_of(experiment):
    """Returns the policies for KL, with settings under which they evict decoded tokens too; the policies for tasks; and
    {policy: why the engine refuses it}."""
    decode, answer, refused = [], [], {}
    for policy in experiment.policies():
        if not policy["evicts"] or not policy["decodes"]:
            continue
        reason = experiment.refusal(policy["name"])
        if reason is not None:
            refused[policy["name"]] = reason.removeprefix("kvlab eval: ")
            continue
        answer.append(policy["name"])
        once = "once" in policy["modifiers"]
        smooth = any("smooth" in modifier for modifier in policy["modifiers"])
        decode.append(":".join([policy["name"]] + ["once=no"] * once + ["smooth=0"] * smooth))
    return decode, answer, refused


def agreement(boards):
    """Rank correlations between the criteria on each model, and between models."""
    rows = []
    for plan in boards[0].plans:
        for share in boards[0].memory:
            orders = {}
            for board in boards:
                for metric, sign in (("kl", 1), ("accuracy", -1)):
                    orders[board.name, metric] = {
                        name.partition(":")[0]: sign * own[share]["value"] for name, own in board.values(metric, plan).items() if share in own
                    }
            row = [label(plan), share]
            for board in boards:
                row.append(correlation(orders[board.name, "kl"], orders[board.name, "accuracy"]))
            for board in boards[1:]:
                row.append(correlation(orders[boards[0].name, "kl"], orders[board.name, "kl"]))
            rows.append(row)
    header = ["format", "memory", *(f"KL and accuracy on `{board.name}`" for board in boards),
              *(f"KL on `{boards[0].name}` and on `{board.name}`" for board in boards[1:])]  # fmt: skip
    return table(header, rows)


def correlation(one, other):
    names = [name for name in one if name in other]
    return f"{spearman([one[name] for name in names], [other[name] for name in names]):.2f}" if len(names) > 2 else "-"


def predictors(experiment):
    """A table of the metrics of a replay: the rank correlation of each with KL."""
    tokens, columns = experiment.tokens, {}
    for directory in experiment.models:
        out = experiment.kvlab(
            ["fidelity"], "--model", directory, "--text", *experiment.arguments.text, "--max-tokens", tokens, "--prompt-tokens",
            tokens // 5, "--policy", FEW, "--budget", "12%,25%",
        )  # fmt: skip
        for name, own in json.loads((out / "fidelity.json").read_text())["metrics"].items():
            for budget, value in own["within"].items():
                columns.setdefault((name_of_model(directory), budget), {})[name] = value
    names = list(dict.fromkeys(name for own in columns.values() for name in own))
    header = ["metric", *(f"{model} {budget}" for model, budget in columns)]
    rows = []
    for name in names:
        values = [own.get(name) for own in columns.values()]
        rows.append([f"`{name}`", *("-" if value is None else f"{value:.2f}" for value in values)])
    return table(header, rows)


def add_arguments(parser):
    parser.add_argument("--tiers", nargs="+", default=["16"], help="formats; each is ranked separately (default: 16)")
    parser.add_argument("--jobs", type=int, default=1, help="commands that run at the same time (default: 1)")


def leaderboard():
    experiment = Experiment(__doc__, models=True, arguments=add_arguments)
    if len(experiment.arguments.text) < 2 and not experiment.arguments.quick:
        raise Refused("--text: give at least two, because intervals need several texts")
    boards = [Board(experiment, directory) for directory in experiment.models]
    for board in boards:
        experiment.section(board.section())
    experiment.section("## Do the criteria, and the models, agree?\n\nRank correlations (Spearman) over all policies.\n\n" + agreement(boards))
    experiment.section(
        "## Which metric of a replay predicts KL\n\nSpearman's ρ between a metric and the KL of the end-to-end evaluation, over ten "
        'policies at each budget. "-": the model has no such metric.\n\n' + predictors(experiment)
    )
    experiment.write("Leaderboard", QUESTION)
    with open(pathlib.Path(experiment.arguments.out).with_suffix(".csv"), "w", newline="") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator=os.linesep)
        lines.writeheader()
        lines.writerows(line for board in boards for line in board.lines)


main(leaderboard)
