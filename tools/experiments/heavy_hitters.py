#!/usr/bin/env python3
"""H2O's question: are heavy hitters better than cheaper policies, at every share of the cache?

Zhang et al. 2023 (arXiv:2306.14048), figures 4 and 8, with KL instead of accuracy.
"""

from experiment import Experiment, main, ranking, values

QUESTION = """
H2O keeps the tokens that have received most attention, and the recent ones. This page measures how far the model's
predictions move from the full cache's when only a share of the tokens is kept. KL is in nats. The best value of each
column is bold.
"""
CANDIDATES = ["h2o", "a2sf", "tova", "lru", "lru:sinks=4:recent=50%", "sink", "window", "random:sinks=4:recent=50%"]


def heavy_hitters():
    experiment = Experiment(__doc__)
    registered = {policy["name"] for policy in experiment.policies()}
    policies = [policy for policy in CANDIDATES if policy.split(":")[0] in registered]
    shares = experiment.quick(["10%", "20%", "50%"], ["4%", "10%", "20%", "40%", "60%", "80%", "100%"])
    rows = experiment.eval(policies, shares)
    experiment.section("## KL\n\n" + ranking(values(rows, "kl"), shares))
    agreement = values(rows, "top1_agreement")
    same = ranking(agreement, shares, best=max)
    experiment.section("## How often the most probable token is the full cache's\n\n" + same)
    experiment.write("Heavy hitters at every share of the cache", QUESTION)


main(heavy_hitters)
