"""Helpers of the experiments: they run kvlab, read its tables, and write a Markdown page that is not edited by hand.

Each script in this folder writes one page, with the results of one run (docs/results/README.md). All scripts
that evaluate a model take

    --kvlab build/kvlab --model DIR --out PAGE.md [--text FILE...] [--tokens N] [--device cpu|cuda] [--quick]
"""

import argparse
import csv
import hashlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = sorted((ROOT / "tools/texts").glob("*.txt"))


class Refused(Exception):
    """A request that cannot be carried out. The message is one line."""


def parse_arguments(purpose, models, add_arguments):
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--kvlab", default=str(ROOT / "build/kvlab"), help="the command (default: build/kvlab)")
    if models is not None:
        several = {"nargs": "+"} if models else {}
        parser.add_argument("--model", required=True, help="checkpoint, such as engine/models/smollm2", **several)
        parser.add_argument("--text", nargs="+", default=[str(text) for text in TEXTS], help="default: tools/texts/*.txt")
        parser.add_argument("--tokens", type=int, help="number of tokens of each text")
        parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a device")
        parser.add_argument("--quick", action="store_true", help="a smaller run, which takes minutes on a CPU")
    parser.add_argument("--out", required=True, help="the page to write")
    parser.add_argument("--keep", metavar="DIR", help="keep the results of commands in DIR, and reuse the results "
                        "that are there; use another DIR if kvlab, a model or a text has changed")
    if add_arguments:
        add_arguments(parser)
    return parser.parse_args()


class Experiment:
    """A page: its runs and their tables."""

    def __init__(self, purpose, models=False, arguments=None):
        """`models`: whether `--model` takes several models. `self.models` lists them; runs use `self.model`. None: the
        script evaluates no model, so it has no `--model` and none of the options beside it.

        `arguments`: a function that adds the script's own arguments to the parser.
        """
        self.arguments = parse_arguments(purpose, models, arguments)
        if models is not None:
            self.models = self.arguments.model if models else [self.arguments.model]
            self.model = self.models[0]
        self.sections = []
        self.scratch = None if self.arguments.keep else tempfile.TemporaryDirectory()
        self.results = pathlib.Path(self.arguments.keep or self.scratch.name)
        self.results.mkdir(parents=True, exist_ok=True)

    def quick(self, small, whole):
        return small if self.arguments.quick else whole

    @property
    def tokens(self):
        """Number of tokens of each text. Without --tokens it does not exceed the model's context."""
        return self.arguments.tokens or min(self.quick(1024, 2560), self.context())

    def context(self):
        config = pathlib.Path(self.model) / "config.json"
        return json.loads(config.read_text()).get("max_position_embeddings", 1 << 30)

    def kvlab(self, command, *options, table=None, device=None):
        """Runs `kvlab command`. Returns the rows of the table that it wrote, as dictionaries, or the output's path.

        `device`: the value of --device. None: the value of the script's own --device. "": no option, for commands that
        do not have it. The output is named after a hash of the words, so a repeated command finds its result.
        """
        options = [*map(str, options)]
        if device or (device is None and self.arguments.device):
            options += ["--device", device or self.arguments.device]
        words = [*command, *options]
        out = self.results / f"{command[0]}-{short_hash(chr(0).join(words))}"
        print(" ".join(["kvlab", *words]), file=sys.stderr)
        if not out.exists():
            done = subprocess.run([self.arguments.kvlab, *words, "--out", out], stdout=subprocess.DEVNULL)
            if done.returncode:
                raise Refused(f"kvlab {' '.join(command)} failed with exit status {done.returncode}")
        return self.rows(out / table) if table else out

    def bench(self, *words):
        """Runs `kvlab bench`. Returns what it prints as JSON and None, or None and the reason why it failed."""
        words = ["bench", *map(str, words), "--json"]
        out = self.results / f"bench-{short_hash(chr(0).join(words))}.json"
        print(" ".join(["kvlab", *words]), file=sys.stderr)
        if not out.exists():
            with tempfile.TemporaryFile("w+") as found:
                said = ""
                with subprocess.Popen([self.arguments.kvlab, *words], stdout=found, stderr=subprocess.PIPE, text=True) as bench:
                    for line in bench.stderr:
                        said = line.strip() or said
                        print(said, file=sys.stderr)  # progress, or the reason of a failure
                if bench.returncode:
                    return None, (said or f"exit status {bench.returncode}").removeprefix("kvlab bench: ")
                found.seek(0)
                write_whole(out, found.read())
        return json.loads(out.read_text()), None

    def rows(self, path):
        with open(path, newline="") as file:
            return list(csv.DictReader(file))

    def capture(self, tokens, prompt=None, text=None):
        """Captures a trace of `text`, by default of the first text."""
        return self.kvlab(
            ["capture"], "--model", self.model, "--prompt-file", text or self.arguments.text[0], "--teacher-forced",
            "--prompt-tokens", prompt or tokens // 4, "--max-tokens", tokens,
        )  # fmt: skip

    def add_feature(self, trace, name):
        """Adds a feature to a finished trace with the Python package."""
        self.python(f"feature {name}", "features", trace, "--feature", name, "--model", self.model)

    def add_gradients(self, trace, samples):
        """Adds samples of gradients to a finished trace with the Python package, unless an earlier run added them."""
        added = trace.with_name(trace.name + ".gradients")
        if not added.exists():
            self.python("gradients", "sensitivities", trace, "--model", self.model, "--samples", samples)
            added.touch()

    def python(self, what, *words):
        """Runs `python -m kvlab.hf` with the words."""
        command = [sys.executable, "-m", "kvlab.hf", *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise Refused(f"{what}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")

    def plan(self, trace, budget, formats, *options):
        """The plan file of `kvlab plan` as a dictionary."""
        words = ["--trace", trace, "--budget", budget, "--formats", formats, *options]
        return json.loads(pathlib.Path(self.kvlab(["plan"], *words, device="")).read_text())

    def eval(self, policies, budgets, *options, texts=None, tokens=None, prompt=None, device=None):
        """Runs the end-to-end evaluation over every text, or over `texts`. Returns the rows of eval.csv for all texts
        together."""
        out = self.evaluation(policies, budgets, *options, texts=texts, tokens=tokens, prompt=prompt, device=device)
        return [row for row in self.rows(out / "eval.csv") if row["text"] == "all"]

    def evaluation(self, policies, budgets, *options, texts=None, tokens=None, prompt=None, device=None):
        """The folder of the end-to-end evaluation over every text, or over `texts`."""
        tokens = tokens or self.tokens
        return self.kvlab(
            ["eval"], "--model", self.model, "--text", *(texts or self.arguments.text), "--window", tokens,
            "--max-tokens", tokens, "--prompt-tokens", prompt or tokens // 5, "--policy", ",".join(policies),
            "--budget", ",".join(map(str, budgets)), *options, device=device,
        )  # fmt: skip

    def pass_keys(self, policies, budgets, words, samples, *options, device=None):
        """The share of right answers of the pass-key task over all depths, in the form that values() returns. The
        questions come after the eviction."""
        rows = self.kvlab(
            ["task", "passkey"], "--model", self.model, "--words", words, *options, "--samples", samples, "--policy",
            ",".join(policies), "--budget", ",".join(map(str, budgets)), "--query-agnostic", table="task.csv", device=device,
        )  # fmt: skip
        rows = [row | {"stderr": ""} for row in rows if row["words"] == row["depth"] == "all"]
        return values(rows, "exact_match")

    def registry(self):
        """The output of `kvlab policies --json`: the registered policies, in order, and H2O's presets."""
        done = subprocess.run([self.arguments.kvlab, "policies", "--json"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def policies(self):
        return self.registry()["policies"]

    def refusal(self, policy, device=None):
        """kvlab's error message if the engine cannot run `policy`, otherwise None."""
        few = ["--max-tokens", "192", "--window", "192", "--prompt-tokens", "96", "--budget", "100"]
        device = device or self.arguments.device
        device = ["--device", device] if device else []
        words = ["eval", "--model", self.model, "--text", self.arguments.text[0], "--policy", policy, *few, *device]
        out = self.results / f"refusal-{short_hash(chr(0).join(words))}.json"
        if not out.exists():
            done = subprocess.run([self.arguments.kvlab, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode < 0:
                raise Refused(f"kvlab eval was ended by signal {-done.returncode}")
            write_whole(out, json.dumps(done.stderr.strip().splitlines()[-1] if done.returncode else None))
        return json.loads(out.read_text())

    def section(self, text):
        """Adds text to the page. Paragraphs of one line are wrapped; headings, tables and lists stay."""
        self.sections += map(wrapped, text.strip().split("\n\n"))

    def write(self, title, question, reads_texts=True):
        """Writes the page. `reads_texts`: whether the results depend on --text and --tokens."""
        models = ", ".join(map(name_of_model, self.models))
        version = subprocess.check_output([self.arguments.kvlab, "--version"], text=True).splitlines()[0]
        texts = ", ".join(pathlib.Path(text).stem for text in self.arguments.text)
        limits = f"{self.tokens} tokens of each at most{', with `--quick`' * self.arguments.quick}"
        made = [
            f"Made by `tools/experiments/{pathlib.Path(sys.argv[0]).name}`; no number is typed by hand. Model: {models}.",
            f"Texts: {texts}, {limits}." if reads_texts else "",
            f"{version}, on {self.arguments.device or 'the default device'}.",
        ]
        page = [f"# {title}", question.strip(), "\n".join(filter(None, made)), *self.sections]
        path = pathlib.Path(self.arguments.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(page) + "\n")


def write_whole(path, text):
    """Writes a file that exists only if it is complete, so that an interrupted run does not keep a part of it."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def wrapped(part):
    """Wraps a paragraph of one line. Headings, tables and lists stay as they are."""
    return part if "\n" in part or part[0] in "#-" else textwrap.fill(part, 118)


def checkout_path(path):
    """The path as it is written in a command that runs in the checkout."""
    path = pathlib.Path(path).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_of_model(directory):
    return f"`{pathlib.Path(directory).name}`"


def values(rows, metric, by=("policy", "params", "budget")):
    """Returns {(policy, params, budget): (value, standard error)} of one metric."""
    return {
        tuple(row[name] for name in by): (float(row["value"]), float(row["stderr"] or "nan"))
        for row in rows
        if row["metric"] == metric
    }


def tier_plan_of(params):
    """Splits `keep=0.99:…:tiers=16@16t+4@100%` into the parameters without the tier plan and the centre, and the tier
    plan."""
    parts = params.split(":")
    tier_plan = [part[6:] for part in parts if part.startswith("tiers=")]
    rest = ":".join(part for part in parts if not part.startswith(("tiers=", "centre=")))
    return rest, (tier_plan[0].replace("@", ":").replace("+", ",") if tier_plan else "16")


def ranks(numbers):
    """Ranks of the numbers; 1 is the lowest. Equal numbers share the mean of their ranks."""
    order = sorted(numbers)
    return [order.index(number) + (order.count(number) + 1) / 2 for number in numbers]


def spearman(one, other):
    """Spearman's rank correlation; NaN if all numbers of a list are equal."""
    one, other = ranks(one), ranks(other)
    mean = (len(one) + 1) / 2
    both = sum((a - mean) * (b - mean) for a, b in zip(one, other))
    alone = [sum((a - mean) ** 2 for a in own) for own in (one, other)]
    return both / (alone[0] * alone[1]) ** 0.5 if all(alone) else float("nan")


def mean_and_error(numbers):
    """The mean of the numbers, and its standard error."""
    mean = sum(numbers) / len(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / max(len(numbers) - 1, 1)
    return mean, (variance / len(numbers)) ** 0.5


def number_with_error(pair, digits=3):
    """A value rounded to `digits` digits, with its standard error at the same place."""
    value, error = pair
    places = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
    return f"{value:.{places}f}" if math.isnan(error) else f"{value:.{places}f} ± {error:.{places}f}"


def table(header, rows):
    """A Markdown table of rows of texts."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def name_of_policy(policy, params):
    return f"`{policy}:{params}`" if params else f"`{policy}`"


def ranking(found, budgets, best=min):
    """A row for each policy, a column for each budget. The best value of a column is bold unless half of them share it.
    """
    budgets = [str(budget) for budget in budgets]
    names = list(dict.fromkeys(key[:2] for key in found if key[2] in budgets))
    lines = [[name_of_policy(*name)] for name in names]
    for budget in budgets:
        column = [found[(*name, budget)] for name in names]
        first = best(value for value, _ in column)
        shared = sum(value == first for value, _ in column) * 2 > len(column)
        for line, cell in zip(lines, column):
            line.append(f"**{number_with_error(cell)}**" if cell[0] == first and not shared else number_with_error(cell))
    return table(["policy", *budgets], lines)


def main(experiment):
    """Runs a script. Refused requests print one line and exit with 2."""
    try:
        experiment()
    except (Refused, OSError) as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
