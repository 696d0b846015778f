"""Tests tools/experiments/leaderboard.py and decode_speed.py with a program that imitates kvlab on a machine with a GPU.
The program refuses the policy lagkv except on the CPU, and prints fixed numbers. Also tests summary.py on the CSV."""

import contextlib
import csv
import importlib
import io
import json
import pathlib
import stat
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/experiments"))
NAMES = ("decode_speed", "leaderboard", "leaderboard_page", "rerun_cells", "summary")
decode_speed, leaderboard, leaderboard_page, rerun_cells, summary = map(importlib.import_module, NAMES)

PROGRAM = f"#!{sys.executable}" + r'''
import json, pathlib, sys

words = sys.argv[1:]
option = lambda name, default="": words[words.index(name) + 1] if name in words else default
policies, budgets = option("--policy").split(","), option("--budget").split(",")
on_cpu = option("--device") == "cpu"
open(pathlib.Path(__file__).with_suffix(".log"), "a").write(" ".join(words) + "\n")
if words[0] == "--version":
    print("kvlab of a test")
    sys.exit()
if words[0] == "policies":
    shared = {"evicts": True, "decodes": True, "positions": "original", "modifiers": []}
    print(json.dumps({"policies": [shared | {"name": name} for name in ("h2o", "sink", "lagkv", "window", "r_kv")]}))
    sys.exit()
if "r_kv" in policies or ("lagkv" in policies and not on_cpu):
    sys.exit("kvlab eval: policy " + policies[0] + ": the CUDA decoder does not support it")
if words[0] == "bench":
    run = lambda batch, rate: {"batch": batch, "tokens_per_second": rate}
    def result(name):
        if name == "window":
            return {"policy": name, "budget_tokens": 512, "refused": "device memory: too little"}
        rate = {"h2o": 200.5, "sink": 251}[name]
        return {"policy": name, "budget_tokens": 512, "evicting": run(1, rate), "largest_evicting": run(40, 20 * rate)}
    print(json.dumps({"device": "GPU", "dtype": "bfloat16", "full": run(1, 100.5), "largest_full": run(10, 1000.5),
                      "configurations": [result(name) for name in policies]}))
    sys.exit()
if "--out" not in words:
    sys.exit()
policies = [name.partition(":")[0] for name in policies]
out = pathlib.Path(option("--out"))
out.mkdir()
if words[0] == "eval":
    # lagkv is the best, but does not differ significantly from h2o.
    kl = {"h2o": 0.2, "sink": 0.3, "lagkv": 0.1, "window": 0.4}
    significant = lambda a, b: {a, b} != {"h2o", "lagkv"}
    pair = lambda a, b, first, second, mean: {
        "a": a, "b": b, "a_policy": first, "b_policy": second,
        "kl": {"mean": mean, "low": mean - 0.01, "high": mean + 0.01, "significantly_different": significant(first, second)}}
    pairs = [pair(i + 1, 0, name, "full", kl[name]) for i, name in enumerate(policies)]
    pairs += [pair(i + 1, j + 1, one, other, 0.1) for i, one in enumerate(policies) for j, other in enumerate(policies[:i])]
    (out / "eval.json").write_text(json.dumps({
        "tokens": 100, "engine_dtype": "float32" if on_cpu else "bfloat16", "pairs": pairs,
        "configurations": [{"kv_bytes_peak": 1000}] * (len(policies) + 1)}))
if words[0] == "fidelity":
    (out / "fidelity.json").write_text(json.dumps({"metrics": {"recall": {"within": {"12%": 0.5}}}}))
if words[0] == "task":
    tasks = option("--tasks", words[1]).split(",")
    samples = int(option("--samples")) * (6 if "--words" in words else 1)
    easy = {"passkey", "niah_single_1", "niah_single_2"}
    rows = ["task,policy,params,budget,words,depth,metric,value,low,high,count"]
    for task in tasks:
        for name in dict.fromkeys(["full", *policies]):
            for budget in ["all"] if name == "full" else budgets:
                if (name, budget, words[1]) == ("window", "6%", "passkey"):
                    continue  # as if protected tokens exceeded the budget
                share = 0.25 if name != "full" else 1 if task in easy else 0.5
                rows.append(f"{task},{name},,{budget},all,all,exact_match,{share},{share},{share},{samples}")
    (out / "task.csv").write_text("\n".join(rows) + "\n")
'''


class Leaderboard(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.kvlab = self.folder / "kvlab"
        self.kvlab.write_text(PROGRAM)
        self.kvlab.chmod(stat.S_IRWXU)
        self.model = self.folder / "planted"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))

    def run_it(self, *words):
        """Returns the page with its paragraphs in one line each, and the rows of the CSV as {(policy, memory, metric): row}."""
        page = self.folder / "page.md"
        command = ["leaderboard.py", "--kvlab", self.kvlab, "--model", self.model, "--text", "a.txt", "b.txt", "--out", page]
        command += ["--keep", self.folder / "keep", *words]
        with unittest.mock.patch("sys.argv", list(map(str, command))), contextlib.redirect_stderr(io.StringIO()) as said:
            leaderboard.leaderboard()
        self.said = said.getvalue()
        self.lines = leaderboard_page.read_rows(page.with_suffix(".csv"))
        rows = [row for row in self.lines if row["model"] == self.model.name]
        parts = [part if part.startswith("|") else part.replace("\n", " ") for part in page.read_text().split("\n\n")]
        return "\n\n".join(parts), {(row["policy"], row["memory"], row["metric"]): row for row in rows}

    def commands(self, first):
        return [line for line in self.kvlab.with_suffix(".log").read_text().splitlines() if line.startswith(first)]

    def test_tasks_that_the_full_cache_answers_are_pooled(self):
        page, rows = self.run_it("--jobs", 3)
        # 200 questions are spread over three tasks. This gives 67 for a task, or 72 for a task with six combinations of
        # length and depth.
        self.assertEqual([rows["h2o", "6%", f"accuracy: {task}"]["count"] for task in ("pass key", "niah_single_1")], ["72", "67"])
        pooled = rows["h2o", "6%", "accuracy"]
        self.assertEqual(pooled["count"], "206")
        self.assertAlmostEqual(float(pooled["value"]), 52 / 206)  # 25% of 206 answers, rounded to whole answers
        self.assertIn("206 questions of pass key, `niah_single_1`, `niah_single_2`. The full cache answers 100% of them.", page)
        self.assertIn("of 24 questions: needle (50%), one needle of four", page)
        self.assertEqual(rows["full", "100%", "accuracy: vt"]["value"], "0.5")
        self.assertNotIn(("h2o", "6%", "accuracy: vt"), rows)
        # `window` lacks the answers of one task, so its accuracy over all tasks cannot be compared with that of other
        # policies.
        self.assertIn(("window", "6%", "accuracy: niah_single_1"), rows)
        self.assertNotIn(("window", "6%", "accuracy"), rows)
        self.assertIn("| `window` | - | **0.252**", page)
        self.assertIn('words. "-": protected tokens exceed the budget of some questions.', page)
        command = rows["h2o", "50%", "accuracy: niah_single_2"]["command"]
        self.assertEqual(
            command,
            "kvlab task ruler --tasks niah_single_2 --model planted --length 1024 --samples 67 --query-agnostic "
            "--policy h2o --budget 50% --tiers 16",
        )

    def test_a_model_that_answers_too_little_has_kl_alone(self):
        self.kvlab.write_text(PROGRAM.replace("1 if task in easy else 0.5", "0.5"))
        page, rows = self.run_it()
        self.assertIn("### Accuracy\n\nLeft out, because the full cache answers fewer than 80% of 24 questions: pass key (50%)", page)
        self.assertFalse([key for key in rows if key[0] != "full" and key[2].startswith("accuracy")])

    def test_a_task_command_has_all_budgets(self):
        self.run_it("--answers", 30, "--length", 512)
        found = self.commands("task ruler --tasks niah_single_1 ")
        self.assertEqual(len(found), 1)
        self.assertIn("--length 512 --samples 10 --policy h2o,sink,window --budget 6%,12%,25%,50% ", found[0])

    def test_policies_that_the_device_refuses_are_left_out(self):
        page, rows = self.run_it()
        self.assertIn("lagkv is left out: policy lagkv: the CUDA decoder does not support it", self.said)
        self.assertFalse([key for key in rows if key[0] == "lagkv"])
        self.assertIn("| `h2o` | **0.2** (0.19 to 0.21) |", page)
        self.assertIn("KL: a, b; at most 4,096 tokens of each, in windows of 2,048 tokens.", page)

    def test_a_policy_is_added(self):
        before = self.run_it()[1]
        page, rows = self.run_it("--device", "cpu", "--policy", "lagkv", "--answers", 0)
        self.assertEqual({key: row for key, row in rows.items() if key in before}, before)
        self.assertTrue(rows["lagkv", "6%", "kl"]["command"].endswith("--policy lagkv --budget 6% --tiers 16 --device cpu"))
        self.assertIn("measured on the CPU in float32: `lagkv`.", page)
        # h2o, the best of the first run, was evaluated beside it, so that they are compared in pairs.
        self.assertEqual(len([line for line in self.commands("eval") if "--policy lagkv,h2o " in line]), 4)
        self.assertIn("| `lagkv` | **0.1** (0.09 to 0.11) |", page)
        self.assertIn("| `h2o` | 0.2 (0.19 to 0.21) = |", page)
        self.assertIn("| `sink` | 0.3 (0.29 to 0.31) ? |", page)  # it was not evaluated beside lagkv
        self.assertIn(("lagkv", "6%", "kl"), rows)
        self.assertNotIn(("lagkv", "6%", "accuracy"), rows)
        # A complete run removes the old rows of what it measured, and keeps those of other policies and formats.
        old = rows["sink", "6%", "kl"]
        path = self.folder / "page.csv"
        with open(path, "a", newline="") as file:
            lines = csv.DictWriter(file, leaderboard_page.COLUMNS)
            lines.writerows([old | {"metric": "old"}, old | {"format": "4"}])
        page, again = self.run_it()
        self.assertNotIn(("sink", "6%", "old"), again)
        self.assertEqual(len([row for row in self.lines if row["format"] == "4"]), 1)
        self.assertEqual({key: row for key, row in again.items() if row["format"] == "16"}, rows)
        self.assertIn("| `lagkv` | **0.1** (0.09 to 0.11) |", page)
        self.assertIn("| `h2o` | 0.2 (0.19 to 0.21) = |", page)

    def test_long_windows_stay_beside_short_ones(self):
        before = self.run_it()[1]
        page, rows = self.run_it("--long", "--tokens", 4096, "--device", "cpu")
        self.assertEqual({key: row for key, row in rows.items() if " at 4096 tokens" not in key[2]}, before)
        self.assertEqual(rows["lagkv", "6%", "kl at 4096 tokens"]["value"], "0.1")
        command = "--window 4096 --max-tokens 4096 --prompt-tokens 819 --policy lagkv --budget 6% --tiers 16 --device cpu"
        self.assertTrue(rows["lagkv", "6%", "kl at 4096 tokens"]["command"].endswith(command))
        section = page.partition("### KL at 4,096 tokens, 16 bit")[2].partition("\n### ")[0]
        self.assertIn("KL: a, b; at most 4,096 tokens of each, in windows of 4,096 tokens.", section)
        self.assertIn("| `lagkv` | **0.1** (0.09 to 0.11) |", section)
        self.assertIn("| `h2o` | 0.2 (0.19 to 0.21) = |", section)
        # lagkv has no KL in short windows, so the table of these has no row of it.
        self.assertNotIn("| `lagkv` |", page.partition("### KL, 16 bit")[2].partition("\n### ")[0])
        self.assertIn("KL on `planted` and at 4,096 tokens", page)
        # A complete run of either length replaces its own rows alone.
        self.assertEqual(self.run_it()[1], rows)
        self.assertEqual(self.run_it("--long", "--tokens", 4096, "--device", "cpu")[1], rows)

    def test_rows_that_make_no_page_are_refused(self):
        row = self.run_it()[1]["h2o", "6%", "kl"]
        speed = row | {"metric": "tokens_per_s: batch 1 on GPU", "low": "", "high": "",
                       "command": "kvlab bench evict --random-weights a.json --prompt-tokens 1 --max-new-tokens 1"}  # fmt: skip
        for rows, words in (
            ([], "has no rows"),
            ([row | {"metric": "accuracy"}], "no row has the metric kl"),
            ([speed], "no row has the metric kl"),
            ([row, speed | {"model": "other"}, row | {"model": "other", "metric": "accuracy"}], "other: no row has the metric kl"),
        ):
            with open(self.folder / "page.csv", "w", newline="") as file:
                lines = csv.DictWriter(file, leaderboard_page.COLUMNS)
                lines.writeheader()
                lines.writerows(rows)
            with self.assertRaises(leaderboard.Refused) as refused:
                leaderboard_page.page(leaderboard_page.read_rows(self.folder / "page.csv"))
            self.assertIn(words, str(refused.exception))
        row["command"] = row["command"].replace("--text a.txt b.txt", "") + " --text a.txt b.txt"
        self.assertIn("KL: a, b;", leaderboard_page.page([row]))

    def test_another_model_keeps_the_rows_of_the_first(self):
        first = self.run_it()[1]
        self.model = self.model.with_name("second")
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
        page = self.run_it("--device", "cpu", "--policy", "lagkv", "--answers", 0)[0]
        self.assertEqual(len([row for row in self.lines if row["model"] == "planted"]), len(first))
        self.assertIn("Not measured on this model: `lagkv`.", page.partition("## `second`")[0])
        self.assertIn("Not measured on this model: `h2o`, `sink`, `window`.", page.partition("## `second`")[2])

    def test_unknown_policies_are_refused(self):
        for name, reason in (("nowhere", "nowhere is not a registered policy"), ("r_kv", "the CUDA decoder does not support it")):
            with self.assertRaises(leaderboard.Refused) as refused:
                self.run_it("--policy", name)
            self.assertIn(reason, str(refused.exception))
        self.assertFalse((self.folder / "page.csv").exists())

    def test_wrong_rows_are_refused(self):
        rows = self.run_it()[1]
        row = rows["h2o", "6%", "kl"]
        self.assertIsNone(leaderboard_page.fault_of(row))
        for change, words in (
            ({"value": "5"}, "between low and high"),
            ({"count": "many"}, "many"),
            ({"memory": "all"}, "all"),
            ({"policy": ""}, "policy is empty"),
            ({"command": "echo"}, "should be the kvlab command"),
            ({"command": row["command"].replace("--text", "--txt")}, "should have --text"),
            ({"command": row["command"].replace("--max-tokens 4096", "--max-tokens")}, "should have --max-tokens"),
        ):
            self.assertIn(words, leaderboard_page.fault_of(row | change))
        path = self.folder / "page.csv"
        text = path.read_text()
        path.write_text(text + text.splitlines()[1] + "\n")
        with self.assertRaises(leaderboard.Refused) as refused:
            self.run_it()
        self.assertIn("repeats the model, policy", str(refused.exception))

    def measure_speed(self, *words, context=2048, name="planted"):
        """Runs decode_speed.py. Returns the page and the rows of the model's decode speeds."""
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps({"max_position_embeddings": context}))
        page = self.folder / "page.md"
        command = ["decode_speed.py", "--kvlab", self.kvlab, "--config", config, "--out", page, "--keep", self.folder / "keep", *words]
        with unittest.mock.patch("sys.argv", list(map(str, command))), contextlib.redirect_stderr(io.StringIO()) as said:
            decode_speed.decode_speed()
        self.said = said.getvalue()
        self.lines = leaderboard_page.read_rows(page.with_suffix(".csv"))
        rows = [row for row in self.lines if row["model"] == name and row["metric"].startswith("tokens_per_s")]
        return page.read_text(), {(row["policy"], row["memory"], row["metric"]): row for row in rows}

    def test_decode_speed(self):
        before = self.run_it()[1]
        self.run_it("--device", "cpu", "--policy", "lagkv", "--answers", 0)
        page, rows = self.measure_speed("--memory", "6%", "25%", context=1 << 17)
        # One command for each share. Its policies are those whose KL was measured on the GPU.
        half = "--prompt-tokens 4096 --max-new-tokens 4096 --batch 1"
        config = self.folder / "planted.json"
        self.assertEqual(self.commands("bench"), [
            f"bench evict --random-weights {config} --policy h2o,sink,window --budget {share} {half} --json" for share in ("6%", "25%")
        ])  # fmt: skip
        single, largest = (f"tokens_per_s: batch {batch} on GPU in bfloat16" for batch in (1, 40))
        self.assertEqual(rows["sink", "6%", largest]["value"], "5020")
        self.assertEqual(
            rows["sink", "25%", single]["command"], f"kvlab bench evict --random-weights planted.json --policy sink --budget 25% {half}"
        )
        self.assertEqual(rows["full", "100%", largest.replace("40", "10")]["value"], "1000.5")
        self.assertEqual(len(rows), 2 + 2 * 2 * 2)  # of the full cache, and of two policies at two shares
        # The full cache is first, then the fastest policy.
        table = page.partition("### Decode speed")[2].partition("|")[2].partition("\n\n")[0].splitlines()[2:]
        full, sink, h2o = "| 100 (1) | 1,000 (10) ", "| 251 (1), 2.50x | 5,020 (40), 5.02x ", "| 200 (1), 2.00x | 4,010 (40), 4.01x "
        self.assertEqual(table, [f"| `full` {2 * full}|", f"| `sink` {2 * sink}|", f"| `h2o` {2 * h2o}|"])
        self.assertIn("window at 6% was not measured: device memory: too little", self.said)
        # Rows of the other metrics stay, and a complete run of the leaderboard keeps the speeds.
        self.assertEqual([row for row in self.lines if row in before.values()], [*before.values()])
        self.assertEqual({key: row for key, row in self.run_it()[1].items() if key in rows}, rows)

    def test_old_decode_speeds_are_replaced(self):
        self.run_it()
        rows = self.measure_speed("--memory", "6%", "25%")[1]
        path = self.folder / "page.csv"
        old = rows["sink", "6%", "tokens_per_s: batch 40 on GPU in bfloat16"]
        others = [old | change for change in (
            {"metric": "tokens_per_s: batch 41 on GPU in bfloat16"},  # an earlier largest batch
            {"policy": "window"},  # refused now
            {"metric": "tokens_per_s: batch 40 on other GPU in bfloat16"},
        )]  # fmt: skip
        with open(path, "a", newline="") as file:
            csv.DictWriter(file, leaderboard_page.COLUMNS).writerows(others)
        page, again = self.measure_speed()
        self.assertEqual(len(again), len(rows) + 3)  # nothing of another share
        page, again = self.measure_speed("--memory", "6%")
        kept = others[2]
        self.assertEqual(again, rows | {(kept["policy"], kept["memory"], kept["metric"]): kept})
        self.assertIn("on one other GPU in bfloat16,", page.replace("\n", " "))

    def test_a_model_with_only_decode_speeds(self):
        self.run_it()
        # Its policies are those of all models.
        page, rows = self.measure_speed(name="llama-3.1-8b", context=4096)
        self.assertEqual(rows["h2o", "25%", "tokens_per_s: batch 1 on GPU in bfloat16"]["value"], "200.5")
        self.assertIn("--policy h2o,sink,window --budget 25% --prompt-tokens 2048 --max-new-tokens 2048 ", self.commands("bench")[0])
        section = page.partition("## `llama-3.1-8b` (random weights: only the shape counts)\n\n")[2].partition("\n## ")[0]
        self.assertTrue(section.startswith("Decoded tokens per second of all sequences together on one GPU in bfloat16,"))
        self.assertIn("| `h2o` | 200 (1), 2.00x | 4,010 (40), 4.01x |", section)
        for words in ("KL", "Accuracy", "Not measured"):
            self.assertNotIn(words, section)
        self.assertNotIn("llama", page.partition("## Do the criteria")[2])
        self.assertIn("Models: `planted`. Of `llama-3.1-8b`, only the decode speed was measured.", page.replace("\n", " "))
        self.assertEqual(self.lines[-1]["model"], "llama-3.1-8b")
        self.assertEqual({row["model"] for row in self.measure_speed("--name", "shape", name="llama")[1].values()}, set())
        self.assertEqual(self.lines[-1]["model"], "shape")

    def test_failed_decode_speeds_write_nothing(self):
        self.run_it()
        files = [self.folder / f"page.{ending}" for ending in ("csv", "md")]
        before = [file.read_text() for file in files]
        self.kvlab.write_text(PROGRAM.replace('if words[0] == "bench":', 'if words[0] == "bench" and "25%" in words:\n    '
                                              'sys.exit("kvlab bench: device memory: none")\nif words[0] == "bench":'))  # fmt: skip
        for words, reason in (
            (["--memory", "6%", "25%"], "kvlab bench evict at 25%: device memory: none"),
            (["--memory", "512"], "--memory: 512 is not a share"),
            (["--out", self.folder / "none.md"], "none.csv: cannot be read"),
        ):
            with self.assertRaises(leaderboard.Refused) as refused:
                self.measure_speed(*words)
            self.assertIn(reason, str(refused.exception))
        self.assertEqual([file.read_text() for file in files], before)
        # Without a policy on the GPU there is nothing to measure.
        files[0].unlink()
        self.run_it("--device", "cpu", "--policy", "lagkv", "--answers", 0)
        with self.assertRaises(leaderboard.Refused) as refused:
            self.measure_speed()
        self.assertIn("no policy whose KL was measured on a GPU", str(refused.exception))

    def rerun(self, *words):
        """Runs rerun_cells.py on the CSV. Returns its exit status and its table."""
        command = ["rerun_cells.py", "--kvlab", self.kvlab, "--csv", self.folder / "page.csv", *words]
        with unittest.mock.patch("sys.argv", list(map(str, command))), contextlib.redirect_stderr(io.StringIO()):
            with contextlib.redirect_stdout(io.StringIO()) as out, self.assertRaises(SystemExit) as ended:
                rerun_cells.rerun()
        return ended.exception.code, out.getvalue()

    def test_cells_drawn_by_lot_are_run_again(self):
        self.run_it("--answers", 30)
        status, text = self.rerun("--count", 12, "--device", "cpu")
        self.assertEqual((status, text.count("| yes |")), (0, 12))
        self.assertEqual(len([line for line in self.commands("") if line.endswith("--device cpu") or "--device cpu --out" in line]), 12)
        self.assertEqual(self.rerun("--count", 12, "--device", "cpu"), (status, text))
        self.assertNotEqual(self.rerun("--count", 12, "--seed", 2)[1], text)
        # kvlab's values are no longer those of the CSV.
        self.kvlab.write_text(PROGRAM.replace('"h2o": 0.2', '"h2o": 0.25').replace('"sink": 0.3', '"sink": 0.25').replace("0.25 if", "0.5 if"))
        status, text = self.rerun("--count", 12)
        self.assertEqual(status, 1)
        self.assertIn("| no |", text)
        with self.assertRaises(leaderboard.Refused):
            with unittest.mock.patch("sys.argv", ["rerun_cells.py", "--csv", str(self.folder / "page.csv"), "--count", "100000"]):
                rerun_cells.rerun()

    def test_kept_results_are_reused(self):
        first = self.run_it()
        measured = self.commands("task") + self.commands("fidelity") + self.commands("eval")
        self.assertEqual(self.run_it(), first)
        self.assertEqual(self.commands("task") + self.commands("fidelity") + self.commands("eval"), measured)
        page = self.measure_speed()
        self.assertEqual(self.measure_speed(), page)
        self.assertEqual(len(self.commands("bench")), 1)


class Summary(unittest.TestCase):
    def test_readme_names_the_questions(self):
        def row(model, policy, metric, value, count="144"):
            return dict.fromkeys(leaderboard_page.COLUMNS, "") | {
                "model": model, "policy": policy, "memory": "25%" if policy != "full" else "100%", "format": "16",
                "metric": metric, "value": str(value), "low": str(value - 0.06), "high": str(value + 0.09), "count": count,
            }  # fmt: skip

        rows = [row("smollm2", "h2o:sinks=0", f"accuracy: {task}", 0.5) for task in ("pass key", "vt")]
        rows += [row("smollm2", policy, "accuracy", 0.5) for policy in summary.POLICIES]
        text = " ".join(summary.sentences(rows).split())
        self.assertIn("144 questions (pass key, `vt`)", text)
        self.assertIn("6 to 9 points", text)
        self.assertIn("at least 80% of each task", text)
        self.assertNotIn("also ranks", text)
        rows += [row("smollm2", "full", "accuracy", 0.97), row("other", "h2o:sinks=0", "accuracy: needle", 0.5)]
        text = " ".join(summary.sentences(rows).split())
        self.assertIn("The full cache answers 97% of the questions.", text)
        self.assertIn("The leaderboard also ranks the policies on another model, `other`.", text)
        speed = row("shape", "h2o:sinks=0", "tokens_per_s: batch 1 on GPU", 0.5)
        self.assertEqual(" ".join(summary.sentences([*rows, speed]).split()), text)


if __name__ == "__main__":
    unittest.main()
