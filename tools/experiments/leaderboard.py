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

from experiment import Experiment, Refused, checkout_path, main, spearman, table, tier_plan_of

QUESTION = """
This page ranks every registered policy, with its defaults, at equal memory and by two criteria. KL (in nats) says how
far predictions move from those of the full cache; lower is better. Task accuracy is the share of right answers to
questions that come after the eviction, pooled over tasks and lengths; higher is better. The tasks are those of `kvlab
task`: a pass key, needles, and RULER's. An answer to a question with several expected strings is right if it contains
all of them.

Memory is a share of the bytes of the full cache in 16 bit. In 16 bit, a budget is that share of the tokens. Quantized,
the same bytes hold more tokens. Policies with cache positions are ranked in 16 bit alone, because quantized keys cannot
get new positions. `snapkv` and `nacl` would keep all decoded tokens; for KL and decode speed they evict as other
policies do (`once=no`). Budgets apply to the layers without a sliding window; a layer with a window keeps its window
under every policy.

**Bold** is the best of a column. `=` marks a policy whose KL does not differ significantly from it, by the paired 95%
interval of `kvlab eval` over all texts. Brackets are 95% intervals: of KL, the interval of `kvlab eval`; of accuracy,
Clopper and Pearson's. Every number is in `leaderboard.csv`, with the command that measured it.
"""
COLUMNS = ["model", "policy", "memory", "format", "metric", "value", "low", "high", "count", "command"]
# RULER's tasks of `kvlab task ruler`.
RULER = [
    *(f"niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
]
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
SPEED = "tokens_per_s: batch "  # the metric of a decode speed, before the number of sequences
MAX_SPEED_TOKENS = 8192  # length of the sequences whose decode speed is measured
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
        self.tokens, self.dtype = found["tokens"], found["engine_dtype"]
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

    def __init__(self, experiment, directory):
        experiment.model, self.experiment = directory, experiment
        self.name = pathlib.Path(directory).name
        self.model = checkout_path(directory)
        self.texts = " ".join(map(checkout_path, experiment.arguments.text))
        self.lines = []  # of the CSV, as dictionaries
        self.ties = {}  # {(memory, format): names of policies that do not differ significantly from the best}
        self.dtypes = {}  # {device of an evaluation: the dtype of its arithmetic}
        self.memory = experiment.quick(["12%", "50%"], ["6%", "12%", "25%", "50%"])
        self.words = experiment.quick(["40"], ["250", "500"])
        self.plans = [tiers_of(word) for word in experiment.arguments.tiers]
        # Commands on the CPU use all cores, so only one of them runs at a time.
        with (
            concurrent.futures.ThreadPoolExecutor(experiment.arguments.jobs) as pool,
            concurrent.futures.ThreadPoolExecutor(1) as cpu_pool,
        ):
            self.policies = Policies(experiment, pool)
            shares = pool.submit(self.full_shares)
            predicted = pool.submit(self.predictors)
            losses = self.submit_losses(pool, cpu_pool)
            self.shares = shares.result()  # {task: line of the full cache}
            # A quick run keeps all tasks, because its bundled model answers hardly any question.
            self.tasks = [task for task, line in self.shares.items() if experiment.arguments.quick or line["value"] >= ENOUGH]
            answers = self.submit_answers(pool, cpu_pool)
            self.predicted = predicted.result()
            for (share, plan), jobs in losses.items():
                self.add_losses(share, plan, [job.result() for job in jobs])
            for job in answers:
                self.lines += job.result()
        self.lines += [line for task, line in self.shares.items() if task not in self.tasks]
        self.pool_tasks()
        self.speed = DecodeSpeed(self)  # alone, because other commands would slow it down
        self.lines += self.speed.lines

    def runnable(self, policies, plan):
        """The policies that run in a format. Quantized keys cannot get new positions, so they need original positions."""
        return [name for name in policies if plan == "16" or name.partition(":")[0] not in self.policies.moving]

    def line(self, policy, memory, tiers, metric, value, low, high, count, command):
        return dict(zip(COLUMNS, [self.name, policy, memory, tiers, metric, value, low, high, count, command]))

    def submit_losses(self, pool, cpu_pool):
        """Returns {(memory, format): (the evaluation of most policies, the evaluation of the policies that need the
        CPU)}."""
        jobs = {}
        for plan in self.plans:
            for share in self.memory:
                jobs[share, plan] = [pool.submit(self.evaluate, share, plan, self.runnable(self.policies.decode, plan))]
        for (share, plan), own in jobs.items():
            policies = self.runnable(self.policies.cpu_decode, plan)
            if policies:
                own.append(cpu_pool.submit(self.evaluate_on_cpu, share, plan, policies, own[0]))
        return jobs

    def evaluate(self, share, plan, policies, device=None):
        """Evaluates all policies with one command, so that their differences are paired."""
        tokens = self.experiment.tokens
        out = self.experiment.kvlab(
            ["eval"], "--model", self.experiment.model, "--text", *self.experiment.arguments.text, "--window", tokens,
            "--max-tokens", 2 * tokens, "--prompt-tokens", tokens // 5, "--policy", ",".join(policies), "--budget", share,
            "--tiers", plan, device=device,
        )  # fmt: skip
        return Evaluation(json.loads((out / "eval.json").read_text()))

    def evaluate_on_cpu(self, share, plan, policies, others):
        """Evaluates `policies` on the CPU together with the policy that has the lowest KL of `others`, so that the
        differences from it are paired."""
        return self.evaluate(share, plan, [*policies, others.result().lowest()], device="cpu")

    def add_losses(self, share, plan, evaluations):
        tokens = self.experiment.tokens
        command = f"kvlab eval --model {self.model} --text {self.texts} --window {tokens} --max-tokens {2 * tokens} --prompt-tokens {tokens // 5}"
        seen = {}
        for evaluation, device in zip(evaluations, (None, "cpu")):
            self.dtypes[device] = evaluation.dtype
            for name, (tiers, kl, peak) in evaluation.lines.items():
                if name in seen:
                    continue
                seen[name] = kl["mean"]
                own = f"{command} --policy {name} --budget {share} --tiers {tiers}{device_option(device)}"
                self.lines.append(self.line(name, share, tiers, "kl", kl["mean"], kl["low"], kl["high"], evaluation.tokens, own))
                self.lines.append(self.line(name, share, tiers, "kv_bytes_peak", peak, None, None, 1, own))
        best = min(seen, key=seen.get)
        self.ties[share, plan] = set().union(*(own.similar(best) for own in evaluations if best in own.lines))

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

    def answer(self, words, questions, policies, budgets, plan, device=None):
        """The rows of `kvlab task` with the shares of right answers over all lengths and depths."""
        rows = self.experiment.kvlab(
            ["task", *words], "--model", self.experiment.model, *questions, "--policy", ",".join(policies), "--budget",
            ",".join(budgets), "--tiers", plan, "--query-agnostic", table="task.csv", device=device,
        )  # fmt: skip
        return [row for row in rows if row["metric"] == "exact_match" and row["words"] == row["depth"] == "all"]

    def answer_line(self, task, count, row, device=None):
        """Converts a row of `kvlab task` to a line of the CSV."""
        params, tiers = tier_plan_of(row["params"])
        name = f"{row['policy']}:{params}" if params else row["policy"]
        share = row["budget"] if name != "full" else "100%"
        words = ["kvlab task", *TASKS[task], f"--model {self.model}", *self.questions(task, count), "--query-agnostic"]
        command = " ".join(map(str, [*words, f"--policy {name} --budget {share} --tiers {tiers}"])) + device_option(device)
        values = (float(row[key]) for key in ("value", "low", "high"))
        return self.line(name, share, tiers, f"accuracy: {task}", *values, int(row["count"]), command)

    def full_shares(self):
        """Returns {task: line with the share that the full cache answers}"""
        tasks = QUICK_TASKS if self.experiment.arguments.quick else [*TASKS]
        ruler = [task for task in tasks if task in RULER]
        # One command answers all of RULER's tasks, so that the model is loaded once.
        rows = self.answer(["ruler", "--tasks", ",".join(ruler)], self.questions(ruler[0], CHECKED), ["full"], ["100%"], "16")
        found = {row["task"]: row for row in rows}
        for task in tasks:
            if task not in ruler:
                found[task] = self.answer(TASKS[task], self.questions(task, CHECKED), ["full"], ["100%"], "16")[0]
        return {task: self.answer_line(task, CHECKED, found[task]) for task in tasks}

    def submit_answers(self, pool, cpu_pool):
        if not self.tasks:
            return []
        count = math.ceil(self.experiment.arguments.answers / len(self.tasks))
        jobs = []
        for task in self.tasks:
            for plan in self.plans:
                jobs.append(pool.submit(self.accuracy, task, count, plan, self.runnable(self.policies.answer, plan)))
                on_cpu = self.runnable(self.policies.cpu_answer, plan)
                if on_cpu:
                    jobs.append(cpu_pool.submit(self.accuracy, task, count, plan, on_cpu, device="cpu"))
        return jobs

    def accuracy(self, task, count, plan, policies, device=None):
        """Lines of the policies, and one of the full cache."""
        rows = self.answer(TASKS[task], self.questions(task, count), policies, self.memory, plan, device)
        is_first = plan == self.plans[0] and not device  # other commands repeat the full cache's answers
        return [self.answer_line(task, count, row, device) for row in rows if row["policy"] != "full" or is_first]

    def pool_tasks(self):
        """For each configuration that answered all tasks, adds the accuracy over all of them."""
        pooled = {}
        for line in self.lines:
            if line["metric"].removeprefix("accuracy: ") in self.tasks:
                pooled.setdefault((line["policy"], line["memory"], line["format"]), []).append(line)
        for key, own in pooled.items():
            if len(own) < len(self.tasks):
                continue
            count = sum(line["count"] for line in own)
            right = round(sum(line["value"] * line["count"] for line in own))
            self.lines.append(self.line(*key, "accuracy", right / count, *clopper_pearson(right, count), count, "pooled over the tasks"))

    def values(self, metric, plan):
        """Returns {policy: {memory: line}} without the full cache."""
        found = {}
        for line in self.lines:
            if line["metric"] == metric and line["format"] == plan and line["policy"] != "full":
                found.setdefault(line["policy"], {})[line["memory"]] = line
        return found

    def by_kl(self, plan):
        """The policies, the one with the lowest KL first."""
        found = self.values("kl", plan)
        return sorted(found, key=lambda name: sum(math.log(max(line["value"], 1e-9)) for line in found[name].values()))

    def section(self):
        text = [f"## `{self.name}`"]
        refused = self.policies.refused
        if refused:
            text.append("Not ranked: " + "; ".join(f"`{name}` ({reason})" for name, reason in refused.items()) + ".")
        if self.policies.on_cpu:
            text.append(self.cpu_sentence())
        for plan in self.plans:
            text.append(f"### KL, {label(plan)}")
            if label(plan) == "plan":
                text.append(f"The plan of `kvlab plan`, in runs of layers: `{plan}`.")
            text.append(self.ranked(self.values("kl", plan), self.by_kl(plan), min, self.ties))
        left_out = {task: line for task, line in self.shares.items() if task not in self.tasks}
        for plan in self.plans:
            answers = self.values("accuracy", plan)
            if answers:
                order = sorted(answers, key=lambda name: -sum(line["value"] for line in answers[name].values()))
                text += [f"### Accuracy, {label(plan)}", self.accuracy_sentence(answers)]
                text.append(self.ranked(answers, order, max, {}))
        if left_out:
            text += ["### Accuracy"] * (not self.tasks)
            shares = ", ".join(f"{task_names([task])} ({line['value']:.0%})" for task, line in left_out.items())
            text.append(f"Left out, because the full cache answers fewer than {ENOUGH:.0%} of {CHECKED} questions: {shares}.")
        return "\n\n".join([*text, *self.speed.section()])

    def cpu_sentence(self):
        names = ", ".join(f"`{name}`" for name in self.policies.on_cpu)
        accuracy = "" if self.policies.cpu_answer else " Their task accuracy was not measured."
        return (
            f"Measured on the CPU in {self.dtypes['cpu']}, because the CUDA decoder, which computes in {self.dtypes[None]}, does not support "
            f"them: {names}.{accuracy} For `=`, the best of the other policies was evaluated on the CPU too."
        )

    def accuracy_sentence(self, answers):
        count = next(line["count"] for own in answers.values() for line in own.values())
        full = next(line["value"] for line in self.lines if line["policy"] == "full" and line["metric"] == "accuracy")
        sentence = f"Share of right answers to {count} questions of {task_names(self.tasks)}. The full cache answers {full:.0%} of them."
        if any(task in RULER for task in self.tasks):
            sentence += f" RULER's questions have at most {self.length:,} tokens with their answers, the others {' or '.join(self.words)} words."
        if any(len(own) < len(self.memory) for own in answers.values()):
            sentence += ' "-": protected tokens exceed the budget of some questions.'
        return sentence

    def ranked(self, found, order, best, ties):
        lines = [[f"`{name.partition(':')[0]}`"] for name in order]
        for share in self.memory:
            first = best(own[share]["value"] for own in found.values() if share in own)
            for line, name in zip(lines, order):
                cell = found[name].get(share)
                line.append(cell_text(cell, cell["value"] == first, name in ties.get((share, cell["format"]), ())) if cell else "-")
        return table(["policy", *(f"{share} of the memory" for share in self.memory)], lines)

    def predictors(self):
        """Returns {(model, budget): {metric of a replay: its rank correlation with KL}}"""
        tokens, columns = self.experiment.tokens, {}
        out = self.experiment.kvlab(
            ["fidelity"], "--model", self.experiment.model, "--text", *self.experiment.arguments.text, "--max-tokens", tokens,
            "--prompt-tokens", tokens // 5, "--policy", FEW, "--budget", "12%,25%",
        )  # fmt: skip
        for name, own in json.loads((out / "fidelity.json").read_text())["metrics"].items():
            for budget, value in own["within"].items():
                columns.setdefault((self.name, budget), {})[name] = value
        return columns


class Policies:
    """The policies that evict, in one list for each kind of measurement that they support. For KL, policies get
    settings under which they also evict decoded tokens."""

    def __init__(self, experiment, pool):
        self.decode, self.answer = [], []
        self.on_cpu = []  # for --cpu-policies: names of those that the device refuses, but the CPU does not
        self.cpu_decode, self.cpu_answer = [], []
        self.refused = {}  # {policy: why it is not measured}
        evicting = [policy for policy in experiment.policies() if policy["evicts"] and policy["decodes"]]
        self.moving = {policy["name"] for policy in evicting if policy["positions"] == "cache"}
        reasons = list(pool.map(experiment.refusal, [policy["name"] for policy in evicting]))
        for policy, reason in zip(evicting, reasons):
            name = policy["name"]
            once = "once" in policy["modifiers"]
            smooth = any("smooth" in modifier for modifier in policy["modifiers"])
            decode = ":".join([name] + ["once=no"] * once + ["smooth=0"] * smooth)
            if reason is None:
                self.answer.append(name)
                self.decode.append(decode)
            elif experiment.arguments.cpu_policies and experiment.refusal(name, device="cpu") is None:
                self.on_cpu.append(name)
                self.cpu_decode.append(decode)
                self.cpu_answer += [name] * (experiment.arguments.cpu_policies == "all")
            else:
                self.refused[name] = reason.removeprefix("kvlab eval: ")


class DecodeSpeed:
    """Decoded tokens per second on one GPU, in 16 bit, for a board's policies. `kvlab bench evict` measures each together
    with the full cache, for one sequence and for as many as fit in memory."""

    def __init__(self, board):
        self.board, self.shares = board, board.experiment.arguments.speed
        self.half = min(board.experiment.context(), MAX_SPEED_TOKENS) // 2  # tokens of the prompt, and as many decoded ones
        self.lines, self.gpu = [], ""
        self.failed = {}  # {(policy, memory): why}
        self.reason = self.why_not(board.experiment.arguments)  # why nothing was measured
        if self.reason:
            return
        for share in self.shares:
            for name in board.by_kl("16"):
                if name.partition(":")[0] not in board.policies.on_cpu:
                    self.measure(name, share)
        if not self.lines:
            self.reason = next(iter(self.failed.values()), None)

    def why_not(self, arguments):
        if arguments.device == "cpu":
            return "this run was on the CPU"
        if arguments.quick:
            return "this run was a quick one"
        return None if "16" in self.board.plans else "this run was not in 16 bit"

    def measure(self, name, share):
        words = ["evict", "--policy", name, "--budget", share, "--prompt-tokens", self.half, "--max-new-tokens", self.half, "--batch", 1]
        found, failure = self.board.experiment.bench(*words, "--model", self.board.experiment.model)
        if failure:
            self.failed[name, share] = failure
            return
        command = " ".join(map(str, ["kvlab bench", *words, "--model", self.board.model]))
        if not self.lines:
            self.gpu = f"{found['device']} in {found['dtype']}"
            self.add("full", "100%", (found["full"], found["largest_full"]), command)
        self.add(name, share, (found["evicting"], found["largest_evicting"]), command)

    def add(self, name, memory, runs, command):
        for run in {run["batch"]: run for run in runs}.values():
            metric = f"{SPEED}{run['batch']}"
            self.lines.append(self.board.line(name, memory, "16", metric, run["tokens_per_second"], None, None, 1, command))

    def section(self):
        if not self.shares:
            return []
        title = "### Decode speed, 16 bit"
        if self.reason:
            return [title, f"Not measured: {self.reason}."]
        explanation = (
            f"Decoded tokens per second of all sequences together, on one {self.gpu}. Each sequence decodes {self.half:,} tokens after a "
            f"prompt of {self.half:,}, with random keys and values. In parentheses: the number of sequences, which is 1 or the largest "
            "number that fits in memory, at most 2,047. `kvlab bench evict` times steps at some lengths and integrates."
        )
        header = ["policy", *(f"{share} of the memory, {what}" for share in self.shares for what in ("one sequence", "largest batch"))]
        rows = []
        for name in dict.fromkeys(line["policy"] for line in self.lines):
            rows.append([f"`{name.partition(':')[0]}`"])
            for share in self.shares:
                cells = self.cells(name, "100%" if name == "full" else share)
                rows[-1] += [cells[0], cells[-1]]
        text = [title, explanation, table(header, rows)]
        if self.failed:
            reasons = "; ".join(f"`{name.partition(':')[0]}` at {share} ({why})" for (name, share), why in self.failed.items())
            text.append(f"Not measured: {reasons}.")
        return text

    def cells(self, name, memory):
        own = [line for line in self.lines if line["policy"] == name and line["memory"] == memory]
        return [f"{line['value']:,.0f} ({int(line['metric'].removeprefix(SPEED)):,})" for line in own] or ["-"]


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


def label(plan):
    return "16 bit" if plan == "16" else "plan" if "x" in plan else f"format `{plan}`"


def number(value):
    return f"{value:.3g}" if value >= 1e-3 else f"{value:.1g}"


def cell_text(line, is_best, is_tied):
    text = f"**{number(line['value'])}**" if is_best else number(line["value"])
    if line["low"] is not None:
        text += f" ({number(max(line['low'], 0))} to {number(line['high'])})"
    return text + " =" * (is_tied and not is_best)


def task_names(tasks):
    return ", ".join(f"`{task}`" if task in RULER else task for task in tasks)


def device_option(device):
    return f" --device {device}" if device else ""


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
    value = spearman([one[name] for name in names], [other[name] for name in names]) if len(names) > 2 else math.nan
    return "-" if math.isnan(value) else f"{value:.2f}"


def predictors(boards):
    """A table of the metrics of a replay: the rank correlation of each with KL."""
    columns = {key: own for board in boards for key, own in board.predicted.items()}
    names = list(dict.fromkeys(name for own in columns.values() for name in own))
    rows = []
    for name in names:
        values = [own.get(name) for own in columns.values()]
        rows.append([f"`{name}`", *("-" if value is None else f"{value:.2f}" for value in values)])
    return table(["metric", *(f"`{model}` {budget}" for model, budget in columns)], rows)


def add_arguments(parser):
    parser.add_argument("--tiers", nargs="+", default=["16"], help="formats; each is ranked separately (default: 16)")
    parser.add_argument("--jobs", type=int, default=1, help="commands that run at the same time (default: 1)")
    parser.add_argument("--answers", type=int, default=200, help="minimum number of questions in each cell, over all tasks (default: 200)")
    parser.add_argument("--length", type=int, help="maximum number of tokens of RULER's questions with their answers (default: 1024, or "
                        "half of the model's context if that is less)")
    parser.add_argument("--speed", nargs="*", default=["25%"], metavar="SHARE", help="memory at which the decode speed of each "
                        "policy is measured on a GPU; without a share: none (default: 25%%)")
    parser.add_argument("--cpu-policies", choices=["kl", "all"], help="also measure the policies that CUDA does not support, on the CPU: "
                        "KL alone, or task accuracy too, which is slow (default: they are left out)")


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
        'policies at each budget. "-": the model has no such metric.\n\n' + predictors(boards)
    )
    experiment.write("Leaderboard", QUESTION)
    with open(pathlib.Path(experiment.arguments.out).with_suffix(".csv"), "w", newline="") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator=os.linesep)
        lines.writeheader()
        lines.writerows(line for board in boards for line in board.lines)


if __name__ == "__main__":
    main(leaderboard)
