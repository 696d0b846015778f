"""The leaderboard's page, docs/results/leaderboard.md, as a function of the rows of its CSV (docs/results/README.md
describes the columns and metrics). Rows that several people measured make one page."""

import csv
import math
import os
import re

from experiment import Refused, spearman, table, wrapped

COLUMNS = ["model", "policy", "memory", "format", "metric", "value", "low", "high", "count", "command"]
# RULER's tasks of `kvlab task ruler`.
RULER = [
    *(f"niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
]
ACCURACY = "accuracy: "  # the metric of one task, before its name
DIFFERS = "kl_differs_from"  # whether KL differs significantly (1 or 0), before the name of the policy with the lowest KL
PREDICTS = "rank_correlation_with_kl: "  # before the name of a metric of a replay
SPEED = "tokens_per_s: batch "  # the metric of a decode speed, before "N on GPU"
# Options that the command of a metric has, because the page names their values.
NEEDED = {"kl": ["--text", "--max-tokens"], SPEED.split()[0]: ["--random-weights", "--prompt-tokens", "--max-new-tokens"]}
QUESTION = """
This page ranks every registered policy, with its defaults, at equal memory and by two criteria. KL (in nats) says how
far predictions move from those of the full cache; lower is better. Task accuracy is the share of right answers to
questions that come after the eviction, pooled over tasks and lengths; higher is better. The tasks are those of `kvlab
task`: a pass key, needles, and RULER's. An answer to a question with several expected strings is right if it contains
all of them.

Memory is a share of the bytes of the full cache in 16 bit. In 16 bit, the budget is the same share of the tokens. If
tokens are quantized, the same bytes hold more of them. Policies with cache positions are ranked in 16 bit alone,
because quantized keys cannot get new positions. By default, `snapkv` and `nacl` keep all decoded tokens. To measure KL
and decode speed, they evict decoded tokens as other policies do (`once=no`). Budgets apply to the layers without a
sliding window; a layer with a window keeps its window under every policy.

**Bold** marks the best value of a column. `=` marks a policy whose KL does not differ significantly from the best KL,
by the paired 95% interval of `kvlab eval` over all texts. `?` marks a policy that was not evaluated together with the
best one, so whether they differ significantly is not known. Numbers in parentheses are 95% intervals: for KL, the
interval of `kvlab eval`; for accuracy, Clopper and Pearson's. Every number is in `leaderboard.csv`, with the command
that measured it.
"""
MADE = (
    "Made from `leaderboard.csv`, which `leaderboard.py` and `decode_speed.py` of `tools/experiments` write; no number is typed by hand."
)
LONG = re.compile(" at ([0-9]+) tokens")  # in metrics of windows that are longer than those of `kl`
NO_KL = "no row has the metric kl, by which the page orders policies"


def page(rows):
    """The text of the page for rows of the CSV, which are dictionaries of texts or numbers."""
    every = [Model(name, rows) for name in dict.fromkeys(row["model"] for row in rows)]
    models, shapes = [model for model in every if model.memory], [model for model in every if not model.memory]
    if not models:
        raise Refused(NO_KL)
    made = f"{MADE} Models: {listed(model.name for model in models)}."
    if shapes:
        made += f" Of {listed(model.name for model in shapes)}, only the decode speed was measured."
    parts = ["# Leaderboard", QUESTION.strip(), wrapped(made)]
    everything = dict.fromkeys(short(row["policy"]) for row in rows if row["metric"] == "kl")
    for model in models:
        parts += model.section(everything)
    for model in shapes:
        parts += [f"## `{model.name}` (random weights: only the shape counts)", *model.speed()]
    parts += [
        "## Do the criteria, and the models, agree?",
        wrapped(compared(models)),
        agreement(models),
        "## Which metric of a replay predicts KL",
        wrapped(
            "Spearman's ρ between a metric and the KL of the end-to-end evaluation, over ten policies at each budget. "
            '"-": the model has no such metric.'
        ),
        predictors(rows),
    ]
    return "\n\n".join(parts) + "\n"


def at(metric, length):
    """The name of a metric that was measured in windows of `length` tokens. None: in those of `kl`."""
    return f"{metric} at {length} tokens" if length else metric


def length_of(row):
    """The length of the windows that a metric names, or None."""
    found = LONG.search(row["metric"])
    return int(found[1]) if found else None


class Model:
    """The rows of one model. If only its decode speed was measured, `formats` and `memory` are empty."""

    def __init__(self, name, rows):
        self.name, self.rows = name, [row for row in rows if row["model"] == name]
        losses = [row for row in self.rows if row["metric"] == "kl"]
        if not losses and any(not row["metric"].startswith(SPEED) for row in self.rows):
            raise Refused(f"{name}: {NO_KL}")
        self.formats = list(dict.fromkeys(row["format"] for row in losses))
        self.memory = sorted({row["memory"] for row in losses}, key=percent)
        self.lengths = sorted({length_of(row) for row in self.rows} - {None})

    def values(self, metric, plan):
        """Returns {policy: {memory: row}} without the full cache."""
        found = {}
        for row in self.rows:
            if row["metric"] == metric and row["format"] == plan and row["policy"] != "full":
                found.setdefault(row["policy"], {})[row["memory"]] = row
        return found

    def section(self, everything):
        """The parts of the page. `everything`: the policies that were measured on any model."""
        parts = [f"## `{self.name}`", wrapped(self.texts())]
        missing = [name for name in everything if name not in {short(row["policy"]) for row in self.rows if row["metric"] == "kl"}]
        if missing:
            parts.append(wrapped(f"Not measured on this model: {listed(missing)}."))
        for plan in self.formats:
            parts += self.losses(plan)
        for length in self.lengths:
            for plan in self.formats:
                parts += self.losses(plan, length)
        for plan in self.formats:
            parts += self.accuracy(plan)
        speed = self.speed()
        return parts + ["### Decode speed, 16 bit"] * bool(speed) + speed

    def losses(self, plan, length=None):
        """The table of KL in a format. `length`: of windows that are longer than those of the metric `kl`."""
        found = self.values(at("kl", length), plan)
        if not found:
            return []
        order = sorted(found, key=lambda name: sum(math.log(max(value_of(row), 1e-9)) for row in found[name].values()) / len(found[name]))
        parts = [f"### KL{f' at {length:,} tokens' if length else ''}, {label(plan)}"]
        if label(plan) == "plan":
            parts.append(wrapped(f"The plan of `kvlab plan`, in runs of layers: `{plan}`."))
        if length:
            parts.append(wrapped(self.texts(length)))
        parts += self.on_cpu(plan, length)
        return parts + [self.ranked(found, order, min, lambda share, best: self.marks(share, plan, best, length))]

    def on_cpu(self, plan, length):
        """Returns a paragraph that says which KL of a format was measured on the CPU, or nothing if none was."""
        rows = [row for row in self.rows if row["metric"] == at("kl", length) and row["format"] == plan]
        names = dict.fromkeys(short(row["policy"]) for row in rows if "--device cpu" in row["command"])
        if not names:
            return []
        if all("--device cpu" in row["command"] for row in rows):
            return ["Measured on the CPU in float32."]
        return [wrapped(
            f"The KL of these policies was measured on the CPU in float32: {listed(names)}. CUDA does not support them, and computes the "
            "others in bfloat16. To decide which of them get an `=`, the policy with the lowest KL was evaluated on the CPU too."
        )]  # fmt: skip

    def texts(self, length=None):
        """Which texts KL was measured on, from the command of a row."""
        words = next(row["command"] for row in self.rows if row["metric"] == at("kl", length)).split()
        first = words.index("--text") + 1
        last = next((i for i in range(first, len(words)) if words[i].startswith("--")), len(words))
        names = [word.rpartition("/")[2].partition(".")[0] for word in words[first:last]]
        windows = f"windows of {int(option(words, '--window')):,} tokens" if "--window" in words else "whole texts"
        return f"KL: {', '.join(names)}; at most {int(option(words, '--max-tokens')):,} tokens of each, in {windows}."

    def marks(self, share, plan, best, length):
        """The mark of each policy that was evaluated together with `best`: "=" if its KL does not differ significantly."""
        found, before = {}, at(DIFFERS, length) + ": "
        for row in self.rows:
            if row["metric"].startswith(before) and (row["memory"], row["format"]) == (share, plan):
                pair = {row["policy"], row["metric"].removeprefix(before)}
                if best in pair:
                    found |= dict.fromkeys(pair - {best}, "" if float(row["value"]) else "=")
        return found

    def accuracy(self, plan):
        """The table of right answers in a format, and the tasks that are left out."""
        found = self.values("accuracy", plan)
        tasks = {row["metric"]: row for row in self.rows if row["metric"].startswith(ACCURACY) and row["policy"] != "full" and row["format"] == plan}
        full = {row["metric"]: row for row in self.rows if row["policy"] == "full"}
        left_out = {name: row for name, row in full.items() if name.startswith(ACCURACY) and name not in tasks}
        if not found and not (left_out and plan == self.formats[0]):
            return []
        parts = ["### Accuracy" + f", {label(plan)}" * bool(found)]
        if found:
            order = sorted(found, key=lambda name: -sum(value_of(row) for row in found[name].values()))
            parts += [wrapped(self.questions(found, tasks, full.get("accuracy"))), self.ranked(found, order, max)]
        if left_out and plan == self.formats[0]:
            shares = ", ".join(f"{task_names([name])} ({value_of(row):.0%})" for name, row in left_out.items())
            checked = int(next(iter(left_out.values()))["count"])
            parts.append(wrapped(f"Left out, because the full cache answers fewer than 80% of {checked} questions: {shares}."))
        return parts

    def questions(self, found, tasks, full):
        """How many questions there are, of which tasks, and how long they are."""
        count = int(next(row["count"] for own in found.values() for row in own.values()))
        text = f"Share of right answers to {count} questions of {task_names(tasks)}."
        text += f" The full cache answers {value_of(full):.0%} of them." if full else ""
        words = [row["command"].split() for row in tasks.values()]
        lengths = {option(command, "--length") for command in words if "--length" in command}
        if lengths:
            others = {option(command, "--words") for command in words if "--words" in command}
            text += f" RULER's questions have at most {int(lengths.pop()):,} tokens with their answers"
            text += f", the others {' or '.join(others.pop().split(','))} words." if others else "."
        if any(len(own) < len(self.memory) for own in found.values()):
            text += ' "-": protected tokens exceed the budget of some questions.'
        return text

    def ranked(self, found, order, best, marks=None):
        """A row for each policy, a column for each memory. marks(memory, best policy): the marks of policies. "?" marks those
        that it does not have. None: no marks."""
        lines = [[f"`{short(name)}`"] for name in order]
        for share in self.memory:
            own = {name: cells[share] for name, cells in found.items() if share in cells}
            first = best(map(value_of, own.values()), default=None)
            winners = [name for name, row in own.items() if value_of(row) == first]
            known = {}
            for winner in winners if marks else ():
                known |= {name: mark for name, mark in marks(share, winner).items() if mark or name not in known}
            for line, name in zip(lines, order):
                mark = "" if name in winners or not marks else known.get(name, "?")
                line.append(cell(own[name], name in winners, mark) if name in own else "-")
        return table(["policy", *(f"{share} of the memory" for share in self.memory)], lines)

    def speed(self):
        """Returns, for each GPU, a paragraph about its decode speeds and their table."""
        found, parts = {}, []
        for row in self.rows:
            if row["metric"].startswith(SPEED):
                found.setdefault(gpu_of(row), []).append(row)
        for gpu, rows in found.items():
            words = rows[0]["command"].split()
            parts += [wrapped(
                f"Decoded tokens per second of all sequences together on one {gpu}, with the number of sequences in parentheses (1, or the largest "
                "number that fits in memory, at most 2,047), and the speed relative to the full cache in the same column. Each sequence decodes "
                f"{int(option(words, '--max-new-tokens')):,} tokens after a prompt of {int(option(words, '--prompt-tokens')):,}. The weights, "
                "keys and values are random, because the speed depends only on the model's shape. `kvlab bench evict` times single steps "
                "at several lengths, and integrates over the length."
            ), speed_table(rows)]  # fmt: skip
        return parts


def speed_table(rows):
    """A row for each policy, two columns for each memory. The fastest policy at the largest batch is first, after the full
    cache."""
    runs = {}
    for row in rows:
        runs.setdefault((row["policy"], row["memory"]), []).append(row)
    for own in runs.values():
        own.sort(key=batch_of)
    full = runs.pop(("full", "100%"), None)
    shares = sorted({share for _, share in runs}, key=percent)
    names = dict.fromkeys(name for name, _ in runs)
    order = sorted(names, key=lambda name: -sum(value_of(runs[name, share][-1]) for share in shares if (name, share) in runs))
    lines = []
    for name in ["full"] * bool(full) + order:
        lines.append([f"`{short(name)}`"])
        for share in shares:
            own = full if name == "full" else runs.get((name, share))
            for end in (0, -1):  # one sequence, the largest batch
                text = f"{value_of(own[end]):,.0f} ({batch_of(own[end]):,})" if own else "-"
                if own and full and name != "full":
                    text += f", {value_of(own[end]) / value_of(full[end]):.2f}x"
                lines[-1].append(text)
    return table(["policy", *(f"{share} of the memory, {what}" for share in shares for what in ("one sequence", "largest batch"))], lines)


def compared(models):
    """Which policies the rank correlations are over."""
    unlike = dict.fromkeys(
        short(name) for model in models for plan in model.formats for name in model.values("accuracy", plan) if name not in model.values("kl", plan)
    )
    text = "Rank correlations (Spearman) over the policies that were measured with the same settings."
    return text + f" Those of KL and accuracy leave out {listed(unlike)}." if unlike else text


def agreement(models):
    """Rank correlations between the criteria on each model, and between models."""
    lines = []
    for plan in models[0].formats:
        for share in models[0].memory:

            def order(model, metric, sign=1, plan=plan, share=share):
                return {name: sign * value_of(own[share]) for name, own in model.values(metric, plan).items() if share in own}

            losses = {model.name: order(model, "kl") for model in models}
            first = losses[models[0].name]
            line = [correlation(losses[model.name], order(model, "accuracy", -1)) for model in models]
            line += [correlation(first, losses[model.name]) for model in models[1:]]
            line += [correlation(losses[model.name], order(model, at("kl", length))) for model in models for length in model.lengths]
            if any(value != "-" for value in line):
                lines.append([label(plan), share, *line])
    header = ["format", "memory", *(f"KL and accuracy on `{model.name}`" for model in models),
              *(f"KL on `{models[0].name}` and on `{model.name}`" for model in models[1:]),
              *(f"KL on `{model.name}` and at {length:,} tokens" for model in models for length in model.lengths)]  # fmt: skip
    return table(header, lines)


def correlation(one, other):
    names = [name for name in one if name in other]
    value = spearman([one[name] for name in names], [other[name] for name in names]) if len(names) > 2 else math.nan
    return "-" if math.isnan(value) else f"{value:.2f}"


def predictors(rows):
    """A table of the metrics of a replay: the rank correlation of each with KL."""
    found = {}
    for row in rows:
        if row["metric"].startswith(PREDICTS):
            found.setdefault(row["metric"].removeprefix(PREDICTS), {})[row["model"], row["memory"]] = row
    columns = list(dict.fromkeys(key for own in found.values() for key in own))
    lines = [[f"`{name}`", *(f"{value_of(own[key]):.2f}" if key in own else "-" for key in columns)] for name, own in found.items()]
    return table(["metric", *(f"`{model}` {budget}" for model, budget in columns)], lines)


def cell(row, is_best, mark):
    text = f"**{number(value_of(row))}**" if is_best else number(value_of(row))
    if row["low"] not in ("", None):
        text += f" ({number(max(float(row['low']), 0))} to {number(float(row['high']))})"
    return f"{text} {mark}".rstrip()


def number(value):
    return f"{value:.3g}" if value >= 1e-3 else f"{value:.1g}"


def value_of(row):
    return float(row["value"])


def batch_of(row):
    return int(row["metric"].removeprefix(SPEED).split()[0])


def percent(share):
    return float(share.removesuffix("%"))


def short(policy):
    """The name of a policy without its parameters."""
    return policy.partition(":")[0]


def listed(names):
    return ", ".join(f"`{name}`" for name in names)


def option(words, name):
    return words[words.index(name) + 1]


def label(plan):
    return "16 bit" if plan == "16" else "plan" if "x" in plan else f"format `{plan}`"


def task_names(metrics):
    names = [metric.removeprefix(ACCURACY) for metric in metrics]
    return ", ".join(f"`{name}`" if name in RULER else name for name in names)


def gpu_of(row):
    """The GPU and the data type of a decode speed."""
    return row["metric"].partition(" on ")[2]


def fault_of(row):
    """What is wrong with a row of the CSV, or None."""
    if None in row or None in row.values() or list(row) != COLUMNS:
        return f"the columns should be {','.join(COLUMNS)}"
    empty = [name for name in COLUMNS if name not in ("low", "high") and not row[name]]
    if empty:
        return f"{empty[0]} is empty"
    try:
        value, count = float(row["value"]), int(row["count"])
        low, high = (float(row[name] or value) for name in ("low", "high"))
        percent(row["memory"])
    except ValueError as error:
        return str(error)
    if not (-math.inf < low <= value <= high < math.inf) or count < 1:
        return "value should be a number between low and high, and count above 0"
    if not row["command"].startswith(("kvlab ", "pooled over the tasks")):
        return "command should be the kvlab command that measured the value"
    needed = NEEDED.get(row["metric"].partition(" ")[0], ())
    missing = [name for name in needed if not re.search(f" {name} " + ("[^-]" if name in ("--text", "--random-weights") else r"\d"), row["command"])]
    return f"command should have {missing[0]} and its value" if missing else None


def read_rows(path):
    """The rows of a CSV as dictionaries of texts. Refuses a file with a wrong or a repeated row."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise Refused(f"{path}: has no rows")
    seen = set()
    for line, row in enumerate(rows, 2):
        fault = fault_of(row)
        if not fault and key_of(row) in seen:
            fault = "repeats the model, policy, memory, format and metric of an earlier row"
        if fault:
            raise Refused(f"{path}:{line}: {fault}")
        seen.add(key_of(row))
    return rows


def write_page(path, rows):
    """Writes the page, and its rows to the CSV beside it. If the rows make no page, raises Refused and writes nothing."""
    text = page(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator=os.linesep)
        lines.writeheader()
        lines.writerows(rows)
    path.write_text(text)


def key_of(row):
    return tuple(row[name] for name in COLUMNS[:5])
