#!/usr/bin/env python3
"""How often the comparer's intervals hold what they should: three texts against all others, in the closed loop.

Needs the kvlab package. Windows of the texts count as texts of their own.
"""

import itertools
import json
import pathlib
import random
import subprocess

import kvlab
from experiment import Experiment, Refused, main, table

POLICIES = ["window", "sink", "lru", "h2o", "a2sf", "tova"]
QUESTION = """
A verdict from a few texts should hold on other texts. So three texts are drawn at random, again and again; each pair of
policies is compared on them, and the interval is held against the mean difference over all the other texts. It should
hold that mean in 90 to 97% of the cases, and be at most 1.3 times as wide as Student's interval of the texts' means.
`random` under two seeds should be told apart in at most 8%.
"""
STUDENT = 4.302653  # of three


def windows(experiment, folder, most):
    """Files of as many characters as `tokens` tokens surely have, cut from the texts in turn."""
    length = 8 * experiment.tokens
    files = []
    cuts = [
        (pathlib.Path(path).stem, text[start : start + length])
        for path in experiment.arguments.text
        for text in [pathlib.Path(path).read_text()]
        for start in range(0, len(text) - length + 1, length)
    ]
    for name, text in cuts[:: max(1, len(cuts) // most)][:most]:
        files.append(folder / f"{name}-{len(files)}.txt")
        files[-1].write_text(text)
    if len(files) < 10:
        raise Refused(f"--text: {len(files)} windows of {length} characters; at least 10 are needed: longer texts")
    return files


def kl_by_text(experiment, files, policies, budget, seed):
    """{policy: [KL of each text]} of one closed loop."""
    arguments = experiment.arguments
    command = [arguments.kvlab, "eval", "--json", "--model", arguments.model, "--text", *files, "--policy",
               ",".join(policies), "--budget", budget, "--max-tokens", experiment.tokens, "--seed", seed]  # fmt: skip
    command += ["--device", arguments.device] if arguments.device else []
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr.strip().splitlines()[-1])
    found = {}
    for one in json.loads(done.stdout)["configurations"]:
        found[one["policy"]] = [text["kl"] for text in one["by_text"]]
    return found


def draws_of(count, most):
    every = list(itertools.combinations(range(count), 3))
    return random.Random(1).sample(every, min(most, len(every)))


def covered(found, draws):
    """(share of intervals that hold the others' mean, mean half width over Student's, cases)."""
    held, widths, cases = 0, 0.0, 0
    for first, second in itertools.combinations(found, 2):
        a, b = found[first], found[second]
        differences = [x - y for x, y in zip(a, b)]
        for drawn in draws:
            rest = [d for i, d in enumerate(differences) if i not in drawn]
            own = [differences[i] for i in drawn]
            said = kvlab.difference([a[i] for i in drawn], [b[i] for i in drawn])
            held += said.low <= sum(rest) / len(rest) <= said.high
            mean = sum(own) / 3
            student = STUDENT * (sum((d - mean) ** 2 for d in own) / 2 / 3) ** 0.5
            widths += (said.high - said.low) / 2 / student
            cases += 1
    return held / cases, widths / cases, cases


def told_apart(a, b, draws):
    said = [kvlab.difference([a[i] for i in drawn], [b[i] for i in drawn]).told_apart for drawn in draws]
    return sum(said) / len(said)


def coverage():
    experiment = Experiment(__doc__.splitlines()[0])
    budget = experiment.quick(64, 128)
    folder = pathlib.Path(experiment.scratch.name)
    files = windows(experiment, folder, experiment.quick(12, 24))
    found = kl_by_text(experiment, files, [*POLICIES, "random"], budget, 0)
    full = found.pop("full", None)
    other = kl_by_text(experiment, files, ["random"], budget, 1)["random"]
    one = found.pop("random")
    draws = draws_of(len(files), 500)
    share, width, cases = covered(found, draws)
    apart = told_apart(one, other, draws)
    pairs = len(found) * (len(found) - 1) // 2
    experiment.section(
        f"{len(files)} texts of {experiment.tokens} tokens, budget {budget}, {pairs} pairs of {', '.join(found)}"
        f"{'; full is the yardstick' if full else ''}.\n\n"
        + table(
            ["what", "measured", "bar"],
            [
                [f"intervals that hold the other texts' mean, of {cases}", f"{100 * share:.1f}%", "90 to 97%"],
                ["mean half width, of Student's", f"{width:.3f}", "at most 1.3"],
                ["`random` under two seeds told apart", f"{100 * apart:.1f}%", "at most 8%"],
            ],
        )
    )
    experiment.write("Do the intervals hold?", QUESTION)


if __name__ == "__main__":
    main(coverage)
