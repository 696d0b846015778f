#!/usr/bin/env python3
"""Compares policies of kvlab with presses of kvpress in kvpress's own evaluation.

    python3 tools/scripts/press_harness.py KVPRESS engine/models/smollm2 snapkv h2o:once knorm:once --ratio 0.5 0.75

KVPRESS is a checkout of kvpress. This script makes items in RULER's format. The code in KVPRESS/evaluation reads them,
runs kvpress's pipeline and scores the answers. A name in kvpress's registry selects that press. Any other name, and
any name after `kvlab:`, selects a policy, which runs as a KvlabPress.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
import tempfile
from typing import Any

TEXT = pathlib.Path(__file__).resolve().parents[1] / "texts" / "carroll-alice.txt"
TOWNS = ["Lisbon", "Vienna", "Oslo", "Cairo", "Lima", "Dublin", "Havana", "Kyoto", "Quito", "Geneva", "Tunis", "Riga"]
TASKS = {"niah_single": (1, 1), "niah_multikey": (8, 1), "niah_multivalue": (1, 4)}  # towns, numbers per town


def items(contexts: int, words: int, seed: int = 0) -> list[dict[str, Any]]:
    """Items of each task: a text that hides secret numbers of towns, and a question for the numbers of the first town.
    """
    rng, text = random.Random(seed), TEXT.read_text().split()
    rows = []
    for task, (towns, values) in TASKS.items():
        for _ in range(contexts):
            first, names = rng.randrange(len(text) - words), rng.sample(TOWNS, towns)
            hay = text[first : first + words]
            numbers = {name: [str(rng.randrange(100000, 1000000)) for _ in range(values)] for name in names}
            for name, number in [(name, number) for name in names for number in numbers[name]]:
                hay.insert(rng.randrange(len(hay)), f"\nA secret number of {name} is {number}.\n")
            row = {"task": task, "context": "Remember the secret numbers of towns in this text.\n" + " ".join(hay) + "\n"}
            row["question"] = f"\nWhich secret numbers of {names[0]} were in the text?\n"
            row["answer_prefix"] = f"The secret number{'s' if values > 1 else ''} of {names[0]} {'are' if values > 1 else 'is'}"
            rows.append(row | {"answer": numbers[names[0]], "max_new_tokens": 12 * values})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kvpress", type=pathlib.Path, help="folder of a checkout of kvpress")
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("press", nargs="+")
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.75])
    parser.add_argument("--contexts", type=int, default=8, help="number of contexts of each task")
    parser.add_argument("--words", type=int, default=500, help="number of words in a context")
    requested = parser.parse_args()
    sys.path.insert(0, str(requested.kvpress / "evaluation"))
    import evaluate
    import kvlab

    with tempfile.TemporaryDirectory() as scratch:
        lines = [json.dumps(row) + "\n" for row in items(requested.contexts, requested.words)]
        (pathlib.Path(scratch) / "test.jsonl").write_text("".join(lines))
        evaluate.DATASET_REGISTRY["ruler"] = scratch
        for name in requested.press:
            evaluate.PRESS_REGISTRY.setdefault(name, kvlab.KvlabPress(name.removeprefix("kvlab:")))
        print("| press | ratio |", " | ".join(TASKS), "|\n| --- | --- |", " --- |" * len(TASKS))
        for name, ratio in [("no_press", 0.0), *((name, ratio) for name in requested.press for ratio in requested.ratio)]:
            words = {"model": requested.model, "press_name": name, "compression_ratio": ratio, "log_level": "WARNING"}
            runner = evaluate.EvaluationRunner(evaluate.EvaluationConfig(**words, output_dir=scratch + "/results"))
            runner.run_evaluation()
            (made,) = pathlib.Path(scratch).glob(f"results/*__{name}__{ratio:.2f}/metrics.json")
            scores = json.loads(made.read_text())
            print(f"| {name} | {ratio:g} |", " | ".join(f"{scores[task]['string_match']:.1f}" for task in TASKS), "|")


if __name__ == "__main__":
    main()
