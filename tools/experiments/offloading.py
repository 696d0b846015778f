#!/usr/bin/env python3
"""Offloading: H2O's 29x and 3x on one GPU with a memory cap, split into policy, placement and engine.

    python3 tools/experiments/offloading.py --kvlab build/kvlab --out docs/results/offloading.md

Measures with kvlab and with those peers that are installed (accelerate, deepspeed, flexgen, transformers), appends each
measurement to the CSV beside the page, and writes the page. --page-only: only writes the page, from that CSV.
"""

import argparse
import contextlib
import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass

from experiment import ROOT, Refused, main, table, wrapped

QUESTION = """
This page compares kvlab's throughput with that of engines that offload to host memory, on a GPU with capped memory. It
splits each ratio into factors for the policy, the placement and the engine. H2O's authors report up to 29 times the
throughput of DeepSpeed and Accelerate and 3 times that of FlexGen, on a GPU with 16 GB (arXiv:2306.14048, section 5.3).
Their baselines keep weights or the cache in host memory, or run smaller batches. How much of such a ratio is due to the
policy, how much to what crosses the link between host and GPU, and how much to the engine?
"""
COLUMNS = ["system", "where", "batch", "prompt", "new", "metric", "repeat", "value", "note"]
PEER = pathlib.Path(__file__).with_name("offloading_peer.py")
PROMPT, NEW, SHARE = 512, (32, 512, 1024), "20%"
MODEL = ROOT / "engine/models/configs/llama-2-7b.json"
# Cells of each peer: [new tokens, batch, where]. "gpu": everything is on the GPU. "weights" or "cache": the weights of
# the layers, or the cache, are in host memory. The cells of the first three peers are taken from the benchmarks of
# H2O's authors (h2o_flexgen/benchmark).
PEERS = {
    "flexgen": [[32, 2, "gpu"], [512, 1, "gpu"], [1024, 1, "gpu"]],
    "accelerate": [[32, 2, "gpu"], [512, 1, "gpu"], [1024, 16, "weights"]],
    "deepspeed": [[new, 16, "weights"] for new in NEW],
    "transformers": [[new, 8, "cache"] for new in NEW],
}
LABELS = {
    "kvlab h2o": f"kvlab, `h2o` at {SHARE}", "kvlab full": "kvlab, full cache", "flexgen": "FlexGen",
    "accelerate": "Accelerate", "deepspeed": "DeepSpeed ZeRO-Inference", "transformers": "transformers, offloaded cache",
}  # fmt: skip
PLACES = {"gpu": "GPU", "weights": "weights in host memory", "cache": "cache in host memory"}
MAX_OF_LIMIT = 1.05  # as in engine/bench_limits.hpp: a higher share of a measured limit cannot be right
WANTED_SHARE = 0.8


def append_row(path, system, metric, value="", note="", **cell):
    """Appends a measurement to the CSV. `cell`: values of the other columns."""
    with open(path, "a", newline="") as file:
        row = {"system": system, "metric": metric, "value": value, "note": note, **cell}
        csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerow(row)


@dataclass
class Shape:
    """Bytes that a decode step reads, in 16 bit: of all layers, of the output matrix, and of the keys and values of one
    live token."""

    layers: float
    head: float
    token: float

    @classmethod
    def from_config(cls, path):
        config = json.loads(pathlib.Path(path).read_text())
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        matrices = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * config["intermediate_size"]
        return cls(2 * layers * matrices, 2 * config["vocab_size"] * hidden, 4 * layers * kv)


OPT_6_7B = Shape(layers=2 * 32 * 12 * 4096**2, head=2 * 50272 * 4096, token=4 * 32 * 4096)


@dataclass
class Rates:
    """Measured rates in bytes per second: of copies from pinned host memory to the GPU, and of reads of the GPU's
    memory."""

    link: float
    memory: float


@dataclass
class Cell:
    """Medians of one system with one number of new tokens. Times in seconds."""

    system: str
    where: str
    batch: int
    prompt: int
    new: int
    prefill: float
    steps: list[float]
    live: float  # tokens of a sequence that a step attends to, on average

    @property
    def step(self):
        return statistics.median(self.steps)

    @property
    def tokens_per_second(self):
        return self.batch * self.new / (self.prefill + (self.new - 1) * self.step)

    @property
    def decoded_per_second(self):
        return self.batch / self.step

    def limit(self, shape, rates):
        """Returns the shortest possible time of a step in seconds, and what limits it: "link" or "GPU memory". This
        time assumes that the link and the GPU's memory work at the same time, at their measured rates."""
        cache = self.batch * self.live * shape.token
        crossing = {"gpu": 0, "weights": shape.layers, "cache": cache}[self.where]
        times = {"link": crossing / rates.link, "GPU memory": (shape.layers + shape.head + cache) / rates.memory}
        slower = max(times, key=times.get)
        return times[slower], slower


class Measurement:
    """Runs everything, one process after another, and appends to the CSV."""

    def __init__(self, arguments):
        self.arguments, self.csv = arguments, csv_of(arguments)
        self.end = time.monotonic() + arguments.seconds
        self.csv.parent.mkdir(parents=True, exist_ok=True)
        self.csv.write_text(",".join(COLUMNS) + "\n")

    def run(self, command, seconds, system):
        """The output of a command, or None if it failed or was stopped. The reason is then in the CSV."""
        seconds = min(seconds, self.end - time.monotonic())
        print(" ".join(map(str, command)), file=sys.stderr, flush=True)
        if seconds <= 1:
            append_row(self.csv, system, "stopped", note="not started, because no time was left")
            return None
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with tempfile.TemporaryFile("w+") as errors:
            try:
                done = subprocess.run(
                    list(map(str, command)), stdout=subprocess.PIPE, stderr=errors, timeout=seconds, text=True, env=environment
                )
            except subprocess.TimeoutExpired:
                append_row(self.csv, system, "stopped", note=f"stopped after {seconds:.0f} s")
                return None
            if done.returncode == 0:
                return done.stdout
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
            append_row(self.csv, system, "failed", note=lines[-1] if lines else f"exit status {done.returncode}")
            print(*lines[-8:], sep="\n", file=sys.stderr)
            return None

    def peer(self, system, seconds, *options):
        command = [sys.executable, PEER, system, "--csv", self.csv, "--model", self.arguments.shape, "--repeats", self.arguments.repeats]
        return self.run([*command, *options], seconds, system)

    def bench(self, name, *options):
        words = [self.arguments.kvlab, "bench", name, "--random-weights", self.arguments.shape, *options, "--json"]
        out = self.run(words, 60, "kvlab")
        return json.loads(out) if out else None

    def all(self):
        version = subprocess.check_output([self.arguments.kvlab, "--version"], text=True).splitlines()[0]
        append_row(self.csv, "kvlab", "version", note=version)
        self.peer("limits", 60)
        self.prompts()
        with self.limit_memory():
            self.decoding()
            for system, cells in PEERS.items():
                if self.arguments.only and system not in self.arguments.only:
                    continue
                self.peer(system, self.arguments.peer_seconds, "--cells", json.dumps(cells))

    def prompts(self):
        """Measures the prompts of kvlab, one sequence after another. This happens before the memory is capped, because
        the benchmark needs the caches of six sequences."""
        for system, new in [("kvlab full", NEW[-1]), *(("kvlab h2o", new) for new in NEW)]:
            budget = (PROMPT + new) * int(SHARE[:-1]) // 100
            policy = [] if system == "kvlab full" else ["--policy", "h2o", "--budget", budget]
            found = self.bench("prefill", "--tokens", PROMPT, *policy)
            if found:
                append_row(self.csv, system, "prompt_seconds", found["milliseconds"] / 1e3, prompt=PROMPT, new=new, batch=1)

    def decoding(self):
        """Measures the decode steps of kvlab with the full cache and with h2o, each at the largest batch that fits, and
        the rate of kvlab's read kernel."""
        found = self.bench("decode", "--context", PROMPT, "--steps", 16)
        if found:
            append_row(self.csv, "limits", "memory_kvlab_read_bytes_per_second", found["read_bytes_per_second"])
        for repeat in range(self.arguments.repeats):
            for new in NEW:
                options = ["--policy", "h2o", "--budget", SHARE, "--prompt-tokens", PROMPT, "--max-new-tokens", new, "--batch", 1]
                found = self.bench("evict", *options)
                if found is None:
                    continue
                cell = {"where": "gpu", "prompt": PROMPT, "new": new, "repeat": repeat}
                evicting = found["configurations"][0]
                for system, own in (("kvlab full", found["largest_full"]), ("kvlab h2o", evicting["largest_evicting"])):
                    append_row(self.csv, system, "step_seconds", own["decode_seconds"] / new, batch=own["batch"], **cell)
                append_row(self.csv, "kvlab h2o", "budget_tokens", evicting["budget_tokens"], **cell)

    @contextlib.contextmanager
    def limit_memory(self):
        """In the `with` block, another process holds all memory of the GPU except the cap, so no system can allocate
        more than the cap."""
        words = [sys.executable, PEER, "hold", "--csv", self.csv, "--cap", self.arguments.cap]
        holder = subprocess.Popen(list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            if holder.stdout.readline().strip() != "holding":
                raise Refused("the memory cap could not be set; see the message above")
            yield
        finally:
            holder.stdin.close()
            holder.wait()


def csv_of(arguments):
    return pathlib.Path(arguments.out).with_suffix(".csv")


class Results:
    """What the CSV says."""

    def __init__(self, path, shape):
        if not path.exists():
            raise Refused(f"{path}: does not exist; measure first, without --page-only")
        with open(path, newline="") as file:
            self.rows = list(csv.DictReader(file))
        self.shape = shape
        rates = {row["metric"]: float(row["value"]) for row in self.rows if row["metric"].endswith("_bytes_per_second")}
        self.measured = {name.removesuffix("_bytes_per_second"): value for name, value in rates.items()}
        memory = [value for name, value in self.measured.items() if name.startswith("memory")]
        if not memory or "link_to_gpu" not in self.measured:
            raise Refused(f"{path}: has no rates of the link and of the GPU's memory; measure again")
        self.rates = Rates(self.measured["link_to_gpu"], max(memory))
        self.cells = {(cell.system, cell.new): cell for cell in self.read_cells()}

    def values(self, system, metric, new):
        return [float(row["value"]) for row in self.rows
                if (row["system"], row["metric"]) == (system, metric) and row["new"] == str(new) and row["value"]]  # fmt: skip

    def notes(self, metric, system=None):
        return [row["note"] for row in self.rows if row["metric"] == metric and system in (None, row["system"])]

    def read_cells(self):
        for system in LABELS:
            for new in NEW:
                rows = [row for row in self.rows if (row["system"], row["metric"], row["new"]) == (system, "step_seconds", str(new))]
                if not rows:
                    continue
                batch, prompt = int(rows[0]["batch"]), int(rows[0]["prompt"])
                budgets = self.values(system, "budget_tokens", new)
                yield Cell(
                    system, rows[0]["where"], batch, prompt, new, self.prefill(system, batch, new),
                    self.values(system, "step_seconds", new), budgets[0] if budgets else prompt + new / 2,
                )  # fmt: skip

    def prefill(self, system, batch, new):
        """Seconds of the prompts of a batch. For kvlab, the prompt of one sequence was measured; with the full cache
        its time does not depend on the new tokens."""
        if not system.startswith("kvlab"):
            return statistics.median(self.values(system, "prefill_seconds", new))
        one = self.values(system, "prompt_seconds", new) or self.values(system, "prompt_seconds", NEW[-1])
        return batch * one[0] if one else float("nan")

    def limit(self, cell):
        """Returns the tokens per second at the cell's own limit, the share of them that was reached, and what limits
        the cell."""
        seconds, what = cell.limit(OPT_6_7B if cell.system == "flexgen" else self.shape, self.rates)
        share = seconds / cell.step
        if share > MAX_OF_LIMIT:
            raise Refused(
                f"{cell.system}, {cell.new} new tokens: {share:.0%} of its limit, which is impossible; "
                "measure again"
            )
        return cell.batch / seconds, share, what

    def split(self, cell):
        """How `h2o` compares with `cell` while decoding: (ratio, policy, placement, engine). The ratio is their product."""
        ours, full = self.cells["kvlab h2o", cell.new], self.cells["kvlab full", cell.new]
        (best, share, _), (full_share, _, _), (limit, reached, _) = (self.limit(own) for own in (ours, full, cell))
        return ours.decoded_per_second / cell.decoded_per_second, best / full_share, full_share / limit, share / reached

    def peers(self, new):
        """Returns the cells of the peers. Empty unless both of kvlab's cells were measured, because peers are compared
        with them."""
        if not all((system, new) in self.cells for system in ("kvlab h2o", "kvlab full")):
            return []
        return [cell for (system, other), cell in self.cells.items() if other == new and system in PEERS]


def throughput(results):
    lines = []
    for new in NEW:
        for system, label in LABELS.items():
            cell = results.cells.get((system, new))
            if cell is None:
                continue
            limit, share, what = results.limit(cell)
            spread = (max(cell.steps) - min(cell.steps)) / cell.step / 2
            lines.append([
                new, label, PLACES[cell.where], cell.batch, f"{cell.prefill:.2f}", f"{cell.step * 1e3:.1f} ± {spread:.0%}",
                number(cell.tokens_per_second), number(cell.decoded_per_second), f"{number(limit)} ({what})", f"{share:.0%}",
            ])  # fmt: skip
    header = ["new tokens", "system", "where", "batch", "prompts, s", "ms for each step", "tokens/s", "tokens/s without prompts",
              "limit", "share of limit"]  # fmt: skip
    return table(header, lines)


def ratios(results):
    lines = []
    for new in NEW:
        for cell in [*results.peers(new), results.cells.get(("kvlab full", new))]:
            if cell is None or ("kvlab h2o", new) not in results.cells:
                continue
            total = results.cells["kvlab h2o", new].tokens_per_second / cell.tokens_per_second
            lines.append([new, LABELS[cell.system], f"{total:.2f}", *(f"{factor:.2f}" for factor in results.split(cell))])
    header = ["new tokens", f"`h2o` at {SHARE}, relative to", "with prompts", "without prompts", "policy", "placement", "engine"]
    return table(header, lines)


def findings(results):
    """Sentences of the page, made from the numbers."""
    text = []
    for system in PEERS:
        cells = [cell for new in NEW for cell in results.peers(new) if cell.system == system]
        if not cells:
            continue
        best_cell = max(cells, key=lambda cell: results.split(cell)[0])
        ratio, policy, placement, engine = results.split(best_cell)
        text.append(bullet(
            f"**{LABELS[system]}**: with {best_cell.new} new tokens, `h2o` decodes {ratio:.1f} times as many tokens per second. That is "
            f"{policy:.2f} (policy) × {placement:.2f} (placement) × {engine:.2f} (engine). The peer reaches "
            f"{results.limit(best_cell)[1]:.0%} of its limit ({results.limit(best_cell)[2]})."
        ))  # fmt: skip
    shares = [(results.limit(cell)[1], cell) for cell in results.cells.values() if cell.system.startswith("kvlab")]
    if shares:
        lowest, cell = min(shares, key=lambda pair: pair[0])
        text.append(bullet(
            f"**kvlab**: the target is at least {WANTED_SHARE:.0%} of the limit with each of the two caches. The lowest share is {lowest:.0%} "
            f"({LABELS[cell.system].removeprefix('kvlab, ')}, {cell.new} new tokens){'' if lowest >= WANTED_SHARE else ': **not reached**'}."
        ))  # fmt: skip
    return "\n".join(text)


def not_measured(results):
    reasons = []
    for system in PEERS:
        why = results.notes("failed", system) + results.notes("stopped", system)
        missing = [new for new in NEW if (system, new) not in results.cells]
        if missing:
            why += [f"{row['note']} ({row['new']} new tokens)" for row in results.rows
                    if (row["system"], row["metric"], row["batch"]) == (system, "out_of_memory", "1")]  # fmt: skip
            reasons.append(f"{LABELS[system]}, {', '.join(map(str, missing))} new tokens: {'; '.join(why) or 'not run'}.")
        elif why:
            reasons.append(f"{LABELS[system]}: fewer repetitions, because: {'; '.join(why)}.")
    halved = {LABELS[row["system"]]: row["note"] for row in results.rows if row["metric"] == "out_of_memory" and row["batch"] != "1"}
    return "\n".join(map(bullet, reasons + [f"{label}: {note}, so the batch was halved." for label, note in halved.items()]))


def bullet(text):
    return textwrap.fill("- " + text, 118, subsequent_indent="  ")


def number(value):
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def page(results):
    measured = {name: value / 1e9 for name, value in results.measured.items()}
    free = [float(row["value"]) for row in results.rows if row["metric"] == "free_bytes"]
    shape = results.shape
    versions = ", ".join(results.notes("version"))
    parts = [
        "# Offloading",
        QUESTION.strip(),
        "Made by `tools/experiments/offloading.py`; no number is typed by hand. Every measurement is in `offloading.csv`. "
        f"{', '.join(results.notes('device'))}. {versions}.",
        f"Shape of Llama-2-7B with random weights in 16 bit: {(shape.layers + shape.head) / 1e9:.2f} GB of matrices and {shape.token:,.0f} "
        "bytes of cache for each token. FlexGen runs only OPT, so it has the shape of OPT-6.7B, with the same bytes for each token. "
        f"Prompts have {PROMPT} tokens. `h2o` keeps {SHARE} of prompt and new tokens.",
        f"GPU memory is capped: a second process occupies the rest of it, so that {free[0] / 1e9:.1f} GB are free for each system, its "
        "CUDA context included. " if free else "GPU memory was not capped.",
        "Batches and placements of FlexGen, Accelerate and DeepSpeed are those of the benchmarks of H2O's authors, who tuned "
        "them for a GPU of 16 GB. kvlab runs the largest batch that fits. The time of a step depends on the length so far. "
        "For the peers it is measured at the middle length. For kvlab it is the mean of the times at the first and the last length, "
        "and with the full cache also at three lengths in between. The table has the median of the repetitions, ± half their range. "
        "Tokens/s counts new tokens only, but includes the time of the prompts. kvlab processes the prompts of a batch one after another; "
        "their time was measured without the cap.",
        "## Throughput and limits",
        f"The same run measured these rates. The link moves {measured['link_to_gpu']:.1f} GB/s to the GPU and "
        f"{measured.get('link_to_host', 0):.1f} GB/s back with pinned host memory, and {measured.get('pageable_to_gpu', 0):.1f} GB/s to the GPU "
        f"from pageable memory. GPU memory is read at {results.rates.memory / 1e9:,.0f} GB/s "
        f"({results.rates.memory / results.rates.link:.0f} times the rate of the link). The *limit* of a system, in tokens/s, is the "
        "rate that it would reach if a step took only the time to move its bytes at these rates: weights and live tokens from GPU "
        "memory and, at the same time, the bytes that are kept in host memory over the link. The name in parentheses is the slower of the two.",
        throughput(results),
        "## The ratio, split",
        "The table has the ratio of the tokens/s of `h2o` in kvlab to those of each other system. Without prompts, it is the product of "
        "three factors. *Policy*: the limit with `h2o` divided by the limit with the full "
        "cache in kvlab, each at its largest batch. *Placement*: the limit with the full cache in kvlab divided by the peer's limit. The "
        "peer's limit is lower if weights or cache cross the link or if its batch is smaller. *Engine*: the share of its limit that "
        "kvlab reaches with `h2o`, divided by the share that the peer reaches.",
        ratios(results),
        findings(results),
    ]  # fmt: skip
    missing = not_measured(results)
    parts += ["## Not measured, or measured differently", missing] if missing else []
    return "\n\n".join(wrapped(part) for part in parts if part) + "\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvlab", default=str(ROOT / "build/kvlab"), help="the command, built with CUDA (default: build/kvlab)")
    parser.add_argument("--out", required=True, help="the page to write; the CSV is beside it")
    parser.add_argument("--page-only", action="store_true", help="measure nothing; make the page from the CSV")
    parser.add_argument("--cap", type=int, default=16_000_000_000, help="cap of the GPU's memory: number of bytes "
                        "that stay free (default: 16 GB)")
    parser.add_argument("--seconds", type=float, default=3600, help="start no measurement after this many seconds "
                        "(default: 3600)")
    parser.add_argument("--peer-seconds", type=float, default=1200, help="stop a peer after this many seconds "
                        "(default: 1200)")
    parser.add_argument("--repeats", type=int, default=3, help="number of repetitions; the page has their medians "
                        "(default: 3)")
    parser.add_argument("--shape", default=str(MODEL), help="config.json of the model (default: Llama-2-7B)")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), help="peers to measure (default: all)")
    return parser.parse_args()


def offloading():
    arguments = parse_arguments()
    if not arguments.page_only:
        Measurement(arguments).all()
    text = page(Results(csv_of(arguments), Shape.from_config(arguments.shape)))
    pathlib.Path(arguments.out).write_text(text)


if __name__ == "__main__":
    main(offloading)
