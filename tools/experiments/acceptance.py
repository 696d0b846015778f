#!/usr/bin/env python3
"""Compares the acceptance of drafts that a replay predicts with the acceptance that `kvlab eval --draft` measures."""

from experiment import Experiment, Refused, main, name_of_policy, number_with_error, spearman, table, tier_plan_of, values

QUESTION = """
This page asks whether a replay of one trace predicts the acceptance of drafts. In self-speculative decoding, a policy's
small cache drafts some tokens, and the model verifies them with its full cache. *Acceptance* is the share of drafted
tokens that the verification accepts. The page compares the metric [`acceptance`](../reference/metrics.md), which is
computed from a trace with gradients, with the acceptance that [`kvlab eval --draft`](../guides/evaluate.md#drafts)
measures at the first drafted token.

The prediction comes from a trace of the first text. It is compared with measurements on the same text, and on the other
texts, which the prediction has not seen. No parameter is fitted to the measurements. A budget is a share of the tokens
of the full cache. Its bytes are those of this share in 16 bit, so with a tier plan of fewer bits they hold more tokens.
All policies keep original positions.

There are two targets, which this page calls *bars*. A prediction should be within 0.03 of the measured acceptance if
this acceptance is at least 0.8, and within 0.06 if it is lower. The rank correlation (Spearman) over the policies
should be at least 0.9 at each budget.
"""
POLICIES = [
    "a2sf", "h2o_mean", "h2o", "window", "sink", "lru", "tova", "roco", "lfu", "scissorhands", "lazy_eviction", "random",
    "snapkv:once=no:smooth=0", "nacl:once=no", "knorm", "keydiff", "vatp", "criticalkv", "lagkv", "r_kv",
]  # fmt: skip
BUDGETS = ["5%", "10%", "20%", "35%", "50%"]
TIER_PLANS = ["16", "16:16t,4:100%"]
SAMPLES = 4
DRAFT = 4
BARS = {True: 0.03, False: 0.06}  # largest error, if the measured acceptance is at least HIGH (True) or lower (False)
HIGH, CORRELATION = 0.8, 0.9


class Results:
    """Acceptance by (tier plan, budget), then by (policy, params)."""

    def __init__(self, experiment):
        self.experiment = experiment
        self.policies = experiment.quick(POLICIES[:10], POLICIES)
        self.budgets = experiment.quick(BUDGETS[1::2], BUDGETS)
        tiers = [word for tier_plan in TIER_PLANS for word in ("--tiers", tier_plan)]
        self.options = ["--positions", "original", *tiers]
        self.tokens = experiment.tokens
        self.prompt = self.tokens * 3 // 4
        first, *others = experiment.arguments.text
        self.predicted = self.by_cell(self.replay(), "acceptance")
        unseen = "one other text" if len(others) == 1 else f"{len(others)} other texts"
        self.measured = {"the same text": self.measure([first]), unseen: self.measure(others)}

    def replay(self):
        trace = self.experiment.capture(self.tokens, prompt=self.prompt)
        self.experiment.add_gradients(trace, SAMPLES)
        rows = self.experiment.kvlab(
            ["replay"], "--trace", trace, "--policy", ",".join(self.policies), "--budget", ",".join(self.budgets),
            *self.options, "--model", self.experiment.model, table="results.csv",
        )  # fmt: skip
        return [row for row in rows if row["layer"] == row["head"] == "all"]

    def measure(self, texts):
        """Returns {metric: value}: acceptance at the first and at the last drafted token, and tokens per
        verification."""
        rows = self.experiment.eval(
            self.policies, self.budgets, "--draft", DRAFT, *self.options, texts=texts, prompt=self.prompt,
            device="cpu",
        )  # fmt: skip
        metrics = ["acceptance_depth_1", f"acceptance_depth_{DRAFT}", "tokens_per_verification"]
        return {metric: self.by_cell(rows, metric) for metric in metrics}

    def by_cell(self, rows, metric):
        cells = {(tier_plan, budget): {} for tier_plan in TIER_PLANS for budget in self.budgets}
        for (policy, params, budget), value in values(rows, metric).items():
            rest, tier_plan = tier_plan_of(params)
            if (tier_plan, budget) in cells:
                cells[tier_plan, budget][policy, rest] = value
        return cells


def errors_of(predicted, measured):
    """Returns (error of the prediction, measured acceptance) for each policy."""
    return [(abs(predicted[name][0] - value), value) for name, (value, _) in measured.items()]


def is_met(predicted, measured):
    """Two booleans for one tier plan and budget: whether all errors are at most BARS, and whether the correlation is at
    least CORRELATION."""
    errors = all(error <= BARS[value >= HIGH] for error, value in errors_of(predicted, measured))
    return errors, correlation(predicted, measured) >= CORRELATION


def correlation(predicted, measured):
    return spearman([predicted[name][0] for name in measured], [value for value, _ in measured.values()])


def by_budget(results, texts):
    """Returns a row for each tier plan and budget. It compares the predicted and the measured acceptance of the first
    drafted token on `texts`."""
    measured, lines = results.measured[texts]["acceptance_depth_1"], []
    for (tier_plan, budget), own in measured.items():
        predicted = results.predicted[tier_plan, budget]
        errors = errors_of(predicted, own)
        largest = [max((error for error, value in errors if (value >= HIGH) == high), default=None) for high in BARS]
        met = is_met(predicted, own)
        lines.append([
            f"`{tier_plan}`", budget, f"{min(value for value, _ in own.values()):.3f} to {max(value for value, _ in own.values()):.3f}",
            f"{sum(error for error, _ in errors) / len(errors):.3f}", *("–" if error is None else f"{error:.3f}" for error in largest),
            f"{correlation(predicted, own):.3f}", "yes" if all(met) else "no" if not any(met) else ("error only" if met[0] else "correlation only"),
        ])  # fmt: skip
    return table(["tier plan", "budget", "measured", "mean error", "largest error, from 0.8 on", "largest error below", "rank correlation", "bars met"], lines)


def by_policy(results, tier_plan, budget, texts):
    """A row for each policy at one budget, the highest measured acceptance first."""
    measured = results.measured[texts]
    cell = tier_plan, budget
    first, last, tokens = (found[cell] for found in measured.values())
    names = sorted(first, key=lambda name: -first[name][0])
    return table(
        ["policy", "predicted", "measured, first token", f"measured, token {DRAFT}", "tokens per verification"],
        [[name_of_policy(*name), *map(number_with_error, (results.predicted[cell][name], first[name], last[name], tokens[name]))] for name in names],
    )


def summary(results, texts):
    measured = results.measured[texts]["acceptance_depth_1"]
    met = [is_met(results.predicted[cell], own) for cell, own in measured.items()]
    errors = [pair for cell, own in measured.items() for pair in errors_of(results.predicted[cell], own)]
    parts = []
    for high, bar in BARS.items():
        own = [error for error, value in errors if (value >= HIGH) == high]
        within = sum(error <= bar for error in own)
        where = f"where the measured acceptance is {'at least' if high else 'below'} {HIGH}"
        parts.append(f"{within} of {len(own)} predictions are within {bar} {where}")
    return (
        f"On {texts}: {', and '.join(parts)}. The bar of the error is met in {sum(errors for errors, _ in met)}, and that of "
        f"the rank correlation in {sum(ranks for _, ranks in met)} of {len(met)} combinations of tier plan and budget."
    )


def acceptance():
    experiment = Experiment(__doc__)
    if len(experiment.arguments.text) < 2:
        raise Refused("--text: give at least two, one to predict from and others to measure")
    results = Results(experiment)
    experiment.section("## Predicted and measured")
    for texts in results.measured:
        experiment.section(summary(results, texts))
    experiment.section(
        f"There are {len(results.policies)} policies. The prompt is the first {results.prompt} tokens of a text; the other tokens "
        f"are decoded in windows of {DRAFT} drafted tokens. *Error* is the absolute difference of predicted and measured acceptance."
    )
    for texts in results.measured:
        experiment.section(f"### On {texts}")
        experiment.section(by_budget(results, texts))
    middle = results.budgets[1]
    for tier_plan in TIER_PLANS:
        experiment.section(f"## Policies at {middle}, tier plan `{tier_plan}`, on the other texts")
        experiment.section(by_policy(results, tier_plan, middle, list(results.measured)[-1]))
    experiment.write("Acceptance of drafts, predicted and measured", QUESTION)


main(acceptance)
