#!/usr/bin/env python3
"""How often 95% intervals contain the truth, for texts of equal and of unequal lengths.

Needs the kvlab package. Each window of a text counts as a text.
"""

import collections
import itertools
import pathlib
import random
import statistics

import kvlab
import numpy
from experiment import Experiment, Refused, main, table

POLICIES = ["window", "sink", "lru", "h2o", "a2sf", "tova"]
QUESTION = """
An interval from a few texts should hold for other texts. This page samples texts of several lengths many times, and
compares two configurations on them by kvlab's estimator (docs/reference/recommendations.md). The interval should
contain the true difference in 90 to 97% of the cases, for any mixture of lengths. `random` under two seeds should
differ significantly in at most 8%.
"""
# Lengths of the texts in units; a unit is UNIT blocks, and a block is 64 scored tokens.
MIXTURES = [(1, 1), (1, 1, 1), (4, 1, 1), (10, 1), (8, 1, 1, 1), (10, 1, 1), (40, 1, 1, 1), (1,) * 5, (1,) * 8]
UNIT = 4
# Values of the variance between texts, divided by the variance within a block.
BETWEEN = [0.0, 0.05, 0.25]


def name_of(mixture):
    return ":".join(map(str, mixture))


def sampled(generator, skewed, size):
    """Random numbers of mean 0 and variance 1; skewed: from a gamma distribution of shape 4, whose skewness is 1."""
    return (generator.gamma(4, 1, size) - 4) / 2 if skewed else generator.standard_normal(size)


def simulated(mixture, between, skewed, trials):
    """The share of intervals that contain the true difference. The true difference is always 0, because another value
    would only shift the intervals by that value."""
    generator = numpy.random.default_rng(1)
    held = 0
    for _ in range(trials):
        texts = []
        for units in mixture:
            mean = between**0.5 * sampled(generator, skewed, 1)
            texts.append(mean + sampled(generator, skewed, UNIT * units))
        said = kvlab.difference(texts, [numpy.zeros(len(text)) for text in texts])
        held += said.low <= 0 <= said.high
    return held / trials


def simulate(experiment):
    trials = experiment.quick(2000, 20000)
    lines = []
    for mixture in MIXTURES:
        cells = [name_of(mixture)]
        for skewed in (False, True):
            cells += [f"{100 * simulated(mixture, between, skewed, trials):.1f}" for between in BETWEEN]
        lines.append(cells)
    header = ["lengths"] + [f"{kind}, {between:g}" for kind in ("normal", "skewed") for between in BETWEEN]
    experiment.section(
        f"## Simulated\n\nThe table shows the share of intervals that contain the true difference, in % of {trials} "
        f"samples. A unit of length is {UNIT} blocks. The second number of a column is the variance between texts over "
        f"that within a block; {1 / UNIT:g} is the variance of the mean of a text of one unit. Skewed: skewness 1, "
        "between and within texts.\n\n"
        + table(header, lines)
    )


def windows(experiment, folder, tokens, max_windows):
    """Cuts the texts into windows with enough characters for `tokens` tokens, and writes at most `max_windows` of them
    to files. Returns the paths."""
    length = 6 * tokens
    files = []
    cuts = [
        (pathlib.Path(path).stem, text[start : start + length])
        for path in experiment.arguments.text
        for text in [pathlib.Path(path).read_text()]
        for start in range(0, len(text) - length + 1, length)
    ]
    for name, text in cuts[:: max(1, len(cuts) // max_windows)][:max_windows]:
        files.append(folder / f"{name}-{len(files)}.txt")
        files[-1].write_text(text)
    if len(files) < 10:
        raise Refused(f"--text: has {len(files)} windows of {length} characters, but 10 are needed; give longer texts")
    return files


def blocks_by_text(experiment, files, policies, budget, seed, tokens):
    """Runs the end-to-end evaluation. Returns {policy: {text: [KL of each block of 64 tokens]}}."""
    window = min(1024, experiment.context())
    rows = experiment.kvlab(
        ["eval"], "--model", experiment.model, "--text", *files, "--policy", ",".join(policies), "--budget", budget,
        "--window", window, "--prompt-tokens", 64, "--max-tokens", tokens, "--seed", seed, table="blocks.csv",
    )  # fmt: skip
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        if row["metric"] == "kl" and float(row["weight"]) == 64:
            found[row["policy"]][row["trace"]].append(float(row["value"]))
    return {policy: list(texts.values()) for policy, texts in found.items()}


def samples_of(texts, mixture, resamples):
    """Yields samples. A sample is a list of (text, first block, number of blocks). The texts are random and different,
    the first blocks are random, and the lengths are those of `mixture`."""
    chosen = random.Random(1)
    for _ in range(resamples):
        places = []
        for text, units in zip(chosen.sample(range(len(texts)), len(mixture)), mixture):
            blocks = min(units, len(texts[text]))
            places.append((text, chosen.randrange(len(texts[text]) - blocks + 1), blocks))
        yield places


def description_of(a, b, places):
    return kvlab.difference(*([of[text][first : first + blocks] for text, first, blocks in places] for of in (a, b)))


def covered(found, mixture, resamples):
    """Returns the share of intervals that contain the mean difference over all other texts, and the number of
    intervals."""
    held = cases = 0
    for first, second in itertools.combinations(found, 2):
        a, b = found[first], found[second]
        differences = [statistics.fmean(x) - statistics.fmean(y) for x, y in zip(a, b)]
        for places in samples_of(a, mixture, resamples):
            own = {text for text, *_ in places}
            rest = statistics.fmean(d for text, d in enumerate(differences) if text not in own)
            said = description_of(a, b, places)
            held += said.low <= rest <= said.high
            cases += 1
    return held / cases, cases


def significant(a, b, mixture, resamples):
    said = [description_of(a, b, places) for places in samples_of(a, mixture, resamples)]
    return sum(one.low > 0 or one.high < 0 for one in said) / len(said)


def between_of(found):
    """Medians over pairs of policies: the variance between texts divided by the variance within a block, and the
    skewness of the texts' means."""
    ratios, skews = [], []
    for first, second in itertools.combinations(found, 2):
        texts = [numpy.subtract(x, y) for x, y in zip(found[first], found[second])]
        within = statistics.fmean(text.var(ddof=1) for text in texts)
        means = numpy.array([text.mean() for text in texts])
        length = statistics.fmean(len(text) for text in texts)
        ratios.append(max(0.0, means.var(ddof=1) - within / length) / within)
        skews.append(abs(((means - means.mean()) ** 3).mean() / means.std() ** 3))
    return statistics.median(ratios), statistics.median(skews)


def measure(experiment):
    budget = experiment.quick(64, 128)
    tokens = experiment.arguments.tokens or 3 * min(1024, experiment.context())
    folder = experiment.results
    files = windows(experiment, folder, tokens, experiment.quick(30, 60))
    found = blocks_by_text(experiment, files, [*POLICIES, "random"], budget, 0, tokens)
    found.pop("full", None)
    other = blocks_by_text(experiment, files, ["random"], budget, 1, tokens)["random"]
    one = found.pop("random")
    max_windows = min(map(len, one))
    resamples = experiment.quick(300, 3000)
    lines = []
    for mixture in MIXTURES:
        units = mixture if max(mixture) > 1 else (UNIT * 2,) * len(mixture)
        if max(units) > max_windows:
            lines.append([name_of(mixture), "texts are too short", "", ""])
            continue
        share, cases = covered(found, units, resamples)
        apart = significant(one, other, units, 10 * resamples)
        lines.append([name_of(mixture), " ".join(map(str, units)), f"{100 * share:.1f}", f"{100 * apart:.1f}"])
    ratio, skew = between_of(found)
    pairs = len(found) * (len(found) - 1) // 2
    experiment.section(
        f"## On real texts\n\n{len(files)} texts of {max_windows} blocks or more, budget {budget}, {resamples} samples for each of {pairs} "
        f"pairs of {', '.join(found)}. The truth is the mean difference over all texts that were not sampled. Median of the "
        f"pairs: the variance between texts is {ratio:.3f} times the variance of a block; the skewness of texts is {skew:.2f}.\n\n"
        + table(["lengths", "blocks", "intervals that contain the truth, %", "`random` under two seeds differs significantly, %"], lines)
    )


def coverage():
    experiment = Experiment(__doc__.splitlines()[0])
    simulate(experiment)
    measure(experiment)
    experiment.write("Coverage of the intervals", QUESTION)


if __name__ == "__main__":
    main(coverage)
