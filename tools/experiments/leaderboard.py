#!/usr/bin/env python3
"""The leaderboard: every registered policy at equal memory, by KL and by task accuracy (docs/results/leaderboard.md).

Writes a CSV beside the page, from which every number of the page comes. If the CSV is there, it is updated.
"""

import concurrent.futures
import json
import math
import pathlib
import sys

from experiment import Experiment, Refused, checkout_path, main, tier_plan_of
from leaderboard_page import ACCURACY, COLUMNS, DIFFERS, PREDICTS, RULER, SPEED, at, key_of, length_of, read_rows, write_page

# Name on the page, and words of the command. A task is left out if the full cache answers less than the share ENOUGH of
# its questions.
TASKS = {
    "pass key": ["passkey"],
    "needle": ["needle", "--kind", "single"],
    "one needle of four": ["needle", "--kind", "multi-key"],
    **{name: ["ruler", "--tasks", name] for name in RULER},
}
ENOUGH = 0.8
CHECKED = 24  # number of questions of each task by which this is decided
DEPTHS = ["10%", "50%", "90%"]  # where the answer is in the text
QUICK_TASKS = ["pass key", "niah_single_1", "fwe"]  # these fit into few tokens
# The policies of the table that shows which metric predicts KL.
FEW = "window,sink,lru,h2o,streaming_h2o,tova,snapkv:once=no:smooth=0,a2sf,h2o_mean,roco"


def clopper_pearson(right, count):
    """The 95% interval of a share, (low, high)."""

    def at_most(k, p):  # probability of k or fewer right answers
        return sum(math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in range(k + 1))

    def where(holds):  # the largest p up to which `holds` is true, by bisection
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    low = where(lambda p: 1 - at_most(right - 1, p) < 0.025) if right else 0.0
    high = where(lambda p: at_most(right, p) > 0.025) if right < count else 1.0
    return low, high


class Evaluation:
    """What one `kvlab eval` found. Its policies are compared in pairs."""

    def __init__(self, found):
        self.tokens = found["tokens"]
        self.lines = {}  # {policy: (tier plan, its KL, peak bytes)}
        names = {}
        for pair in found["pairs"]:
            if pair["b_policy"] == "full":
                name, tiers = tier_plan_of(pair["a_policy"])
                names[pair["a"]] = name
                self.lines[name] = tiers, pair["kl"], found["configurations"][pair["a"]]["kv_bytes_peak"]
        self.different = {
            frozenset((names[pair["a"]], names[pair["b"]]))
            for pair in found["pairs"]
            if pair["kl"]["significantly_different"] and pair["a"] in names and pair["b"] in names
        }

    def kl(self, name):
        return self.lines[name][1]["mean"]

    def lowest(self):
        return min(self.lines, key=self.kl)

    def similar(self, name):
        """The policies whose KL does not differ significantly from that of `name`."""
        return {other for other in self.lines if other != name and frozenset((name, other)) not in self.different}


class Board:
    """All results of one model."""

    def __init__(self, experiment, directory, known):
        """`known`: rows that will stay. New policies are compared with the policy that has the lowest KL in them."""
        experiment.model, self.experiment = directory, experiment
        self.name = pathlib.Path(directory).name
        self.model = checkout_path(directory)
        self.texts = " ".join(map(checkout_path, experiment.arguments.text))
        self.known = [row for row in known if row["model"] == self.name]
        self.long = experiment.tokens if experiment.arguments.long else None  # the length that the metrics name
        self.lines = []  # of the CSV, as dictionaries
        self.memory = experiment.quick(["12%", "50%"], ["6%", "12%", "25%", "50%"])
        self.words = experiment.quick(["40"], ["250", "500"])
        self.plans = [tiers_of(word) for word in experiment.arguments.tiers]
        # Commands on the CPU use all cores, so only one of them runs at a time.
        jobs = 1 if experiment.arguments.device == "cpu" else experiment.arguments.jobs
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            self.policies = Policies(experiment, pool)
            shares = pool.submit(self.full_shares)
            predicted = pool.submit(self.predictors)
            losses = {(share, plan): pool.submit(self.evaluate, share, plan) for plan in self.plans for share in self.memory}
            self.shares = shares.result()  # {task: line of the full cache}
            # A quick run keeps all tasks, because its bundled model answers hardly any question.
            self.tasks = [task for task, line in self.shares.items() if experiment.arguments.quick or line["value"] >= ENOUGH]
            answers = self.submit_answers(pool)
            for (share, plan), job in losses.items():
                self.add_losses(share, plan, job.result())
            for job in answers:
                self.lines += job.result()
            self.lines += [line for task, line in self.shares.items() if task not in self.tasks]
            self.pool_tasks()
            self.lines += predicted.result()

    def runnable(self, policies, plan):
        """The policies that run in a format. Quantized keys cannot get new positions, so they need original positions."""
        return [name for name in policies if plan == "16" or name.partition(":")[0] not in self.policies.moving]

    def line(self, policy, memory, tiers, metric, value, low, high, count, command):
        return dict(zip(COLUMNS, [self.name, policy, memory, tiers, metric, value, low, high, count, command]))

    def evaluate(self, share, plan):
        """One evaluation of all policies, and of the best one of an earlier run, so that their differences are paired."""
        policies = self.runnable(self.policies.decode, plan)
        best = self.best_known(share, plan)
        # An earlier run wrote the name with all parameters.
        if best and best.partition(":")[0] not in {name.partition(":")[0] for name in policies}:
            policies = [*policies, best]
        out = self.experiment.kvlab(
            ["eval"], "--model", self.experiment.model, "--text", *self.experiment.arguments.text, *self.windows(),
            "--policy", ",".join(policies), "--budget", share, "--tiers", plan,
        )  # fmt: skip
        return Evaluation(json.loads((out / "eval.json").read_text()))

    def windows(self):
        """The options for two windows of each text, or for one if it is long."""
        tokens = self.experiment.tokens
        return ["--window", tokens, "--max-tokens", tokens if self.long else 2 * tokens, "--prompt-tokens", tokens // 5]

    def best_known(self, share, plan):
        """The policy with the lowest KL in the rows of an earlier run, of those that this device supports."""
        losses = {row["policy"]: float(row["value"]) for row in self.known
                  if (row["metric"], row["memory"], row["format"]) == (at("kl", self.long), share, plan)
                  and (self.device_option() or "--device cpu" not in row["command"])}  # fmt: skip
        return min(losses, key=losses.get, default=None)

    def add_losses(self, share, plan, evaluation):
        best = evaluation.lowest()
        command = f"kvlab eval --model {self.model} --text {self.texts} " + " ".join(map(str, self.windows()))
        ours = {name.partition(":")[0] for name in self.policies.decode}
        known = {name for name in evaluation.lines if name.partition(":")[0] not in ours}
        for name, (tiers, kl, peak) in evaluation.lines.items():
            options = f" --budget {share} --tiers {tiers}{self.device_option()}"
            if name not in known:
                own = f"{command} --policy {name}{options}"
                metrics = at("kl", self.long), at("kv_bytes_peak", self.long)
                self.lines.append(self.line(name, share, tiers, metrics[0], kl["mean"], kl["low"], kl["high"], evaluation.tokens, own))
                self.lines.append(self.line(name, share, tiers, metrics[1], peak, None, None, 1, own))
            if name != best:
                differs = int(name not in evaluation.similar(best))
                both = f"{command} --policy {name},{best}{options}"
                metric = f"{at(DIFFERS, self.long)}: {best}"
                self.lines.append(self.line(name, share, tiers, metric, differs, None, None, evaluation.tokens, both))

    def device_option(self):
        """The device of a command. The default is CUDA, which other machines may lack."""
        return " --device cpu" if self.experiment.arguments.device == "cpu" else ""

    def questions(self, task, count):
        """The options for at least `count` questions of a task."""
        if task in RULER:
            return ["--length", self.length, "--samples", self.experiment.quick(2, count)]
        points = len(self.words) * len(DEPTHS)
        samples = self.experiment.quick(2, math.ceil(count / points))
        return ["--words", ",".join(self.words), "--depth", ",".join(DEPTHS), "--samples", samples]

    @property
    def length(self):
        room = 16  # for tokens that a tokenizer puts before a text, which RULER's length does not count
        return self.experiment.arguments.length or min(self.experiment.quick(384, 1024), self.experiment.context() - room)

    def answer(self, words, questions, policies, budgets, plan):
        """The rows of `kvlab task` with the shares of right answers over all lengths and depths."""
        rows = self.experiment.kvlab(
            ["task", *words], "--model", self.experiment.model, *questions, "--policy", ",".join(policies), "--budget",
            ",".join(budgets), "--tiers", plan, "--query-agnostic", table="task.csv",
        )  # fmt: skip
        return [row for row in rows if row["metric"] == "exact_match" and row["words"] == row["depth"] == "all"]

    def answer_line(self, task, count, row):
        """The line of a row of `kvlab task`."""
        params, tiers = tier_plan_of(row["params"])
        name = f"{row['policy']}:{params}" if params else row["policy"]
        share = row["budget"] if name != "full" else "100%"
        words = ["kvlab task", *TASKS[task], f"--model {self.model}", *self.questions(task, count), "--query-agnostic"]
        command = " ".join(map(str, [*words, f"--policy {name} --budget {share} --tiers {tiers}"])) + self.device_option()
        values = (float(row[key]) for key in ("value", "low", "high"))
        return self.line(name, share, tiers, ACCURACY + task, *values, int(row["count"]), command)

    def full_shares(self):
        """Returns {task: line with the share that the full cache answers}"""
        if self.long or not self.experiment.arguments.answers:
            return {}
        tasks = QUICK_TASKS if self.experiment.arguments.quick else [*TASKS]
        ruler = [task for task in tasks if task in RULER]
        # One command answers all of RULER's tasks, so that the model is loaded once.
        rows = self.answer(["ruler", "--tasks", ",".join(ruler)], self.questions(ruler[0], CHECKED), ["full"], ["100%"], "16")
        found = {row["task"]: row for row in rows}
        for task in tasks:
            if task not in ruler:
                found[task] = self.answer(TASKS[task], self.questions(task, CHECKED), ["full"], ["100%"], "16")[0]
        return {task: self.answer_line(task, CHECKED, found[task]) for task in tasks}

    def submit_answers(self, pool):
        if not self.tasks:
            return []
        count = math.ceil(self.experiment.arguments.answers / len(self.tasks))
        return [pool.submit(self.accuracy, task, count, plan) for task in self.tasks for plan in self.plans]

    def accuracy(self, task, count, plan):
        """Lines of the policies, and one of the full cache."""
        policies = self.runnable(self.policies.answer, plan)
        rows = self.answer(TASKS[task], self.questions(task, count), policies, self.memory, plan)
        is_first = plan == self.plans[0]  # other commands have the full cache's answers again
        return [self.answer_line(task, count, row) for row in rows if row["policy"] != "full" or is_first]

    def pool_tasks(self):
        """For each configuration that answered all tasks, adds the accuracy over all of them."""
        pooled = {}
        for line in self.lines:
            if line["metric"].removeprefix(ACCURACY) in self.tasks:
                pooled.setdefault((line["policy"], line["memory"], line["format"]), []).append(line)
        for key, own in pooled.items():
            if len(own) < len(self.tasks):
                continue
            count = sum(line["count"] for line in own)
            right = round(sum(line["value"] * line["count"] for line in own))
            self.lines.append(self.line(*key, "accuracy", right / count, *clopper_pearson(right, count), count, "pooled over the tasks"))

    def predictors(self):
        """Lines with the rank correlation of each metric of a replay with KL. Not in a run for some policies, or for long
        windows."""
        if self.long or self.experiment.arguments.policy:
            return []
        tokens, lines = self.experiment.tokens, []
        options = f"--max-tokens {tokens} --prompt-tokens {tokens // 5} --policy {FEW} --budget 12%,25%"
        out = self.experiment.kvlab(
            ["fidelity"], "--model", self.experiment.model, "--text", *self.experiment.arguments.text, *options.split()
        )  # fmt: skip
        command = f"kvlab fidelity --model {self.model} --text {self.texts} {options}{self.device_option()}"
        for name, own in json.loads((out / "fidelity.json").read_text())["metrics"].items():
            for budget, value in own["within"].items():
                lines.append(self.line(FEW, budget, "16", PREDICTS + name, value, None, None, len(FEW.split(",")), command))
        return lines


class Policies:
    """The policies that evict. Those for KL have settings under which they evict decoded tokens too."""

    def __init__(self, experiment, pool):
        self.decode, self.answer = [], []
        evicting = [policy for policy in experiment.policies() if policy["evicts"] and policy["decodes"]]
        self.moving = {policy["name"] for policy in evicting if policy["positions"] == "cache"}
        wanted = experiment.arguments.policy
        unknown = [name for name in wanted or [] if name not in {policy["name"] for policy in evicting}]
        if unknown:
            raise Refused(f"--policy: {unknown[0]} is not a registered policy that evicts")
        evicting = [policy for policy in evicting if not wanted or policy["name"] in wanted]
        for policy, reason in zip(evicting, pool.map(experiment.refusal, [policy["name"] for policy in evicting])):
            name = policy["name"]
            if reason is not None:
                if wanted:
                    raise Refused(f"--policy: {reason.removeprefix('kvlab eval: ')}")
                print(f"leaderboard.py: {name} is left out: {reason.removeprefix('kvlab eval: ')}", file=sys.stderr)
                continue
            once = "once" in policy["modifiers"]
            smooth = any("smooth" in modifier for modifier in policy["modifiers"])
            self.answer.append(name)
            self.decode.append(":".join([name] + ["once=no"] * once + ["smooth=0"] * smooth))


def tiers_of(word):
    """Returns a tier plan as text. `word`: the plan, or @FILE with a file of `kvlab plan`."""
    if not word.startswith("@"):
        return word
    try:
        tiers = json.loads(pathlib.Path(word[1:]).read_text())["plan"]["tiers"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        tiers = None
    if not isinstance(tiers, str):
        raise Refused(f"--tiers: {word[1:]} is not a file of `kvlab plan`; give a tier plan or @FILE of `kvlab plan`")
    return tiers


def add_arguments(parser):
    parser.add_argument("--policy", nargs="+", metavar="NAME", help="measure these policies alone, and keep the rows of the others "
                        "(default: all that the device supports)")
    parser.add_argument("--tiers", nargs="+", default=["16"], help="formats; each is ranked separately (default: 16)")
    parser.add_argument("--jobs", type=int, default=1, help="commands that run at the same time on a GPU (default: 1)")
    parser.add_argument("--answers", type=int, default=200, help="minimum number of questions in each cell, over all tasks; 0: no tasks "
                        "(default: 200)")
    parser.add_argument("--long", action="store_true", help="measure KL alone, in one window of --tokens tokens of each text, and name the "
                        "length in the metric, so that the rows stay beside those of shorter windows")
    parser.add_argument("--length", type=int, help="maximum number of tokens of RULER's questions with their answers (default: 1024, or "
                        "half of the model's context if that is less)")


def updated(known, measured, is_complete):
    """The rows of an earlier run with the measured ones, which replace rows for the same cell. A complete run also removes
    the other old rows of the models, formats, policies and lengths that it measured, except decode speeds, which
    decode_speed.py measures."""
    keys = {key_of(row) for row in measured}
    losses = {(row["model"], row["format"], row["policy"], length_of(row)) for row in measured if row["metric"].partition(" ")[0] == "kl"}
    losses |= {(model, plan, "full", length) for model, plan, _, length in losses}

    def is_old(row):
        policies = {row["policy"]}
        if row["metric"].startswith(DIFFERS):
            policies.add(row["metric"].partition(": ")[2])
        replaced = all((row["model"], row["format"], policy, length_of(row)) in losses for policy in policies)
        return is_complete and not row["metric"].startswith(SPEED) and replaced

    return [row for row in known if key_of(row) not in keys and not is_old(row)] + measured


def leaderboard():
    experiment = Experiment(__doc__, models=True, arguments=add_arguments)
    arguments = experiment.arguments
    if len(arguments.text) < 2 and not arguments.quick:
        raise Refused("--text: give at least two, because intervals need several texts")
    path = pathlib.Path(arguments.out)
    rows = path.with_suffix(".csv")
    known = read_rows(rows) if rows.exists() else []
    staying = known if arguments.policy else []
    measured = [line for directory in experiment.models for line in Board(experiment, directory, staying).lines]
    write_page(path, updated(known, measured, not arguments.policy))


if __name__ == "__main__":
    main(leaderboard)
