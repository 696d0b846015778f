#!/usr/bin/env python3
"""Compares StreamingH2O with StreamingLLM, by cache size.

Both use cache positions. One keeps sinks and the last tokens, the other heavy hitters and the last tokens.
"""

from experiment import Experiment, main, ranking, values

QUESTION = """
With a cache of a fixed size, is it better to keep the tokens that received most attention (`streaming_h2o`), or only
sinks and the last tokens (`sink`)? Every token is decoded, with cache positions. The best value of each column is bold.
"""


def streaming():
    experiment = Experiment(__doc__)
    sizes = experiment.quick([32, 128], [32, 64, 128, 256, 512, 1024])
    policies = ["sink", "streaming_h2o", "streaming_h2o:sinks=4", "h2o", "window"]
    rows = experiment.eval(policies, sizes, "--prefill", "stream", "--queries", "all", "--positions", "cache")
    for metric, name in (("perplexity", "Perplexity"), ("kl", "KL to the full cache, nats")):
        experiment.section(f"## {name}\n\n" + ranking(values(rows, metric), sizes))
    experiment.write("StreamingH2O and StreamingLLM, by cache size", QUESTION)


main(streaming)
