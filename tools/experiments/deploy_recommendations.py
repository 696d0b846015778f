#!/usr/bin/env python3
"""Compares what `deploy` chooses from a replay with the end-to-end evaluation on other texts.

The policies are all registered ones and variants with `once` and `every`, at five levels of bytes.
"""

import json
import subprocess

from experiment import Experiment, Refused, main, table

QUESTION = """
`deploy` chooses a policy from an offline replay. Here it chooses at five budgets of bytes among all registered
policies, with variants that exceed their budget. Then the end-to-end evaluation runs the same configurations on texts
that the replay has not seen. The policy that `deploy` writes should never be significantly worse than the best eligible
configuration by more than 10% in KL. Where `deploy` finds a significant difference, the end-to-end evaluation should
agree in at least 95% of the pairs.
"""


def run_json(experiment, command, *options):
    arguments = experiment.arguments
    words = [arguments.kvlab, *command, "--json", *map(str, options)]
    if command[0] != "deploy" and arguments.device:
        words += ["--device", arguments.device]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def candidates(experiment):
    """Returns the policies that the engine runs without stored token features, and variants with `once` and `every`."""
    names = [one["name"] for one in experiment.policies() if one["name"] not in ("full", "feature")]
    names = [name for name in names if experiment.refusal(name) is None]
    return [*names, "h2o:once", "lru:once", "h2o:every=16", "window:every=64", "lru:every=2"]


def key_of(entry):
    return entry["policy"] + (":" + entry["params"] if entry["params"] else "")


def judge(recommendation, evaluation, budget):
    """Returns four values: the name of the chosen policy; by which share its end-to-end KL exceeds the lowest KL (0 if
    the difference is not significant); the number of pairs on which `deploy` and the evaluation agree; and the number
    of pairs. A pair is the choice and a policy that `deploy` finds significantly worse."""
    ranking = [one for one in recommendation["evidence"]["ranking"] if not one["over_budget"]]
    made = next(one for one in evaluation["recommendations"] if one["budget"] == str(budget))
    order = list(zip(made["order"], made["configurations"]))
    kl = {
        key_of(one): one["kl"]
        for one in evaluation["configurations"]
        if one["budget"] == str(budget)
    }
    from_lowest = {key_of(evaluation["configurations"][c]): one["from_lowest"] for one, c in order}
    best = key_of(evaluation["configurations"][order[0][1]])
    written = key_of(recommendation)
    told = from_lowest[written]["significant"]
    share = kl[written] / kl[best] - 1 if told else 0.0
    apart = [one for one in ranking if one["from_lowest"]["significantly_different"]]
    agree = sum(kl[key_of(one)] > kl[key_of(ranking[0])] for one in apart)
    return written, share, agree, len(apart)


def deploy_recommendations():
    experiment = Experiment(__doc__.splitlines()[0])
    arguments, tokens = experiment.arguments, experiment.tokens
    budgets = experiment.quick([32, 64, 128], [64, 128, 256, 512, 1024])
    texts = arguments.text
    if len(texts) < 4:
        raise Refused(
            "--text: give at least four files, because half of them are replayed and the other half "
            "evaluated"
        )
    seen, left_out = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    policies = candidates(experiment)
    traces = [
        experiment.kvlab(["capture"], "--model", arguments.model, "--prompt-file", text, "--teacher-forced",
                         "--prompt-tokens", tokens // 2, "--max-tokens", tokens)
        for text in seen
    ]  # fmt: skip
    named = []
    for i, trace in enumerate(traces):
        named.append(trace.rename(trace.with_name(f"text{i}")))
    run = experiment.kvlab(["replay"], "--trace", *named, "--model", arguments.model, "--policy", ",".join(policies),
                           "--budget", ",".join(map(str, budgets)))  # fmt: skip
    evaluation = run_json(
        experiment, ["eval"], "--model", arguments.model, "--text", *left_out, "--max-tokens", tokens, "--prompt-tokens",
        tokens // 2, "--policy", ",".join(policies), "--budget", ",".join(map(str, budgets)),
    )  # fmt: skip
    lines, agree, pairs, worst = [], 0, 0, 0.0
    for budget in budgets:
        out = experiment.results / f"policy-{budget}.json"
        recommendation = run_json(experiment, ["deploy"], run, "--budget", budget, "--out", out)
        written, share, agreed, apart = judge(recommendation, evaluation, budget)
        agree, pairs, worst = agree + agreed, pairs + apart, max(worst, share)
        lines.append([budget, f"`{written}`", f"{100 * share:.1f}%", f"{agreed} of {apart}"])
    experiment.section(table(["budget", "written", "KL above the lowest, if significant", "pairs that agree"], lines))
    experiment.section(
        f"At the worst budget, the KL of the written policy is {100 * worst:.1f}% above the lowest KL (limit: 10%; a "
        f"difference that is not significant counts as 0%). The end-to-end evaluation agrees with {agree} of {pairs} "
        "significant differences (limit: 95%)."
    )
    experiment.write("Does the end-to-end evaluation agree with what is deployed?", QUESTION)


if __name__ == "__main__":
    main(deploy_recommendations)
