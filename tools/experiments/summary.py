#!/usr/bin/env python3
"""Checks docs/results/leaderboard.csv, and writes what is made from it: the leaderboard's page, README's table with the
sentences below it, and README's picture.

    python3 tools/experiments/summary.py           # rewrites docs/results/leaderboard.md, README.md and docs/images/smollm2.svg
    python3 tools/experiments/summary.py --check   # exits with 1 if they differ from the CSV
"""

import math
import pathlib
import sys
import textwrap

from experiment import Refused
from leaderboard_page import SPEED, page, read_rows, task_names

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "smollm2"
POLICIES = {  # name: colour in the picture; those without are in the table alone
    "h2o_mean": "#0072b2",
    "a2sf": "#56b4e9",
    "h2o": "#d55e00",
    "streaming_h2o": "",
    "roco": "#009e73",
    "sink": "#cc79a7",
    "window": "#666666",
}
NAMES = {"sink": "`sink` (StreamingLLM)"}
KL_AT, ACCURACY_AT = ["12%", "25%", "50%"], ["25%", "50%"]
BEGIN, END = "<!-- table of tools/experiments/summary.py -->", "<!-- end of the table -->"
PICTURE = ROOT / "docs/images/smollm2.svg"


def cells_of(rows):
    """Returns {(metric, policy, memory): row} for the model in 16 bit."""
    own = [row for row in rows if row["model"] == MODEL and row["format"] == "16"]
    return {(row["metric"], row["policy"].partition(":")[0], row["memory"]): row for row in own}


def sentences(rows):
    """Returns the sentences below the table. They say which tasks its right answers are from, and which other models
    the leaderboard has."""
    shown = [row for (metric, policy, memory), row in cells_of(rows).items()
             if metric == "accuracy" and policy in POLICIES and memory in ACCURACY_AT]  # fmt: skip
    tasks = [row["metric"].removeprefix("accuracy: ") for row in rows
             if row["model"] == MODEL and row["policy"] != "full" and row["metric"].startswith("accuracy: ")]  # fmt: skip
    counts = sorted({int(row["count"]) for row in shown})
    sides = [100 * abs(float(row["value"]) - float(row[end])) for row in shown for end in ("low", "high")]
    full = [row["value"] for row in rows if row["model"] == MODEL and row["policy"] == "full" and row["metric"] == "accuracy"]
    text = (
        f"Right answers: the share of {' or '.join(map(str, counts))} questions ({task_names(dict.fromkeys(tasks))}) that the model answers "
        f"right. Each question comes after the eviction. The 95% intervals of these shares reach {min(sides):.0f} to {max(sides):.0f} points to "
        f"either side. The full cache answers {f'{float(full[0]):.0%} of the questions' if full else 'at least 80% of each task'}."
    )
    others = [f"`{name}`" for name in dict.fromkeys(row["model"] for row in rows if not row["metric"].startswith(SPEED)) if name != MODEL]
    if others:
        text += f" The leaderboard also ranks the policies on {'another model' if len(others) == 1 else 'other models'}, {', '.join(others)}."
    return textwrap.fill(text, 120, break_on_hyphens=False)


def table(cells):
    memory = {share: float(cells["kv_bytes_peak", "window", share]["value"]) / 2**20 for share in KL_AT}
    heads = [f"KL at {share}, {memory[share]:.1f} MiB" for share in KL_AT] + [f"right answers at {share}" for share in ACCURACY_AT]
    columns = [("kl", share) for share in KL_AT] + [("accuracy", share) for share in ACCURACY_AT]
    lines = ["| policy | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 1) + "|"]
    best = {}
    for metric, share in columns:
        shown = [float(cells[metric, policy, share]["value"]) for policy in POLICIES]
        best[metric, share] = min(shown) if metric == "kl" else max(shown)
    for policy in POLICIES:
        line = [NAMES.get(policy, f"`{policy}`")]
        for metric, share in columns:
            row = cells[metric, policy, share]
            value, half = float(row["value"]), (float(row["high"]) - float(row["low"])) / 2
            text, error = (f"{value:.3g}", f" ± {half:.1g}") if metric == "kl" else (f"{value:.0%}", "")
            line.append((f"**{text}**" if value == best[metric, share] else text) + error)
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def picture(cells):
    """Two charts over memory: KL, on a logarithmic axis, and the share of right answers."""
    shares = ["6%", "12%", "25%", "50%"]
    low, high = 0.004, 4.0
    panels = [
        ("kl", "KL (nats), lower is better", 60,
         lambda kl: 40 + 230 * math.log(high / min(max(kl, low), high)) / math.log(high / low), [0.01, 0.1, 1]),
        ("accuracy", "right answers, higher is better", 440, lambda share: 270 - 230 * share, [0, 0.25, 0.5, 0.75, 1]),
    ]  # fmt: skip
    drawn = [policy for policy, colour in POLICIES.items() if colour]
    words = []
    for metric, title, *_ in panels:
        for policy in drawn:
            values = ", ".join(f"{float(cells[metric, policy, share]['value']):.3g}" for share in shares)
            words.append(f"{title.partition(',')[0]}, {policy}: {values}")
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 350" width="800" height="350" role="img" aria-labelledby="t d">',
        f'<title id="t">KL and right answers of {len(drawn)} policies against memory, on SmolLM2-135M-Instruct</title>',
        f'<desc id="d">At {", ".join(shares)} of the memory. {"; ".join(words)}.</desc>',
        "<style>text{font:12px sans-serif;fill:#555}.h{font-size:13px;font-weight:bold}@media(prefers-color-scheme:dark)"
        "{text{fill:#bbb}}</style>",
    ]  # fmt: skip
    for metric, title, left, y_of, ticks in panels:
        x_of = dict(zip(shares, (left + 30 + 90 * i for i in range(4))))
        parts.append(f'<text class="h" x="{left}" y="22">{title}</text>')
        for tick in ticks:
            label = f"{tick:.0%}" if metric == "accuracy" else f"{tick:g}"
            parts.append(f'<line x1="{left}" x2="{left + 330}" y1="{y_of(tick):.1f}" y2="{y_of(tick):.1f}" stroke="#8884"/>')
            parts.append(f'<text x="{left - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{label}</text>')
        for share, x in x_of.items():
            parts.append(f'<text x="{x}" y="290" text-anchor="middle">{share}</text>')
        for policy in drawn:
            points = [(x, y_of(float(cells[metric, policy, share]["value"]))) for share, x in x_of.items()]
            way = " ".join(f"{x},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{way}" fill="none" stroke="{POLICIES[policy]}" stroke-width="2"/>')
            parts += [f'<circle cx="{x}" cy="{y:.1f}" r="3.5" fill="{POLICIES[policy]}"/>' for x, y in points]
    parts.append('<text x="225" y="308" text-anchor="middle">memory, as a share of the full cache</text>')
    parts.append('<text x="605" y="308" text-anchor="middle">memory, as a share of the full cache</text>')
    for i, policy in enumerate(drawn):
        x = 90 + 115 * i
        parts.append(f'<rect x="{x}" y="328" width="14" height="4" fill="{POLICIES[policy]}"/>')
        parts.append(f'<text x="{x + 20}" y="334">{policy}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    path = ROOT / "docs/results/leaderboard.csv"
    try:
        rows = read_rows(path)
        text = page(rows)
    except Refused as error:
        sys.exit(str(error))
    cells = cells_of(rows)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    try:
        made = {
            path.with_suffix(".md"): text,
            readme: f"{before}{BEGIN}\n{table(cells)}\n\n{sentences(rows)}\n{END}{rest.split(END)[1]}",
            PICTURE: picture(cells),
        }
    except KeyError as error:
        sys.exit(f"{path}: no row of {MODEL} in 16 bit for {error}, which README shows")
    if "--check" in sys.argv[1:]:
        differ = [str(file.relative_to(ROOT)) for file, text in made.items() if text != file.read_text()]
        if differ:
            print(f"{', '.join(differ)}: not as docs/results/leaderboard.csv says; run tools/experiments/summary.py")
        sys.exit(1 if differ else 0)
    for file, text in made.items():
        file.write_text(text)


if __name__ == "__main__":
    main()
