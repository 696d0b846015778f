#!/usr/bin/env python3
"""Adds to a finished trace how much the model's predictions depend on each head's output. See docs/sensitivities.md.

    python3 tools/sensitivities.py TRACE... --model DIR --draws 4

For each draw a next token is drawn for every query of the span, from the model's own distribution under the full
cache; stored is the gradient of the sum of their log-likelihoods with respect to what each head puts out (before the
output projection), at every position. Exits 2 with one line if anything is wrong with the input.
"""

import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "python"))

try:
    import safetensors
    import safetensors.torch
    import torch
    import transformers
    from command_line import Parser, announce_size, refuse_missing_cuda, whole_number
    from kvlab.hf.models import (
        DTYPES,
        default_attention,
        default_device,
        load_config,
        load_model,
        refuse_unsupported,
        shape_of,
        weights_xxh3,
    )
    from kvlab.hf.trace_files import FORMAT, Refused, one_line, write_manifest, xxh3_of
    from kvlab.hf.trace_writer import TensorFile
except ImportError as missing:
    print(
        f"sensitivities.py: cannot import {missing.name}: pip install torch transformers safetensors xxhash",
        file=sys.stderr,
    )
    sys.exit(2)

LOGITS = 1 << 25  # at once: 128 MiB in float32, and four times that for what is made of them
FLOAT16_MOST = 1 << 14  # the largest gradient is stored as less than twice this


# ---------------------------------------------------------------------------------------------
# The trace


class Trace:
    """A finished trace: its manifest, and what was fed."""

    def __init__(self, directory):
        self.directory, self.name = pathlib.Path(directory), str(directory)
        path = self.directory / "manifest.json"
        try:
            self.manifest = json.loads(path.read_text())
            self.config, self.shards = self.manifest["config"], self.manifest["shards"]
            self.dtype = DTYPES[self.config["dtype"]]
            decoded = [part for part in self.manifest["segments"] if part["kind"] == "decode"]
            self.decoded = [range(part["start"], part["start"] + part["tokens"]) for part in decoded]
            newest, checksum = self.manifest["format"], self.manifest["tokens_xxh3"]
            covered = sum(shard["tokens"] for shard in self.shards)
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}; a finished trace is expected") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(
                f"{path}: is not the manifest of a trace ({type(error).__name__}: {one_line(error, 80)})"
            ) from None
        if newest not in (1, FORMAT):
            raise Refused(f"{path}: trace format {newest}; up to {FORMAT} is expected")
        tokens = self.directory / "tokens.safetensors"
        if xxh3_of(tokens) != checksum:
            raise Refused(f"{tokens}: does not have the manifest's checksum; `kvlab trace verify` says more")
        stored = safetensors.torch.load_file(tokens)
        if "ids" not in stored:
            raise Refused(f"{tokens}: has no tensor 'ids'; a trace's tokens are expected")
        self.ids = stored["ids"].long()
        if covered != len(self.ids):
            raise Refused(f"{path}: shards of {covered} tokens; {len(self.ids)} were fed")

    def queries(self, span):
        """The positions of the span."""
        if span == "all":
            return torch.arange(len(self.ids))
        if not self.decoded:
            raise Refused(f"{self.name}: no decode segment; --span all takes every query")
        return torch.cat([torch.arange(part.start, part.stop) for part in self.decoded])

    def refuse_another_model(self, name, checksum):
        """By its weights; what has no weights in the manifest cannot be told apart."""
        if not self.manifest.get("weights_xxh3"):
            raise Refused(
                f"{self.name}: its manifest has no weights_xxh3; a trace that names its model is expected"
            )
        if self.manifest["weights_xxh3"] != checksum:
            raise Refused(
                f"{self.name}: was captured from weights {self.manifest['weights_xxh3']}; those of --model {name}"
                f" are {checksum or 'not in safetensors files'}"
            )

    def refuse_another_shape(self, name, model, shape):
        for key, value in vars(shape).items():
            if self.config.get(key) != value:
                raise Refused(f"{self.name}: {key} is {self.config.get(key)}; --model {name} has {value}")
        if not 0 <= int(self.ids.min()) <= int(self.ids.max()) < model.config.vocab_size:
            raise Refused(
                f"{self.name}: id {int(self.ids.max())}; the vocabulary is {model.config.vocab_size}"
            )


class GradientFiles:
    """The files beside the shards, filled layer by layer. Only what is being written is in memory.

    In float16 a layer is stored as soon as it comes, by a power of two that suits it; finish() brings a file's layers
    to one scale. The other dtypes hold whatever float32 does.
    """

    def __init__(self, trace, draws, shape):
        self.trace, self.files, self.entries, self.exponents = trace, [], [], []
        for index, shard in enumerate(trace.shards):
            slab = (trace.dtype, (draws, shape.query_heads, shard["tokens"], shape.head_size))
            tensors = {"grad_scale": (torch.float32, (1,))}
            tensors |= {f"layers.{layer}.grad": slab for layer in range(shape.layers)}
            name = f"grad-{index:05}.safetensors"
            self.entries.append({"file": name, "first": shard["first"], "tokens": shard["tokens"]})
            self.files.append(TensorFile(trace.directory / name, tensors))
            self.exponents.append([None] * shape.layers)  # of zeros alone: none

    def put(self, layer, gradient):
        """`gradient` [draws, tokens, heads, head_size]."""
        if not torch.isfinite(gradient).all():
            raise Refused(
                f"{self.trace.name}: layer {layer}: the gradient is not finite; nothing can be stored"
            )
        for file, entry, exponents in zip(self.files, self.entries, self.exponents):
            part = gradient[:, entry["first"] : entry["first"] + entry["tokens"]].transpose(1, 2)
            if self.trace.dtype == torch.float16 and part.any():
                exponents[layer] = math.frexp(float(part.abs().max()))[1] - math.frexp(FLOAT16_MOST)[1]
                part = part * 2.0 ** -exponents[layer]
            file.write(f"layers.{layer}.grad", part.to(self.trace.dtype))

    def finish(self):
        """Returns what the manifest says of the files."""
        for file, entry, exponents in zip(self.files, self.entries, self.exponents):
            largest = max((exponent for exponent in exponents if exponent is not None), default=0)
            for layer, exponent in enumerate(exponents):
                if exponent not in (None, largest):
                    name = f"layers.{layer}.grad"
                    file.write(name, (file.read(name).float() * 2.0 ** (exponent - largest)).half())
            file.write("grad_scale", torch.tensor([2.0**largest]))
            entry["xxh3"] = file.seal()
        return self.entries

    def discard(self):
        for file in self.files:
            file.discard()


# ---------------------------------------------------------------------------------------------
# Gradients


def forward(model, ids):
    """Feeds the ids. Returns each layer's input, what else it was called with, and what the last one put out."""
    inputs, calls, last = [], [], []
    layers = model.model.layers

    def recording(plain):
        def run(hidden, *rest, **named):
            inputs.append(hidden)
            calls.append((rest, named))
            return plain(hidden, *rest, **named)

        return run

    hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    try:
        for layer in layers:
            layer.forward = recording(layer.forward)
        model.model(input_ids=ids[None].to(model.device), use_cache=False)
    finally:
        hook.remove()
        for layer in layers:
            vars(layer).pop("forward", None)
    return inputs, calls, last[0]


def drawn(log_p, uniforms):
    """The tokens [draws, n] at which the cumulated probabilities [n, vocabulary] pass `uniforms` [draws, n].

    So a draw is the same on every device, but where rounding decides.
    """
    cumulated = log_p.double().exp_().cumsum_(-1)
    marks = uniforms.T.to(cumulated.device) * cumulated[:, -1:]
    found = torch.searchsorted(cumulated, marks.contiguous(), right=True)
    return found.clamp_(max=log_p.shape[-1] - 1).T


def gradients_behind(model, hidden, queries, uniforms):
    """Of the sums of log p(y) with respect to `hidden`, what the last layer put out: [draws, 1, tokens, width]; and y.

    The logits are made for a part of the queries at a time.
    """
    head = model.get_output_embeddings()
    gradients = hidden.new_zeros(len(uniforms), *hidden.shape)
    tokens = []
    rows = max(1, LOGITS // model.config.vocab_size)
    for part, marks in zip(queries.split(rows), uniforms.split(rows, dim=1)):
        x = hidden[0, part.to(hidden.device)].requires_grad_()
        with torch.enable_grad():
            log_p = head(model.model.norm(x)).log_softmax(-1)
            y = drawn(log_p.detach(), marks)
            sums = log_p.gather(1, y.T).sum(0).unbind()
        for draw, total in enumerate(sums):
            (gradient,) = torch.autograd.grad(total, x, retain_graph=True)
            gradients[draw, 0, part.to(hidden.device)] = gradient
        tokens.append(y.cpu())
    return gradients, torch.cat(tokens, dim=1)


def through(layer, call, hidden, gradients):
    """Runs a layer again and takes the gradients through it, in place: from those of its output to those of its input.

    Returns those of its o_proj's input, [draws, tokens, heads * head_size].
    """
    rest, named = call
    outputs = []
    hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    x = hidden.detach().requires_grad_()
    with torch.enable_grad():
        result = layer(x, *rest, **named)
    hook.remove()
    result = result[0] if isinstance(result, tuple) else result
    of_heads = []
    for draw, gradient in enumerate(gradients):
        again = draw + 1 < len(gradients)
        at_heads, at_input = torch.autograd.grad(result, (outputs[0], x), gradient, retain_graph=again)
        gradients[draw] = at_input
        of_heads.append(at_heads[0])
    return torch.stack(of_heads)


def sensitivities(model, shape, ids, queries, uniforms, put):
    """Calls put(layer, gradient [draws, tokens, heads, head_size]) for each layer, the last one first.

    Returns the tokens that were drawn, [draws, queries].
    """
    inputs, calls, last = forward(model, ids)
    gradients, tokens = gradients_behind(model, last, queries, uniforms)
    for index in reversed(range(shape.layers)):
        of_heads = through(model.model.layers[index], calls.pop(), inputs.pop(), gradients)
        put(index, of_heads.view(len(uniforms), len(ids), shape.query_heads, shape.head_size))
        progress(shape.layers - index, shape.layers)
    return tokens


# ---------------------------------------------------------------------------------------------
# The command


def progress(done, of):
    if sys.stderr.isatty():
        print(
            f"\rsensitivities: {done} of {of} layers ",
            end="\n" if done == of else "",
            file=sys.stderr,
            flush=True,
        )


def add_to(trace, model, shape, arguments):
    queries = trace.queries(arguments.span)
    generator = torch.Generator().manual_seed(arguments.seed)
    uniforms = torch.rand(arguments.draws, len(queries), generator=generator, dtype=torch.float64)
    manifest = trace.manifest | {"format": FORMAT}
    manifest.setdefault("spans", [])
    extras = {name: extra for name, extra in manifest.get("extras", {}).items() if name != "grad"}
    if "grad" in manifest.get("extras", {}):  # whose files are about to be replaced
        write_manifest(trace.directory, manifest | {"extras": extras})
    files = GradientFiles(trace, arguments.draws, shape)
    try:
        sensitivities(model, shape, trace.ids, queries, uniforms, files.put)
        grad = {"draws": arguments.draws, "seed": arguments.seed, "span": arguments.span}
        grad["files"] = files.finish()
        write_manifest(trace.directory, manifest | {"extras": extras | {"grad": grad}})
    except BaseException:
        files.discard()
        raise


def parse_arguments(argv):
    parser = Parser(prog="sensitivities.py", description="Adds gradients to finished traces, by PyTorch.")
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="finished traces of the model")
    add("--model", metavar="DIR", required=True, help="the checkpoint that they were captured from")
    add("--draws", metavar="N", type=whole_number(1, 64), default=4, help="of next tokens (default: 4)")
    add("--seed", metavar="S", type=whole_number(0, (1 << 63) - 1), default=1, help="of the draws (default: 1)")
    add(
        "--span",
        choices=["decode", "all"],
        default="decode",
        help="the queries whose predictions count, as in kvlab replay (default: decode)",
    )
    add("--replace", action="store_true", help="where a trace has gradients already")
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    arguments = parser.parse_args(argv)
    refuse_missing_cuda(parser, arguments)
    return arguments


def run(arguments):
    traces = [Trace(directory) for directory in arguments.traces]
    for trace in traces:
        if "grad" in trace.manifest.get("extras", {}) and not arguments.replace:
            raise Refused(f"{trace.name}: has gradients already; --replace makes them again")
        trace.queries(arguments.span)
    refuse_unsupported(arguments.model, load_config(arguments.model))
    checksum = weights_xxh3(arguments.model)
    for trace in traces:
        trace.refuse_another_model(arguments.model, checksum)
    model = load_model(
        arguments.model, "float32", default_attention(), arguments.device or default_device()
    ).requires_grad_(False)
    shape = shape_of(model)
    for trace in traces:
        trace.refuse_another_shape(arguments.model, model, shape)
    slots = sum(shard["tokens"] for trace in traces for shard in trace.shards) * shape.layers * shape.query_heads
    values, width = arguments.draws * slots * shape.head_size, torch.finfo(traces[0].dtype).bits // 8
    announce_size("sensitivities.py", "gradients beside the traces", values * width)
    for trace in traces:
        add_to(trace, model, shape, arguments)
        print(f"{trace.name}: {arguments.draws} draws over {len(trace.queries(arguments.span))} queries")


def main(argv=None):
    arguments = parse_arguments(argv)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with torch.no_grad():
            run(arguments)
    except torch.cuda.OutOfMemoryError as error:
        print(f"sensitivities.py: {one_line(error, 120)}; --device cpu may have more", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sensitivities.py: interrupted; the traces named above have gradients", file=sys.stderr)
        return 2
    except (Refused, OSError, safetensors.SafetensorError) as error:
        print(f"sensitivities.py: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
