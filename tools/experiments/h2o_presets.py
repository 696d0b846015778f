#!/usr/bin/env python3
"""Compares what public codebases call H2O (docs/results/h2o.md)."""

import json

from experiment import Experiment, number_with_error, main, table, values

QUESTION = """
This page compares what public codebases mean by "H2O". The authors of H2O released five versions, and eleven other
public codebases use the name too. These implementations differ in the tokens that they keep. `h2o:preset=NAME` is the
configuration of kvlab that comes nearest to the version NAME. If none comes near, kvlab refuses the preset and gives
the reason.

*Overlap* compares the kept tokens with those of kvlab's `h2o`: the number of pairs (query, kept token) that both
policies have, divided by the number of pairs that at least one of the two has. Overlap is measured on the two heads on
which the policies differ most.
"""


PLOTTED = 6  # maximum number of policies whose kept tokens a replay stores


def overlaps(kept):
    """Computes {policy: overlap with h2o's kept tokens} from a run's kept.json. That file has [position, first query,
    last query] for each span of queries at which a token was live."""
    seen = {}
    for head in kept["heads"]:
        for series in head["series"]:
            seen.setdefault((series["policy"], series["params"]), set()).update(
                (head["layer"], head["head"], position, query)
                for position, first, last in series["lifetimes"]
                for query in range(first, last + 1)
            )
    own = seen["h2o", "sinks=0:recent=50%"]
    return {name: len(own & other) / len(own | other) for name, other in seen.items()}


def h2o_presets():
    experiment = Experiment(__doc__)
    presets = experiment.registry()["h2o_presets"]
    held = [preset for preset in presets if preset["policy"]]
    refused = {preset["name"]: why for preset in held if (why := experiment.refusal(preset["policy"]))}
    policies = list(dict.fromkeys(one["policy"] for one in held if one["name"] not in refused))
    budget = experiment.quick(128, 256)

    trace = experiment.capture(experiment.tokens, prompt=experiment.tokens // 2)
    overlap, error = {}, {}
    others = [policy for policy in policies if policy != "h2o"]
    for i in range(0, len(others), PLOTTED - 1):
        together = ",".join(["h2o", *others[i : i + PLOTTED - 1]])
        run = experiment.kvlab(["replay"], "--trace", trace, "--policy", together, "--budget", budget)
        overlap |= overlaps(json.loads((run / "kept.json").read_text()))
        rows = [row for row in experiment.rows(run / "results.csv") if row["layer"] == "all"]
        error |= values(rows, "residual_error")
    kl = values(experiment.eval(policies, [budget], prompt=experiment.tokens // 2), "kl")
    words, samples = experiment.quick(150, 250), experiment.quick(1, 4)
    answers = experiment.pass_keys(policies, [budget // 2], words, samples, "--depth", "10%,50%,90%")

    names = list(dict.fromkeys(key[:2] for key in kl if key[2] != "all"))  # in the order of `policies`
    lines = []
    for name, requested in zip(names, policies, strict=True):
        presets_of = [f"`{preset['name']}`" for preset in held if preset["policy"] == requested]
        at, half = (*name, str(budget)), (*name, str(budget // 2))
        numbers = [f"{overlap[name]:.2f}", number_with_error(error[at]), number_with_error(kl[at]), number_with_error(answers[half], 2)]
        lines.append([", ".join(presets_of), f"`{requested}`", *numbers])
    header = ["preset", "policy", "overlap", "`residual_error`", "KL, nats", "pass key"]
    experiment.section(
        f"## Side by side\n\nKL, error and overlap are measured at budget {budget}. The column "
        f'"pass key" has the share of right answers at budget {budget // 2} to questions that come after the eviction.\n\n' + table(header, lines)
    )
    codes = [[f"`{one['name']}`", one["code"], f"`{one['policy']}`" if one["policy"] else "refused",
              refused.get(one["name"]) or one["deviates"]] for one in presets]  # fmt: skip
    experiment.section("## What each is\n\n" + table(["preset", "code", "in kvlab", "what differs"], codes))
    experiment.write('What "H2O" means', QUESTION)


main(h2o_presets)
