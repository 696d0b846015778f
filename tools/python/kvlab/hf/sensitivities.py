"""python -m kvlab.hf sensitivities: adds to a finished trace how much the model's predictions depend on each head's
output. See docs/guides/gradients.md.

For each sample, it chooses a random next token for every measured query, from the model's distribution under the full
cache. It stores the gradient of the sum of these tokens' log-likelihoods with respect to each head's output (before the
output projection), at every position.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from kvlab import _kvlab
from kvlab._trace import Trace
from kvlab.hf.command_line import Parser, announce_size, refuse_missing_cuda, whole_number
from kvlab.hf.features import refuse_other_weights
from kvlab.hf.models import (
    DTYPES,
    Shape,
    default_device,
    load_config,
    load_model,
    refuse_unsupported,
    shape_of,
    weights_xxh3,
)
from kvlab.hf.refused import Refused, one_line, refusing

PROGRAM = "kvlab.hf sensitivities"
# The maximum number of logits that are computed at once: 128 MiB in float32. What is computed from them takes another
# 512 MiB.
LOGITS = 1 << 25
FLOAT16_EXPONENT = 15  # the largest stored gradient is less than 2 to this power

# ---------------------------------------------------------------------------------------------
# The trace


def queries_of(trace: Trace, queries: str) -> torch.Tensor:
    """Positions of the measured queries."""
    chosen = [torch.arange(start, start + n) for start, n, kind in trace.segments if queries == "all" or kind == "decode"]
    if not chosen:
        raise Refused(f"{trace.path}: has no decode segment; use --queries all")
    return torch.cat(chosen)


def refuse_another_shape(trace: Trace, name: str, model: Any, shape: Shape) -> None:
    for key, value in vars(shape).items():
        if getattr(trace, key) != value:
            raise Refused(f"{trace.path}: {key} is {getattr(trace, key)}, but --model {name} has {value}")
    if trace.ids.max() >= model.config.vocab_size:
        raise Refused(f"{trace.path}: has id {trace.ids.max()}, but the vocabulary has {model.config.vocab_size} ids")


# ---------------------------------------------------------------------------------------------
# Gradients


def forward(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[Any], torch.Tensor]:
    """Feeds the ids. Returns each layer's input, its other arguments, and the last layer's output."""
    inputs: list[torch.Tensor] = []
    calls: list[Any] = []
    last: list[torch.Tensor] = []
    layers = model.model.layers

    def recording(plain: Any) -> Any:
        def run(hidden: torch.Tensor, *rest: Any, **named: Any) -> Any:
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


def sampled_tokens(log_p: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Samples tokens [samples, n] from `log_p` [n, vocabulary]: the first token at which the cumulative probability
    exceeds a number of `uniforms` [samples, n]. All devices sample the same tokens, except where rounding errors
    decide."""
    cumulated = log_p.double().exp_().cumsum_(-1)
    marks = uniforms.T.to(cumulated.device) * cumulated[:, -1:]
    found: torch.Tensor = torch.searchsorted(cumulated, marks.contiguous(), right=True)
    return found.clamp_(max=log_p.shape[-1] - 1).T


def gradients_behind(
    model: Any, hidden: torch.Tensor, queries: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a token y for each query and sample. Returns gradients [samples, 1, tokens, width] and the tokens y. A
    sample's gradient is that of the sum of log p(y) over the queries, with respect to `hidden` (the last layer's
    output). Computes the logits of a part of the queries at a time."""
    head = model.get_output_embeddings()
    gradients = hidden.new_zeros(len(uniforms), *hidden.shape)
    tokens = []
    rows = max(1, LOGITS // model.config.vocab_size)
    for part, marks in zip(torch.split(queries, rows), torch.split(uniforms, rows, dim=1)):
        x = hidden[0, part.to(hidden.device)].requires_grad_()
        with torch.enable_grad():
            log_p = head(model.model.norm(x)).log_softmax(-1)
            y = sampled_tokens(log_p.detach(), marks)
            sums = log_p.gather(1, y.T).sum(0).unbind()
        for sample, total in enumerate(sums):
            (gradient,) = torch.autograd.grad(total, x, retain_graph=True)
            gradients[sample, 0, part.to(hidden.device)] = gradient
        tokens.append(y.cpu())
    return gradients, torch.cat(tokens, dim=1)


def through(layer: Any, call: Any, hidden: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Runs a layer again and propagates `gradients` in place from the layer's output to its input. Returns the
    gradients with respect to the input of o_proj, [samples, tokens, heads * head_size]."""
    rest, named = call
    outputs: list[torch.Tensor] = []
    hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    x = hidden.detach().requires_grad_()
    with torch.enable_grad():
        result = layer(x, *rest, **named)
    hook.remove()
    result = result[0] if isinstance(result, tuple) else result
    head_outputs = []
    for sample, gradient in enumerate(gradients):
        again = sample + 1 < len(gradients)
        at_heads, at_input = torch.autograd.grad(result, (outputs[0], x), gradient, retain_graph=again)
        gradients[sample] = at_input
        head_outputs.append(at_heads[0])
    return torch.stack(head_outputs)


def sensitivities(
    model: Any,
    shape: Shape,
    ids: torch.Tensor,
    queries: torch.Tensor,
    uniforms: torch.Tensor,
    put: Callable[[int, torch.Tensor], None],
) -> torch.Tensor:
    """Calls put(layer, gradient [samples, tokens, heads, head_size]) for each layer, the last one first. Returns the
    sampled tokens [samples, queries]."""
    inputs, calls, last = forward(model, ids)
    gradients, tokens = gradients_behind(model, last, queries, uniforms)
    for index in reversed(range(shape.layers)):
        head_outputs = through(model.model.layers[index], calls.pop(), inputs.pop(), gradients)
        put(index, head_outputs.view(len(uniforms), len(ids), shape.query_heads, shape.head_size))
        progress(shape.layers - index, shape.layers)
    return tokens


# ---------------------------------------------------------------------------------------------
# The command


def progress(done: int, layers: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == layers else ""
        print(f"\rsensitivities: {done} of {layers} layers ", end=end, file=sys.stderr, flush=True)


def scale_of(largest: float, dtype: str) -> float:
    """The power of two by which a file's gradients are divided so that they fit float16. It is 1 for other dtypes,
    which have the range of float32."""
    return 2.0 ** (math.frexp(largest)[1] - FLOAT16_EXPONENT) if dtype == "float16" and largest else 1.0


def add_to(trace: Trace, model: Any, shape: Shape, arguments: argparse.Namespace) -> None:
    queries = queries_of(trace, arguments.queries)
    generator = torch.Generator().manual_seed(arguments.seed)
    uniforms = torch.rand(arguments.samples, len(queries), generator=generator, dtype=torch.float64)
    sizes = (shape.layers, arguments.samples, trace.tokens, shape.query_heads, shape.head_size)
    with tempfile.TemporaryFile(dir=trace.path) as file:  # only the part being written is in memory
        os.posix_fallocate(file.fileno(), 0, 4 * math.prod(sizes))
        gradients = numpy.memmap(file, numpy.float32, shape=sizes)

        def put(layer: int, gradient: torch.Tensor) -> None:
            if not torch.isfinite(gradient).all():
                raise Refused(f"{trace.path}: layer {layer}: the gradient is not finite; nothing can be stored")
            gradients[layer] = gradient.cpu().numpy()

        sensitivities(model, shape, torch.from_numpy(trace.ids).long(), queries, uniforms, put)
        starts = range(0, trace.tokens, _kvlab.shard_tokens)
        parts = [gradients[:, :, start : start + _kvlab.shard_tokens] for start in starts]
        scales = [scale_of(max(part.max(), -part.min()), trace.dtype) for part in parts]
        with refusing():
            _kvlab.add_gradients(trace._held, arguments.samples, arguments.seed, arguments.queries, scales, gradients)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description="Adds gradients to finished traces, by PyTorch.")
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="finished traces of the model")
    add("--model", metavar="DIR", required=True, help="the checkpoint that the traces were captured from")
    add("--samples", metavar="N", type=whole_number(1, 64), default=4, help="number of gradient samples (default: 4)")
    add("--seed", metavar="S", type=whole_number(0, (1 << 63) - 1), default=1, help="random seed (default: 1)")
    queries_help = "queries whose predictions are measured, as in --queries of kvlab replay (default: decode)"
    add("--queries", choices=["decode", "all"], default="decode", help=queries_help)
    add("--replace", action="store_true", help="replace gradients that a trace already has")
    add("--device", choices=["cuda", "cpu"], help="device to run on (default: cuda if there is a device)")
    arguments = parser.parse_args(argv)
    refuse_missing_cuda(parser, arguments)
    return arguments


def run(arguments: argparse.Namespace) -> None:
    with refusing():
        traces = [Trace(path) for path in arguments.traces]
    for trace in traces:
        if trace._held.has_gradients and not arguments.replace:
            raise Refused(f"{trace.path}: has gradients already; replace them with --replace")
        queries_of(trace, arguments.queries)
    refuse_unsupported(arguments.model, load_config(arguments.model))
    checksum = weights_xxh3(arguments.model)
    for trace in traces:
        if not trace.model["weights_xxh3"]:
            raise Refused(
                f"{trace.path}: its manifest has no weights_xxh3, so its model is not known; capture it "
                "again with this version"
            )
        refuse_other_weights(trace, arguments.model, checksum)
    device = arguments.device or default_device()
    model = load_model(arguments.model, "float32", "sdpa", device).requires_grad_(False)
    shape = shape_of(model.config)
    for trace in traces:
        refuse_another_shape(trace, arguments.model, model, shape)
    elements = sum(trace.tokens for trace in traces) * shape.layers * shape.query_heads * shape.head_size
    size = arguments.samples * elements * torch.finfo(DTYPES[traces[0].dtype]).bits / 8
    announce_size(PROGRAM, "gradients beside the traces", size)
    for trace in traces:
        add_to(trace, model, shape, arguments)
        queries = len(queries_of(trace, arguments.queries))
        print(f"{trace.path}: {arguments.samples} gradient samples over {queries} queries")


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    try:
        with torch.no_grad():
            run(arguments)
    except torch.cuda.OutOfMemoryError as error:
        raise Refused(f"{one_line(error, 120)}; try --device cpu") from None
    except KeyboardInterrupt:
        raise Refused("interrupted; the traces named above have gradients") from None
    return 0
