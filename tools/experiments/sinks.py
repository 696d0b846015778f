#!/usr/bin/env python3
"""StreamingLLM's questions: how many sinks, how large a cache, and which positions?

Xiao et al. 2023 (arXiv:2309.17453), table 2, table 6 and section 3.2, with kvlab's model and texts.
"""

from experiment import Experiment, number_with_error, main, table, values

QUESTION = """
The last tokens alone are not enough: without its first tokens a model's predictions degrade, because heads with nothing
to attend to put their attention there (Xiao et al. 2023). This page measures how many first tokens are needed, and
whether it matters if the kept tokens keep their positions (`original`) or are numbered within the cache (`cache`).
There is no dense prompt here: every token is decoded.
"""


def sinks():
    experiment = Experiment(__doc__)
    budgets = experiment.quick([64, 256], [64, 128, 256, 512, 1024])
    counts = [0, 1, 2, 4, 8]
    policies = [f"sink:sinks={count}" for count in counts]
    streamed = ["--prefill", "stream", "--queries", "all"]
    by_mode = {
        mode: experiment.eval(policies, budgets, *streamed, "--positions", mode) for mode in ("cache", "original")
    }
    for mode, rows in by_mode.items():
        for metric, name in (("perplexity", "Perplexity"), ("kl", "KL to the full cache, nats")):
            found = values(rows, metric)
            lines = [
                [count, *(number_with_error(found["sink", f"sinks={count}:recent=0", str(budget)]) for budget in budgets)]
                for count in counts
            ]
            if metric == "perplexity":
                lines.append(["full cache", number_with_error(found["full", "", "all"]), *[""] * (len(budgets) - 1)])
            experiment.section(f"## {name}, positions `{mode}`\n\n" + table(["sinks", *map(str, budgets)], lines))
    experiment.write("Sinks: how many, and at which positions", QUESTION)


main(sinks)
