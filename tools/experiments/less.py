#!/usr/bin/env python3
"""LESS: is a low-rank state of the evicted tokens worth its bytes? Trained and tested on traces only."""

import json
import pathlib
import sys

import numpy
import torch
from quantize import quantize, rotated
from experiment import Experiment, main, short_hash, table

import kvlab

QUESTION = """
LESS (arXiv:2402.09398, section 3, with the formulas and sizes of the authors' code) keeps a state of rank 8 for the
evicted tokens of each KV head. It has two small nets for each layer, which are trained for one policy and budget: φ,
here with weights for each query head, and ψ, with weights for each KV head. Both learn from traces here. The loss is
the squared error of the outputs after W_o, divided by the squared norm of the exact outputs, at the queries after the
prompt in the first half of the texts. The metric is the square root of that error for each query, as a mean over the
queries of the other half.
"""
RANK, WIDTH, PROMPT = 8, 512, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Nets(torch.nn.Module):
    """The nets φ and ψ of one layer."""

    def __init__(self, query_heads, kv_heads, size):
        super().__init__()

        def normal(heads, rows, columns):
            return torch.nn.Parameter(torch.randn(heads, rows, columns) / rows**0.5)

        self.query = torch.nn.ParameterList([normal(query_heads, size, WIDTH), normal(query_heads, WIDTH, RANK)])
        self.key = torch.nn.ParameterList([normal(kv_heads, size, WIDTH), normal(kv_heads, WIDTH, RANK)])
        self.mix = normal(kv_heads, RANK, RANK)
        self.scale = torch.nn.Parameter(torch.full((2, kv_heads, 1, RANK), 1e-4))

    def forward(self, query, key, group):
        """From queries [query_heads, query, dim] and keys [kv_heads, token, dim], computes logits of the evicted tokens
        [query_heads, query, token].
        """
        gelu, drop = torch.nn.functional.gelu, torch.nn.functional.dropout
        first, second = self.query
        left = gelu(drop(gelu(query @ first), 0.3, self.training) @ second).abs()
        first, second = self.key
        right = self.scale[0].abs() * gelu(drop(gelu(key @ first), 0.3, self.training) @ second)
        right = (right + right @ self.mix * self.scale[1]).abs()
        return (left @ right.repeat_interleave(group, 0).transpose(1, 2) + 1e-6).log()

    def weight_bytes(self):
        return 2 * sum(parameter.numel() for parameter in self.parameters())


class Sequence:
    """One layer of one trace under one configuration: queries and keys after RoPE, values, and the live tokens at each
    query."""

    def __init__(self, trace, layer, run, policy, budget, is_quantized):
        inv_freq = trace.inv_freq.reshape(-1)

        def read(part, heads, *changes):
            rows = [trace.read(part, layer, head) for head in range(heads)]
            for change in changes:
                rows = [change(own) for own in rows]
            return torch.from_numpy(numpy.stack(rows)).to(DEVICE)

        turn = lambda rows: rotated(rows, inv_freq)  # noqa: E731
        quantizers = [lambda rows: quantize(rows, 4, 32, True)] if is_quantized else []
        self.group = trace.query_heads // trace.kv_heads
        self.query, self.key = read("q", trace.query_heads, turn), read("k", trace.kv_heads, turn)
        self.value = read("v", trace.kv_heads)
        self.kept = [read("k", trace.kv_heads, turn, *quantizers), read("v", trace.kv_heads, *quantizers)]
        kept = [run.kept(layer, head, policy, budget, trace=trace.name) for head in range(trace.kv_heads)]
        self.queries = torch.from_numpy(kept[0].queries.astype(numpy.int64)).to(DEVICE)
        self.live = torch.from_numpy(numpy.stack([own.live for own in kept])).to(DEVICE)  # [kv_head, query, token]

    def error(self, output, nets=None, some=None):
        """Returns, for each query, the squared error of the attention output after W_o, divided by the squared norm of
        the exact output. `output`: W_o [query_heads, dim, hidden]. `nets`: the nets that replace evicted tokens; None:
        no nets. `some`: the queries to use; None: all."""
        rows = torch.arange(len(self.queries), device=DEVICE) if some is None else some
        positions = self.queries[rows]
        query, scale = self.query[:, positions], self.key.shape[-1] ** -0.5
        by_query_head = lambda rows: rows.repeat_interleave(self.group, 0)  # noqa: E731
        seen = torch.arange(self.key.shape[1], device=DEVICE)[None] <= positions[:, None]
        live = by_query_head(self.live[:, rows])
        masked = torch.tensor(-torch.inf, device=DEVICE)
        logits = query @ by_query_head(self.key).transpose(1, 2) * scale
        exact = torch.where(seen, logits, masked).softmax(-1) @ by_query_head(self.value)
        key, value = self.kept
        logits = query @ by_query_head(key).transpose(1, 2) * scale
        rest = masked if nets is None else nets(query, key, self.group)
        own = torch.where(live, logits, torch.where(seen & ~live, rest, masked)).softmax(-1) @ by_query_head(value)
        squared_norm = lambda rows: torch.einsum("hqd,hdo->qo", rows, output).square().sum(-1)  # noqa: E731
        return squared_norm(own - exact) / squared_norm(exact)


def train(sequences, output, epochs):
    own = sequences[0]
    nets = Nets(len(own.query), len(own.key), own.key.shape[-1]).to(DEVICE)
    optimizer = torch.optim.Adam(nets.parameters(), lr=1e-3)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, max(1, epochs // 4), 0.5)
    for _ in range(epochs):
        for index in torch.randperm(len(sequences)).tolist():
            sequence = sequences[index]
            some = torch.randperm(len(sequence.queries), device=DEVICE)[:192]
            optimizer.zero_grad()
            sequence.error(output, nets, some).mean().backward()
            optimizer.step()
        halving.step()
    return nets.eval()


def size(errors):
    return torch.cat([own.sqrt() for own in errors]).mean().item()


class Study:
    def __init__(self, experiment):
        self.experiment = experiment
        self.tokens = min(1024, experiment.context())
        self.policy, self.budget = "h2o:sinks=4", 64
        self.amounts = experiment.quick([8, 48], [16, 128])
        config = json.loads((pathlib.Path(experiment.model) / "config.json").read_text())
        count = config["num_hidden_layers"]
        self.layers = sorted({count // 8, count // 2, count - 2})

    def traces(self, texts, count):
        """Captures up to `count` traces, each of a part of a text. The parts are taken from the texts in turn."""
        found, length = [], 6 * self.tokens
        whole = [pathlib.Path(text).read_text(errors="ignore") for text in texts]
        starts = range(3000, max(map(len, whole)), length)
        stretches = [text[start : start + length] for start in starts for text in whole]
        for stretch in [own for own in stretches if len(own) == length][:count]:
            piece = self.experiment.results / f"piece-{short_hash(stretch)}.txt"
            piece.write_text(stretch)
            found.append(kvlab.Trace(self.experiment.kvlab(
                ["capture"], "--model", self.experiment.model, "--prompt-file", piece, "--teacher-forced",
                "--prompt-tokens", PROMPT, "--max-tokens", self.tokens)))  # fmt: skip
        return found

    def output(self, layer, trace):
        """Reads W_o [query_heads, dim, hidden] of a layer from a checkpoint that consists of one file."""
        file = numpy.memmap(f"{self.experiment.model}/model.safetensors", mode="r")
        start = 8 + int.from_bytes(file[:8].tobytes(), "little")
        entry = json.loads(file[8:start].tobytes())[f"model.layers.{layer}.self_attn.o_proj.weight"]
        begin, end = entry["data_offsets"]
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry["dtype"]]
        weight = torch.frombuffer(file[start + begin : start + end].tobytes(), dtype=dtype).view(entry["shape"])
        weight = weight.float().to(DEVICE)
        return weight.T.reshape(trace.query_heads, trace.head_size, -1)

    def sequences(self, traces, layer, budget, is_quantized):
        options = {"layers": [layer], "output_error": "sample"}
        runs = [kvlab.replay(trace, policies=[self.policy], budgets=[budget], **options) for trace in traces]
        return [Sequence(trace, layer, run, self.policy.split(":")[0], budget, is_quantized)
                for trace, run in zip(traces, runs, strict=True)]  # fmt: skip

    def note(self, found, key, error):
        found.setdefault(key, []).append(error)
        print(self.layers[len(found[key]) - 1], *key, f"{error:.4f}", file=sys.stderr)

    def run(self, training, requested):
        learning, unseen = self.traces(training, max(self.amounts)), self.traces(requested, 4)
        trace = unseen[0]
        nets = Nets(trace.query_heads, trace.kv_heads, trace.head_size)
        token = 4 * trace.head_size  # bytes of a key and a value in 16 bit
        state = RANK * (trace.head_size + 1) * 2
        weights = nets.weight_bytes() // trace.kv_heads
        more = {"the budget": 0, "and the state": state, **{
            f"and the state and a part of the nets of {batch} sequences": state + weights // batch
            for batch in (256, 32, 8)}}  # fmt: skip
        found = {}
        for layer in self.layers:
            output = self.output(layer, trace)
            for bits, factor in (("16", 1), ("4", 3.2)):
                held = int(self.budget * factor)
                for name, extra in more.items():
                    budget = min(held + int(extra / token * factor), self.tokens)
                    with torch.no_grad():
                        own = [own.error(output) for own in self.sequences(unseen, layer, budget, bits == "4")]
                    self.note(found, (bits, f"{budget} tokens", name), size(own))
                lessons, tests = (self.sequences(own, layer, held, bits == "4") for own in (learning, unseen))
                for amount in sorted({min(amount, len(lessons)) for amount in self.amounts}):
                    nets = train(lessons[:amount], output, self.experiment.quick(max(8, 320 // amount), 40))
                    with torch.no_grad():
                        own = [sequence.error(output, nets) for sequence in tests]
                    learnt = f"learnt from {amount * self.tokens} tokens"
                    self.note(found, (bits, f"{held} tokens and LESS", learnt), size(own))
        return found, token, state, weights


def less():
    experiment = Experiment(__doc__)
    torch.manual_seed(1)
    study = Study(experiment)
    texts = experiment.arguments.text
    found, token, state, weights = study.run(texts[: len(texts) // 2], texts[len(texts) // 2 :])
    rows = [[*key, *(f"{error:.3f}" for error in [*own, sum(own) / len(own)])] for key, own in found.items()]
    experiment.section(
        f"`{study.policy}` at the bytes of {study.budget} tokens in 16 bit, with texts of {study.tokens} tokens. For a "
        f"KV head, a token takes {token} bytes, the state {state}, and the head's share of the nets {weights}.\n\n"
        + table(["bits", "kept", "in the bytes of", *(f"layer {layer}" for layer in study.layers), "mean"], rows)
    )
    experiment.write("LESS at equal bytes", QUESTION)


main(less)
