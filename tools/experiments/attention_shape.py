#!/usr/bin/env python3
"""How attention is distributed: sparsity, heavy hitters, and whether they persist.

Zhang et al. 2023, H2O (arXiv:2306.14048), sections 3.1 and 3.2; Liu et al. 2023, Scissorhands (arXiv:2305.17118),
section 3.
"""

import numpy
from experiment import Experiment, main, table

from kvlab import Trace

QUESTION = """
Eviction can work because attention is uneven. This page measures how uneven it is, by layer, under the full cache:

- *sparsity*: the share of a row's entries that are below 1% of the row's largest (H2O, section 3.1);
- *heavy hitters*: the share of all attention that the 5% and the 20% of the tokens with the largest sums receive, and
  the slope of log sum against log rank over the first fifth of the tokens, where a power law is a straight line (H2O,
  section 3.2);
- *persistence*: among the tokens of the first half of the text that receive more than the mean in the second half, the
  share that already received more than the mean in the first half (Scissorhands, section 3).
"""


def measures(attention):
    """Computes the measures of the page from one head's probabilities [query, key]. Returns sparsity, the share of the
    mass that the top 5% of tokens have, the share that the top 20% have, slope, and persistence."""
    tokens = len(attention)
    rows = numpy.arange(1, tokens + 1)
    seen = numpy.tri(tokens, dtype=bool)
    sparse = ((attention < 0.01 * attention.max(axis=1, keepdims=True)) & seen).sum() / rows.sum()
    mass = numpy.sort(attention.sum(axis=0))[::-1]
    first = numpy.cumsum(mass) / mass.sum()
    fifth = tokens // 5
    slope = numpy.polyfit(numpy.log(rows[:fifth]), numpy.log(mass[:fifth] + 1e-12), 1)[0]
    half = tokens // 2
    early, late = attention[:half, :half].sum(axis=0), attention[half:, :half].sum(axis=0)
    # Divides each token's sum over the first half by the number of queries that could see the token, because an older
    # token was seen by more of these queries. All queries of the second half could see these tokens.
    early /= half - numpy.arange(half)
    important, was = late > late.mean(), early > early.mean()
    lasting = (important & was).sum() / max(1, important.sum())
    return sparse, first[tokens // 20], first[fifth], slope, lasting


def attention_shape():
    experiment = Experiment(__doc__)
    tokens = experiment.arguments.tokens or experiment.quick(512, 2048)
    trace = Trace(experiment.capture(tokens))
    lines = []
    for layer in range(trace.layers):
        heads = range(trace.query_heads)
        by_head = numpy.array([measures(trace.attention(layer, head)) for head in heads])
        lines.append([layer, *(f"{value:.2f}" for value in by_head.mean(axis=0))])
    lines.append(["all", *(f"{numpy.mean([float(line[column]) for line in lines]):.2f}" for column in range(1, 6))])
    header = ["layer", "sparsity", "first 5% receive", "first 20% receive", "slope", "persistence"]
    experiment.section(f"## By layer, means of the heads, {trace.tokens} tokens\n\n" + table(header, lines))
    experiment.write("The shape of attention", QUESTION)


main(attention_shape)
