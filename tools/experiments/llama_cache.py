#!/usr/bin/env python3
"""Compares KL measured with the cache of llama.cpp with kvlab's evaluation and prediction (docs/results/llama-cpp.md).

Needs PyTorch, transformers and the packages gguf, tokenizers and xllamacpp (llama.cpp as a Python module).
"""

import contextlib
import json
import os
import pathlib
import sys

import gguf
import numpy as np
import torch
import xllamacpp
from experiment import Experiment, Refused, main, mean_and_error, name_of_model, table, tier_plan_of, values
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

QUESTION = """
This page asks whether llama.cpp's quantized cache has the KL that kvlab measures and predicts. kvlab rounds keys and
values as llama.cpp does, but computes attention with its own code. The page compares three numbers for caches of one
format (`-ctk`, `-ctv`):

- **predicted**: `kvlab plan`, from traces of the same texts and samples of gradients;
- **kvlab**: `kvlab eval --tiers FORMAT`, end to end on these texts;
- **llama.cpp**: the same tokens of the same texts in llama.cpp on the CPU, with flash attention and fp16 weights. These
  weights and kvlab's checkpoint are dequantized from the same GGUF file. The prompt is evaluated in one call, and then
  one token per call.

By default, llama.cpp rotates queries, keys and values by a Hadamard matrix before it quantizes them. kvlab's formats
with `_rot` do the same. The formats without `_rot` are compared with llama.cpp without rotation, which the environment
variable LLAMA_ATTN_ROT_DISABLE turns off.

KL is the mean over the decoded tokens, relative to the 16-bit cache of the same engine, in nats. For llama.cpp it is
computed from the probabilities of the 1,000 most probable tokens and from the sum of all other probabilities. Errors
are standard errors over the texts.

llama.cpp's attention differs from kvlab's in three ways. To see how much each of them matters, the model is evaluated
in PyTorch with an attention to which these differences are added one after another:

- **as kvlab**: none of the three differences. A decoded token is quantized before its own query attends, as in both
  engines. This column should equal the column "kvlab" of the first table;
- **channels**: a GGUF file of a Llama model stores the two channels of a RoPE pair beside each other, so a block of 32
  holds other channels than in the checkpoint;
- **prompt**: the prompt's queries attend to quantized keys and values, while kvlab quantizes the prompt only when the
  prompt ends;
- **query**: queries are rounded to 8 bits (`q8_0`) before they are multiplied by quantized keys. This column has all
  three differences, so it should equal the column "llama.cpp".
"""
FORMATS = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q8_0/q4_0"]
# The columns of the second table: each has one more of the three differences.
STEPS = {"as kvlab": [], "channels": ["channels"], "prompt": ["channels", "prompt"], "query": ["channels", "prompt", "query"]}
KEPT = 1000  # most probable tokens of the 16-bit cache
ASKED = 4000  # most probable tokens of the quantized cache; those of the 16-bit cache are looked up in them
SAMPLES = 4  # of the gradients
ROTATION = "LLAMA_ATTN_ROT_DISABLE"


def add_arguments(parser):
    parser.add_argument("--gguf", required=True, help="the GGUF file from which the checkpoint was converted")


def write_f16(source, target):
    """Copies a GGUF file with its tensors in 16 bit, which is what the converted checkpoint has."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers if numbers.ndim == 1 else numbers.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """llama.cpp with keys and values in the given formats."""

    def __init__(self, path, keys, values, context):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{keys.upper()}")
        params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{values.upper()}")
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.n_ctx = context
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # so that sums do not depend on the machine
        params.warmup = params.fit_params = False
        self.server = xllamacpp.Server(params)

    def top(self, ids, count):
        """Returns {token: log-probability} for the `count` most probable tokens after `ids`."""
        request = {"prompt": ids, "n_predict": 1, "logprobs": count, "cache_prompt": True, "temperature": 1.0, "samplers": []}
        for seed in range(100):  # a seed whose sampled token ends the text gives no probabilities
            answer = self.server.handle_completions(request | {"seed": seed})
            answer = json.loads(answer) if isinstance(answer, str) else answer
            if answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] != len(ids):
                raise Refused("llama.cpp evaluated other tokens than it was given")
            if found := answer["choices"][0]["logprobs"]:
                return {one["id"]: one["logprob"] for one in found["content"][0]["top_logprobs"]}
        raise Refused("llama.cpp did not return probabilities")


@contextlib.contextmanager
def rotation(enabled):
    if not enabled:
        os.environ[ROTATION] = "1"
    try:
        yield
    finally:
        os.environ.pop(ROTATION, None)


def divergence(full, own):
    """KL of two distributions over the tokens of `full`, with all other tokens taken together."""
    lowest = min(own.values())  # for tokens that are not in `own`
    found = [own.get(token, lowest) for token in full]
    p, q = (np.exp(np.array(list(logs), np.float64)) for logs in (full.values(), found))
    total = float(np.sum(p * np.log(p / q)))
    p_rest, q_rest = (max(1 - float(np.sum(part)), 1e-12) for part in (p, q))
    return total + p_rest * np.log(p_rest / q_rest)


def distributions(path, formats, texts, prompt, count):
    """Returns the most probable tokens, with their log-probabilities, at every scored token of every text."""
    keys, _, values = formats.partition("/")
    llama = Llama(path, keys, values or keys, max(map(len, texts)) + 64)
    found = []
    for ids in texts:
        llama.top(ids[:prompt], 1)  # the prompt in one call; its last query is not scored, as in kvlab
        found.append([llama.top(ids[:end], count) for end in range(prompt + 1, len(ids))])
    return found


def mean_kl(full, own):
    return mean_and_error([float(np.mean([divergence(a, b) for a, b in zip(*text)])) for text in zip(full, own)])


def rotated_name(name):
    """Returns kvlab's name of the format that llama.cpp rotates."""
    return "/".join(part + "_rot" for part in name.split("/"))


def predictions(experiment, names, texts):
    """Runs `kvlab plan`. Returns {format: sum of the losses of all layers}."""
    traces = [experiment.capture(experiment.tokens, prompt=experiment.tokens // 5, text=text) for text in texts]
    for trace in traces:
        experiment.add_gradients(trace, SAMPLES)
    first, *others = traces
    more = [word for trace in others for word in ("--trace", trace)]
    found = {}
    for name in names:
        choice = experiment.plan(first, "16bits", name.replace("/", ","), *more)
        keys, _, own = name.partition("/")
        found[name] = sum(one["keys"][keys] + one["values"][own or keys] for one in choice["losses"])
    return found


class Emulation:
    """The model in PyTorch with an attention over quantized keys and values, in float32."""

    def __init__(self, directory):
        ALL_ATTENTION_FUNCTIONS.register("kvlab_llama_cpp", self.attention)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        # llama.cpp's converter changes the order of channels for this architecture only.
        self.pairs = self.model.config.model_type == "llama"
        self.formats, self.rotates, self.steps, self.prompt = None, False, [], 0

    @torch.no_grad()
    def logs(self, ids, formats=None, rotates=False, steps=(), prompt=0):
        """Returns log-probabilities [token, word] with the full cache, or with the given formats of keys and values."""
        self.formats, self.rotates, self.steps, self.prompt = formats, rotates, steps, prompt
        self.model.set_attn_implementation("kvlab_llama_cpp" if formats else "eager")
        return torch.log_softmax(self.model(ids[None]).logits[0].double(), -1)

    def rounded(self, rows, name):
        if name == "f16":
            return rows
        kind, size = gguf.GGMLQuantizationType[name.upper()], rows.shape[-1]
        matrix = torch.ones(1, 1)
        while self.rotates and size % (2 * len(matrix)) == 0:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        matrix = matrix / len(matrix) ** 0.5

        def turned(x):
            return (x.reshape(-1, len(matrix)) @ matrix).reshape(x.shape)

        codes = gguf.quants.quantize(turned(rows).reshape(-1, size).numpy(), kind)
        return turned(torch.from_numpy(np.array(gguf.quants.dequantize(codes, kind))).reshape(rows.shape))

    def rounded_key(self, rows, name):
        if not (self.pairs and "channels" in self.steps):
            return self.rounded(rows, name)
        order = torch.arange(rows.shape[-1]).reshape(2, -1).t().reshape(-1)
        return self.rounded(rows[..., order].contiguous(), name)[..., order.argsort()]

    def attention(self, module, query, key, value, mask, scaling, **options):
        """query [text, head, token, dim], key and value [text, kv_head, token, dim]."""
        keys, values = self.formats
        group, tokens = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
        reader, read = tokens[:, None], tokens[None, :]
        quantized = (reader >= (0 if "prompt" in self.steps else self.prompt)) & (read <= reader)
        rounds = "query" in self.steps and keys != "f16"
        scores = [
            q @ k.repeat_interleave(group, 1).transpose(-1, -2)
            for q, k in ((self.rounded_key(query, "q8_0") if rounds else query, self.rounded_key(key, keys)), (query, key))
        ]
        p = (torch.where(quantized, *scores) * scaling).masked_fill(read > reader, float("-inf")).softmax(-1)
        own, exact = (v.repeat_interleave(group, 1) for v in (self.rounded(value, values), value))
        return ((p * quantized) @ own + (p * ~quantized) @ exact).transpose(1, 2).contiguous(), None


def kept(experiment, what, name, measure):
    """Returns the result of `measure`, or the result that an earlier run stored under this name."""
    path = experiment.results / f"{what}-{name.replace('/', '-')}.json"
    if not path.exists():
        path.write_text(json.dumps(measure()))
        print(f"{name}, {what}: {path.read_text()}", file=sys.stderr)
    return json.loads(path.read_text())


def emulated(experiment, names, ids):
    """Returns {format: [(KL, error) after each of STEPS]}."""
    emulation, prompt, found = Emulation(experiment.model), experiment.tokens // 5, {}
    ids = [torch.tensor(text) for text in ids]
    scored = [slice(prompt, len(text) - 1) for text in ids]
    full = [emulation.logs(text)[part] for text, part in zip(ids, scored)]

    def measure(name, steps):
        keys, _, values = name.replace("_rot", "").partition("/")
        kl = []
        for text, part, p in zip(ids, scored, full):
            q = emulation.logs(text, (keys, values or keys), "_rot" in name, steps, prompt)[part]
            kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
        return mean_and_error(kl)

    for name in names:
        found[name] = kept(experiment, "emulated", name, lambda: [measure(name, steps) for steps in STEPS.values()])
    return found


def with_error(pair):
    return f"{pair[0]:.3g} ± {pair[1]:.1g}"


def compare(experiment):
    texts, prompt = experiment.arguments.text, experiment.tokens // 5
    names = [*map(rotated_name, FORMATS), *FORMATS]
    predicted = predictions(experiment, names, texts)
    tiers = [word for name in names for word in ("--tiers", name)]
    rows = experiment.eval(["full"], ["100%"], *tiers, texts=texts)
    ours = {tier_plan_of(params)[1]: value for (_, params, _), value in values(rows, "kl").items()}
    tokenizer = Tokenizer.from_file(str(pathlib.Path(experiment.model) / "tokenizer.json"))
    ids = [tokenizer.encode(pathlib.Path(text).read_text()).ids[: experiment.tokens] for text in texts]
    steps = emulated(experiment, names, ids)
    path = experiment.results / "f16.gguf"
    if not path.exists():
        write_f16(experiment.arguments.gguf, path)
    with rotation(False):
        full = distributions(path, "f16", ids, prompt, KEPT)
    compared, explained = [], []
    for name in names:
        with rotation("_rot" in name):
            plain = name.replace("_rot", "")
            theirs = kept(experiment, "llama", name, lambda: mean_kl(full, distributions(path, plain, ids, prompt, ASKED)))
        ratios = [f"{theirs[0] / other:.2f}" for other in (ours[name][0], predicted[name])]
        compared.append([f"`{name}`", f"{predicted[name]:.3g}", with_error(ours[name]), with_error(theirs), *ratios])
        emulation = [*(with_error(step) for step in steps[name]), with_error(theirs)]
        explained.append([f"`{name}`", *emulation, f"{theirs[0] / steps[name][-1][0]:.2f}"])
    return "\n\n".join([
        table(["format", "predicted", "kvlab", "llama.cpp", "llama.cpp / kvlab", "llama.cpp / predicted"], compared),
        "KL in PyTorch, with one more of llama.cpp's differences in each column:",
        table(["format", *STEPS, "llama.cpp", "llama.cpp / query"], explained),
    ])  # fmt: skip


def llama_cache():
    experiment = Experiment(__doc__.splitlines()[0], arguments=add_arguments)
    experiment.section(f"## {name_of_model(experiment.model)}\n\n" + compare(experiment))
    experiment.write("Quantized caches of llama.cpp", QUESTION)


if __name__ == "__main__":
    main(llama_cache)
