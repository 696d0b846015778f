#!/usr/bin/env python3
"""Compares KL measured with transformers' QuantizedCache with kvlab's evaluation and prediction (docs/results/engines.md).

Needs PyTorch, transformers and optimum-quanto.
"""

import pathlib
import sys

import torch
from experiment import Experiment, Refused, main, mean_and_error, name_of_model, table, tier_plan_of, values
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache

QUESTION = """
This page asks whether transformers' quantized cache has the KL that kvlab measures and predicts. kvlab rounds keys and
values as transformers does, bit for bit, but computes attention with its own code. The page compares three numbers for
`QuantizedCache` with the backend optimum-quanto and groups of 64 channels (`int4_g64`, `int2_g64`):

- **predicted**: `kvlab plan`, from a trace of the first text and samples of gradients;
- **kvlab**: `kvlab eval --tiers FORMAT`, end to end on the other texts;
- **transformers**: the model in transformers on the same tokens of the same texts, in float32. The cache gets the
  prompt in one call and then one token per call, with `residual_length=1`, so that each token is quantized right after
  its own query has attended. kvlab quantizes a token right before its own query attends, so kvlab's KL should be a
  little higher.

KL is the mean over the decoded tokens, relative to the full cache of the same engine, in nats. Errors are standard
errors over the texts.
"""
BITS = {"int4_g64": 4, "int2_g64": 2}
SAMPLES = 4  # of the gradients


def log_probabilities(logits):
    return torch.log_softmax(logits.double(), dim=-1)


@torch.no_grad()
def kl_in_transformers(model, ids, prompt, bits):
    """The mean KL of the tokens after the prompt."""
    full = log_probabilities(model(ids[None]).logits[0])
    cache = QuantizedCache("quanto", model.config, nbits=bits, axis_key=0, axis_value=0, q_group_size=64, residual_length=1)
    model(ids[None, :prompt], past_key_values=cache)
    total, count = 0.0, 0
    # The last token is not scored, because it has no next token. The prompt's last query is not scored either, because
    # it attends to keys and values that are not quantized.
    for position in range(prompt, len(ids) - 1):
        own = log_probabilities(model(ids[None, position : position + 1], past_key_values=cache).logits[0, -1])
        total += float((full[position].exp() * (full[position] - own)).sum())
        count += 1
    return total / count


def predictions(experiment):
    """Runs `kvlab plan`. Returns {format: (loss, standard error)}."""
    trace = experiment.capture(experiment.quick(256, 1024))
    experiment.add_gradients(trace, SAMPLES)
    found = {}
    for name in BITS:
        choice = experiment.plan(trace, "16bits", name)["uniform"]
        found[name] = choice["loss"], choice["stderr"] or 0
    return found


def compare(experiment, directory):
    experiment.model = directory
    predicted = predictions(experiment)
    texts = experiment.arguments.text[1:]
    tokens = experiment.tokens
    tiers = [word for name in BITS for word in ("--tiers", name)]
    rows = experiment.eval(["full"], ["100%"], *tiers, texts=texts)
    ours = {tier_plan_of(params)[1]: value for (_, params, _), value in values(rows, "kl").items()}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    lines = []
    for name, bits in BITS.items():
        measured = []
        for path in texts:
            ids = torch.tensor(tokenizer(pathlib.Path(path).read_text()).input_ids[:tokens])
            measured.append(kl_in_transformers(model, ids, tokens // 5, bits))
            print(f"{name} {pathlib.Path(path).stem}: {measured[-1]:.4g}", file=sys.stderr)
        theirs = mean_and_error(measured)
        cells = [f"{value:.3g} ± {error:.1g}" for value, error in (predicted[name], ours[name], theirs)]
        lines.append([f"`{name}`", *cells, f"{theirs[0] / ours[name][0]:.2f}", f"{theirs[0] / predicted[name][0]:.2f}"])
    header = ["format", "predicted", "kvlab", "transformers", "transformers / kvlab", "transformers / predicted"]
    return table(header, lines)


def transformers_cache():
    experiment = Experiment(__doc__.splitlines()[0], models=True)
    if len(experiment.arguments.text) < 2:
        raise Refused("--text: give at least two, one to predict from and others to measure")
    for directory in experiment.models:
        experiment.section(f"## {name_of_model(directory)}\n\n" + compare(experiment, directory))
    experiment.write("Quantized caches of other engines", QUESTION)


main(transformers_cache)
