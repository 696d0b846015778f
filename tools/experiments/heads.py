#!/usr/bin/env python3
"""Deja Vu's question: which share of attention's output do the best heads keep, and can they be predicted?

Liu et al. 2023 (arXiv:2310.17157), for attention alone. Needs the kvlab package, PyTorch and transformers
(docs/results/heads.md).
"""

import contextlib
import copy
import dataclasses
import pathlib
import re
import shlex
import sys
import textwrap

import numpy
import torch
from experiment import ROOT, Experiment, Refused, checkout_path, main, name_of_model, short_hash, table
from transformers import AutoModelForCausalLM

import kvlab

QUESTION = """
For each token, [Deja Vu](https://arxiv.org/abs/2310.17157) computes only some heads of each layer, and predicts from
the layer before which heads these are. This page asks whether leaving out heads in this way would save reads of the KV
cache. Which share of attention's output do the heads with the largest outputs have? Can these heads be predicted? How
much do the model's predictions change if the other heads are left out? For comparison, the page also shows `h2o`, which
keeps all heads and evicts tokens, with a budget at which it reads as many bytes.

A head's output is what it adds to the residual stream: W_o^h o_h, from the checkpoint's W_o. The output of a KV head is
the sum over its query heads. Bytes are saved only if a whole KV head is left out, because a KV head is read as soon as
one of its query heads is kept. A *share* is the sum of squared norms of the outputs of the kept heads, divided by that
of all heads of the layer. Heads are chosen in three ways:

- **oracle**: for each token, the heads with the largest outputs;
- **static**: the same heads for all tokens, namely those with the largest outputs on other texts;
- **predicted**: for each token, by a ridge regression on the queries of the layer before (before RoPE), which predicts
  the logarithm of each output's norm. The regression is fitted on the same texts as "static". Like Deja Vu's predictor,
  it is linear. The first layer has no layer before it, so its heads are chosen as in "static".

*Recall* is the share of the oracle's heads that a method also chooses, over all layers but the first. The measured
tokens are those after the prompt, in texts that were not used for learning. Values are means over texts, with 95%
intervals ([how](../reference/recommendations.md#means-and-intervals)).
"""
DENSITIES = [0.25, 0.5, 0.75]
METHODS = ["oracle", "static", "predicted"]
GRANULARITIES = ["query heads", "KV heads"]
BLOCK = 64  # tokens of a block of an interval
FIRST_LEARNT = 64  # the predictors learn from the queries of a passage from this position on
PENALTIES = [1e-3, 1e-2, 1e-1, 1, 10]  # of the ridge regression, relative to the inputs' mean variance
RECALL_WANTED = 0.95  # a kernel is worthwhile if the prediction of half of the KV heads has this recall
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Arithmetic. `gram` [query, head, head] has the inner products of the outputs of a query's heads, `norms` [query, head]
# its diagonal.


def gram_of(outputs, projection):
    """`outputs` [head, query, dim] before W_o, `projection`: W_o [head, dim, hidden]."""
    projected = torch.einsum("hqd,hdo->hqo", outputs, projection)
    return torch.einsum("aqo,bqo->qab", projected, projected)


def by_kv_head(gram, kv_heads):
    """Sums the outputs of the query heads of each KV head. Returns the inner products [query, kv_head, kv_head] of
    these sums."""
    queries, heads, _ = gram.shape
    return gram.reshape(queries, kv_heads, heads // kv_heads, kv_heads, -1).sum((2, 4))


def norms_of(gram):
    return gram.diagonal(dim1=1, dim2=2)


def ranks_of(scores):
    """Returns the rank of each head [query, head]; 0 is the highest score."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def kept_share(norms, scores, count):
    """Returns, for each query, the share of the norms that the `count` heads with the highest scores have. A count of
    2.25 gives the third head the weight 0.25. On average this equals keeping two heads at three of four queries, and
    three heads at the fourth."""
    weights = (count - ranks_of(scores)).clamp(0, 1)
    return (weights * norms).sum(-1) / norms.sum(-1)


def recall(norms, scores, count):
    """Returns, for each query, the share of the `count` heads with the largest norms that are also among the `count`
    heads with the highest scores."""

    def hits(rank):
        return ((ranks_of(norms) < rank) & (ranks_of(scores) < rank)).sum(-1).double()

    whole, part = int(count), count - int(count)
    return ((1 - part) * hits(whole) + part * hits(whole + 1)) / count


def left_out(gram, scores, count):
    """Returns, for each query, the squared norm of the sum of the outputs that are left out."""
    out = (ranks_of(scores) >= count).to(gram)
    return torch.einsum("qa,qab,qb->q", out, gram, out)


def counts_by_layer(norms, density):
    """How many heads each layer keeps if the share `density` of all heads is kept. These are the counts with which the
    best heads of each query keep the largest part of `norms` [layer, query, head]."""
    gains = norms.sort(-1, descending=True).values.mean(1)  # [layer, head]: what one more head adds
    kept = gains.flatten().topk(round(density * gains.numel())).indices
    return torch.bincount(kept // gains.shape[1], minlength=len(gains)).tolist()


class Ridge:
    """A ridge regression of `targets` [query, head] on `inputs` [query, dim]. The penalty is chosen by fitting to the
    first four fifths of the queries: it is the one with the lowest error on the last fifth."""

    def __init__(self, inputs, targets):
        inputs, targets = inputs.double(), targets.double()
        last = len(inputs) * 4 // 5
        self.solve(inputs[:last], targets[:last], PENALTIES)
        errors = (self(inputs[last:]) - targets[last:]).square().mean((1, 2))
        self.solve(inputs, targets, [PENALTIES[errors.argmin()]])

    def solve(self, inputs, targets, penalties):
        """Fits one regression for each penalty."""
        self.centre, self.mean = inputs.mean(0), targets.mean(0)
        rows = inputs - self.centre
        products = rows.T @ rows
        size = products.diagonal().mean() * torch.eye(len(products), dtype=torch.float64)
        self.weights = torch.stack([torch.linalg.solve(products + penalty * size, rows.T @ (targets - self.mean)) for penalty in penalties])

    def __call__(self, inputs):
        """Returns predictions [penalty, query, head]."""
        return (inputs.double() - self.centre) @ self.weights + self.mean


# Traces


@dataclasses.dataclass
class LayerOutputs:
    """What is known of one layer at some queries of traces."""

    previous: torch.Tensor  # [query, query_heads * dim]: the queries of the layer before, before RoPE; none in the first
    gram: torch.Tensor  # of the query heads' outputs, divided by the squared norm of the residual stream


def outputs_of(trace, layer, projection, first):
    """Returns the LayerOutputs of a layer at the queries from position `first` to the last one."""
    group = trace.query_heads // trace.kv_heads
    values = [trace.read("v", layer, head) for head in range(trace.kv_heads)]
    outputs = numpy.stack([trace.attention(layer, head, first) @ values[head // group] for head in range(trace.query_heads)])
    residual = torch.cat([torch.from_numpy(part) for part in residual_of(trace, layer)])[first:]
    gram = gram_of(torch.from_numpy(outputs), projection) / residual[:, None, None]
    heads = range(trace.query_heads if layer else 0)
    previous = [trace.read("q", layer - 1, head)[first:] for head in heads] or [numpy.zeros((len(gram), 0), numpy.float32)]
    return LayerOutputs(torch.from_numpy(numpy.concatenate(previous, axis=1)), gram)


def residual_of(trace, layer):
    name = f"layers.{layer}.residual_norm2"
    tensors = trace.to_dict("torch")
    if name not in tensors:
        raise Refused(f"{trace.path}: has no norms of the residual stream; capture it again with this version")
    return [part.numpy() for part in tensors[name]]


def joined(traces, layer, projection, first):
    parts = [outputs_of(trace, layer, projection, first) for trace in traces]
    return LayerOutputs(torch.cat([part.previous for part in parts]), torch.cat([part.gram for part in parts]))


class Choice:
    """Chooses heads, at one granularity. `layers`: the LayerOutputs of each layer, from which it learns which heads
    have large outputs."""

    def __init__(self, layers, kv_heads):
        self.kv_heads = kv_heads  # 0: heads are query heads
        norms = torch.stack([self.norms(layer.gram) for layer in layers])
        self.static = norms.mean(1)
        logs = norms.clamp_min(1e-30).log()
        self.ridges = [Ridge(layer.previous, own) if layer.previous.shape[1] else None for layer, own in zip(layers, logs)]
        self.counts = {density: counts_by_layer(norms, density) for density in DENSITIES}

    def gram(self, gram):
        return by_kv_head(gram, self.kv_heads) if self.kv_heads else gram

    def norms(self, gram):
        return norms_of(self.gram(gram))

    def scores(self, method, layer, norms, previous):
        if method == "oracle":
            return norms
        if method == "static" or layer == 0:
            return self.static[layer].to(norms).expand_as(norms)
        return self.ridges[layer](previous.cpu())[0].to(norms)


# End to end


@contextlib.contextmanager
def leaving_out(model, keep):
    """In the `with` block, the outputs of some query heads of the model are set to zero before W_o.

    `keep(layer, outputs [head, query, dim], previous [query, query_heads * dim])` returns which heads to keep, bool
    [query, head]. `previous`: the queries of the layer before, before RoPE; None in the first layer.
    """
    queries, hooks = {}, []
    for number, layer in enumerate(model.model.layers):

        def note(_, __, rows, number=number):
            queries[number] = rows[0]

        def leave_out(_, inputs, number=number):
            rows = inputs[0].reshape(inputs[0].shape[1], model.config.num_attention_heads, -1)
            kept = keep(number, rows.transpose(0, 1), queries.get(number - 1))
            return ((rows * kept[:, :, None]).reshape(inputs[0].shape),)

        hooks.append(layer.self_attn.q_proj.register_forward_hook(note))
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(leave_out))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def projections_of(model):
    """W_o of each layer, [query_heads, dim, hidden]."""
    weights = [layer.self_attn.o_proj.weight.detach().float() for layer in model.model.layers]
    return [weight.T.reshape(model.config.num_attention_heads, -1, len(weight)) for weight in weights]


class Continuation:
    """Runs a transformers model over the tokens of a text that follow a prompt."""

    def __init__(self, model, ids, prompt):
        self.model, self.ids = model, torch.tensor(ids.tolist(), device=DEVICE)[None]
        self.prompt = prompt
        with torch.no_grad():
            self.cache = model(self.ids[:, :prompt], use_cache=True).past_key_values
        self.full = self.log_probabilities()

    @torch.no_grad()
    def log_probabilities(self):
        # The last token has no next token, so it is not scored.
        logits = self.model(self.ids[:, self.prompt : -1], past_key_values=copy.deepcopy(self.cache)).logits[0]
        return torch.log_softmax(logits.double(), dim=-1)

    def kl(self, keep):
        """Returns, for each token, the KL to the model with all heads."""
        with leaving_out(self.model, keep):
            own = self.log_probabilities()
        return (self.full.exp() * (self.full - own)).sum(-1)


# Tables


def blocks(values):
    """Means of blocks of about BLOCK queries."""
    return [block.double().mean().item() for block in values.tensor_split(max(1, len(values) // BLOCK))]


def mean_over(texts):
    """Returns the mean of the blocks' values over the texts, with its interval, as a kvlab.Difference."""
    return kvlab.difference(texts, [[0.0] * len(numpy.atleast_1d(text)) for text in texts])


def shown(found):
    if numpy.isnan(found.mean):
        return "-"
    interval = "" if numpy.isnan(found.low) else f" ({max(found.low, 0):.3g} to {found.high:.3g})"
    return f"{found.mean:.3g}{interval}"


def tokens_of_equal_bytes(tokens, prompt, density):
    """Returns a budget. With it, an evicting cache reads the share `density` of what the full cache reads, averaged
    over the tokens after the prompt."""
    full = numpy.arange(prompt, tokens) + 1
    return min(range(1, tokens + 1), key=lambda budget: abs(numpy.minimum(full, budget).sum() - density * full.sum()))


def step_of_8b():
    """Returns {column: (time of attention, time of all parts)} of a decode step, in ms, from the table of parts in the
    measurements."""
    page = ROOT / "docs/internals/measurements/decode.md"
    lines = page.read_text().split("\n## A decode step\n")[-1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    if not rows or rows[0][0] != "part" or "attention" not in [row[0] for row in rows]:
        raise Refused(f"{page}: the section `A decode step` needs a table of parts with a row `attention`")
    found = {}
    for column in range(1, len(rows[0])):
        times = {row[0]: float(re.match(r"[\d.]+", row[column])[0]) for row in rows[2:]}
        found[rows[0][column]] = times["attention"], sum(times.values())
    return {name: times for name, times in found.items() if name.startswith("8B")}


class Study:
    """All measurements of one model."""

    def __init__(self, experiment, directory):
        experiment.model, self.experiment = directory, experiment
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval().to(DEVICE)
        refuse_other_models(self.model)
        self.projections = projections_of(self.model)
        self.tokens, self.prompt = experiment.tokens, experiment.tokens // 2
        self.texts = experiment.measured
        self.traces = [kvlab.Trace(experiment.capture(self.tokens, self.prompt, text)) for text in self.texts]
        self.passages = [kvlab.Trace(experiment.capture(self.tokens, FIRST_LEARNT, piece)) for piece in self.pieces()]
        self.learnt_tokens = sum(trace.tokens - FIRST_LEARNT for trace in self.passages)
        self.continuations = [Continuation(self.model, trace.ids, self.prompt) for trace in self.traces]
        self.layers = range(self.traces[0].layers)
        self.seen = [[outputs_of(trace, layer, self.projection(layer), self.prompt) for layer in self.layers] for trace in self.traces]
        learnt = [joined(self.passages, layer, self.projection(layer), FIRST_LEARNT) for layer in self.layers]
        kv_heads = self.traces[0].kv_heads
        self.choices = {name: Choice(learnt, heads) for name, heads in zip(GRANULARITIES, (0, kv_heads))}

    def projection(self, layer):
        return self.projections[layer].cpu()

    def pieces(self):
        """Writes passages of the learning texts to files. Each has about as many tokens as the measured texts."""
        found, length = [], 4 * self.tokens
        for path in self.experiment.learning:
            text = pathlib.Path(path).read_text(errors="ignore")
            for start in range(0, len(text) - length + 1, length):
                piece = self.experiment.results / f"piece-{short_hash(text[start : start + length])}.txt"
                piece.write_text(text[start : start + length])
                found.append(piece)
        found = found[: self.experiment.quick(2, None)]
        if not found:
            raise Refused(f"--learn: the texts have fewer than {length} characters; give longer texts")
        return found

    def measured(self, name, method, measure, layers):
        """Calls measure(gram, scores, layer), which returns a value for each query. Returns the values
        [text][layer][query]."""
        choice = self.choices[name]
        found = []
        for seen in self.seen:
            own = []
            for layer in layers:
                gram = choice.gram(seen[layer].gram)
                scores = choice.scores(method, layer, norms_of(gram), seen[layer].previous)
                own.append(measure(gram, scores, layer))
            found.append(own)
        return found

    def shares(self, name, method, density):
        """Returns the kept shares [text][layer][query], if every layer keeps the same share of heads."""
        count = density * self.choices[name].static.shape[1]
        return self.measured(name, method, lambda gram, scores, _: kept_share(norms_of(gram), scores, count), self.layers)

    def recalls(self, name, method, counts):
        """Returns the recalls [text][layer][query] of the layers that leave out some heads, except the first layer."""
        heads = self.choices[name].static.shape[1]
        layers = [layer for layer in self.layers[1:] if 0 < counts[layer] < heads]
        return self.measured(name, method, lambda gram, scores, layer: recall(norms_of(gram), scores, counts[layer]), layers)

    def errors(self, name, method, counts):
        return self.measured(name, method, lambda gram, scores, layer: left_out(gram, scores, counts[layer]), self.layers)

    def kl(self, name, method, counts):
        """Returns the KL [text][token]."""
        choice = self.choices[name]
        group = self.traces[0].query_heads // self.traces[0].kv_heads

        def keep(layer, outputs, previous):
            norms = choice.norms(gram_of(outputs, self.projections[layer]))
            kept = ranks_of(choice.scores(method, layer, norms, previous)) < counts[layer]
            return kept.repeat_interleave(group, 1) if choice.kv_heads else kept

        return [text.kl(keep) for text in self.continuations]

    def bytes_read(self, name, method, counts):
        """Returns the share of the KV heads that are read."""
        kv_heads = self.traces[0].kv_heads

        def read(gram, scores, layer):
            kept = ranks_of(scores) < counts[layer]
            return kept.reshape(len(kept), kv_heads, -1).any(-1).double().mean(-1)

        found = self.measured(name, method, read, self.layers)
        return mean_over([torch.stack(text).mean().item() for text in found]).mean


def mean_of_layers(found):
    """The mean over texts and layers of [text][layer][query]; NaN if there are no layers."""
    if not found[0]:
        return kvlab.Difference(*[numpy.nan] * 4, 0)
    return mean_over([blocks(torch.stack(text).mean(0)) for text in found])


def refuse_other_models(model):
    layers = getattr(getattr(model, "model", None), "layers", [])
    if not layers or not all(hasattr(layer.self_attn, "q_proj") and hasattr(layer.self_attn, "o_proj") for layer in layers):
        raise Refused("--model: has no q_proj and o_proj in each layer; give a model of the family of Llama")
    if hasattr(layers[0].self_attn, "q_norm"):
        raise Refused("--model: normalizes queries, so they are not a linear image of the layer's input; give a model without q/k norm")


def share_table(study):
    lines = []
    for name in GRANULARITIES:
        heads = study.choices[name].static.shape[1]
        for method in METHODS:
            shares = [mean_of_layers(study.shares(name, method, density)) for density in DENSITIES]
            recalls = [mean_of_layers(study.recalls(name, method, [density * heads] * len(study.layers))) for density in DENSITIES]
            lines.append([name, method, *map(shown, shares), *("1" if method == "oracle" else shown(found) for found in recalls)])
    percent = [f"{density:.0%}" for density in DENSITIES]
    return table(["heads", "chosen by", *(f"share at {at}" for at in percent), *(f"recall at {at}" for at in percent)], lines)


def layer_table(study, name):
    """The shares in each layer, and the largest standard error of a share."""
    lines, errors = [[f"{layer}"] for layer in study.layers], []
    for density in DENSITIES:
        found = [study.shares(name, method, density) for method in METHODS]
        for layer in study.layers:
            means = [mean_over([blocks(text[layer]) for text in own]) for own in found]
            lines[layer].append(", ".join(f"{mean.mean:.2f}" for mean in means))
            errors += [mean.standard_error for mean in means]
    return table(["layer", *(f"{density:.0%} of the heads" for density in DENSITIES)], lines), numpy.nanmax(errors)


def left_out_rows(study, name):
    """Returns {(method, density): (line of the table, recall, residual error)}."""
    found = {}
    for density in DENSITIES:
        for method in METHODS:
            counts = study.choices[name].counts[density]
            right = mean_of_layers(study.recalls(name, method, counts))
            errors = [torch.stack(text).sum(0) for text in study.errors(name, method, counts)]
            error = mean_over([blocks(own) for own in errors])
            kl = mean_over([blocks(own) for own in study.kl(name, method, counts)])
            print(name, method, density, f"KL {kl.mean:.4f}", file=sys.stderr, flush=True)
            read = f"{study.bytes_read(name, method, counts):.0%}"
            line = [name, method, f"{density:.0%}", read, "1" if method == "oracle" else shown(right), shown(error), shown(kl)]
            found[method, density] = line, right, error
    return found


def h2o_rows(study):
    """Returns {density: (line of the table, residual error)} for `h2o` with all heads, at equal bytes read."""
    experiment, trace = study.experiment, study.traces[0]
    budgets = {density: tokens_of_equal_bytes(study.tokens, study.prompt, density) for density in DENSITIES}
    offline = experiment.kvlab(
        ["replay"], "--trace", *(own.path for own in study.traces), "--policy", "h2o", "--budget", ",".join(map(str, budgets.values())),
        "--output-error", "all", table="results.csv", device="",
    )  # fmt: skip
    offline = [row for row in offline if row["layer"] == row["head"] == "all"]
    out = experiment.evaluation(["h2o"], budgets.values(), texts=study.texts, tokens=study.tokens, prompt=study.prompt)
    end_to_end = [row for row in experiment.rows(out / "eval.csv") if row["text"] != "all"]
    full = (numpy.arange(study.prompt, study.tokens) + 1).mean() * trace.layers * trace.kv_heads * trace.head_size * 4  # bytes
    found = {}
    for density, budget in budgets.items():

        def over_texts(rows, metric, budget=str(budget)):
            own = [float(row["value"]) for row in rows if row["metric"] == metric and row["policy"] == "h2o" and row["budget"] == budget]
            return mean_over(own)

        error, kl = over_texts(offline, "residual_error"), over_texts(end_to_end, "kl")
        read = over_texts(offline, "kv_bytes_mean").mean / full
        found[density] = ["all heads", f"`h2o`, {budget} tokens", "100%", f"{read:.0%}", "", shown(error), shown(kl)], error
    return found


def conclusion(heads, tokens):
    """Says whether a kernel that leaves out KV heads is worthwhile. `heads`, `tokens`: the rows of the table at half of
    the heads."""
    (_, right, error), (_, other) = heads, tokens
    is_predictable, is_better = right.mean >= RECALL_WANTED, error.mean < other.mean
    return (
        f"**{'A kernel would pay' if is_predictable and is_better else 'No kernel'}.** A kernel that reads half of the KV heads is useful only "
        f"if the predicted heads have a recall of at least {RECALL_WANTED} and a lower `residual_error` than `h2o` at the same bytes. Measured: "
        f"recall {shown(right)}, "
        f"{'reached' if is_predictable else 'not reached'}; `residual_error` {shown(error)}, which is {error.mean / other.mean:.3g} times that "
        f"of `h2o` ({shown(other)}), {'reached' if is_better else 'not reached'}."
    )


def add_sections(study):
    experiment = study.experiment
    scored = len(study.continuations[0].full)
    queries = study.tokens - study.prompt
    learning = ", ".join(pathlib.Path(path).stem for path in experiment.learning)
    experiment.section(
        f"## {name_of_model(experiment.model)}\n\n"
        f"{len(study.layers)} layers of {study.traces[0].query_heads} query heads and {study.traces[0].kv_heads} KV heads. Learnt from "
        f"{study.learnt_tokens} tokens of {learning}. Measured on {queries} tokens after a prompt of {study.prompt} in each of "
        f"{len(study.texts)} texts: {', '.join(pathlib.Path(text).stem for text in study.texts)}. The model has no norm between "
        "the query projection and RoPE, so its queries are a linear image of the layer's input."
        "\n\n### Which share the best heads keep\n\n"
        "Each layer keeps the same share of its heads, in the columns 25%, 50% or 75%. If that is not a whole number, such as 2.25 heads, "
        "two heads are kept at three of four tokens, and three heads at the fourth. Count: "
        f"{queries * len(study.texts)} tokens × {len(study.layers)} layers in each cell, for recall one layer less."
    )
    experiment.section(share_table(study))
    for name in GRANULARITIES:
        rows, error = layer_table(study, name)
        experiment.section(
            f"The same by layer, for {name}. Each cell has three shares: of the heads that are chosen by oracle, static and predicted, in this "
            f"order. Count: {queries * len(study.texts)} tokens. Standard errors over the texts are at most {error:.2f}."
        )
        experiment.section(rows)
    rows = {name: left_out_rows(study, name) for name in GRANULARITIES}
    tokens = h2o_rows(study)
    experiment.section(
        "### When the other heads are left out\n\n"
        "Here the kept heads are a share of all heads of the model. Layers may keep different numbers of heads. These numbers are chosen on "
        "the learning texts, so that as much of the heads' outputs as possible is kept, relative to the residual stream. Recall is over the "
        "layers that keep some heads but not all. *KV read*: bytes of keys and values that are read, relative to the full cache. "
        "[`residual_error`](../reference/metrics.md#definitions) is computed offline, from the traces. KL, in nats, is measured end to "
        "end: heads are left out in transformers (float32) at every token after the prompt, so later layers and tokens see the effect, "
        "and predictions use the queries of the changed model. The keys and values of all heads are computed, so that a head that is left "
        "out at one token can be kept at the next. `h2o` runs in `kvlab eval`, with the budget at which it reads as many "
        f"bytes, averaged over the tokens. Count: {queries * len(study.texts)} tokens, of which {scored * len(study.texts)} are scored."
    )
    header = ["heads", "chosen by", "kept", "KV read", "recall", "`residual_error`", "KL"]
    experiment.section(
        table(header, [line for found in rows.values() for line, *_ in found.values()] + [line for line, _ in tokens.values()])
    )
    half = DENSITIES[1]
    experiment.section(conclusion(rows["KV heads"]["predicted", half], tokens[half]))


def kernel_section():
    lines = []
    for name, (attention, whole) in step_of_8b().items():
        times = [whole - (1 - density) * attention for density in DENSITIES]
        lines.append([name, f"{whole:.3f}", f"{attention / whole:.0%}", *(f"{whole / own:.2f} x" for own in times)])
    header = ["shape, sequences × tokens", "step, ms", "attention", *(f"{density:.0%} of the KV heads" for density in DENSITIES)]
    return (
        "## What a kernel could gain at most\n\n"
        "The parts of a decode step are those of [measurements](../internals/measurements/decode.md#a-decode-step), on an H200. Assume "
        "that attention takes time in proportion to the KV heads that it reads, and that prediction takes no time. A step is then this many "
        "times faster:"
        "\n\n" + table(header, lines)
    )


def arguments_of(parser):
    parser.add_argument("--learn", nargs="+", help="texts to learn from; default: the first of --text, which is then not measured")


def heads():
    experiment = Experiment(__doc__.splitlines()[0], models=True, arguments=arguments_of)
    given = experiment.arguments.text
    experiment.learning = experiment.arguments.learn or given[:1]
    experiment.measured = [text for text in given if text not in experiment.learning]
    if not experiment.measured:
        raise Refused("--text: all of these texts are used for learning; give further texts to measure")
    for directory in experiment.models:
        add_sections(Study(experiment, directory))
    experiment.section(kernel_section())
    experiment.section("## Commands\n\n" + command_line())
    experiment.write("Which heads matter", QUESTION)


def command_line():
    """The command that repeats this run in the checkout, without the paths of kvlab and of kept results."""
    words = sys.argv[1:]
    for option in {"--kvlab", "--keep"} & {*words}:
        at = words.index(option)
        words = words[:at] + words[at + 2 :]
    words = ["python3", "tools/experiments/heads.py", *(checkout_path(word) if "/" in word else word for word in words)]
    lines = textwrap.wrap(shlex.join(words), 100, break_long_words=False, break_on_hyphens=False)
    return "    " + " \\\n      ".join(lines)


if __name__ == "__main__":
    main(heads)
