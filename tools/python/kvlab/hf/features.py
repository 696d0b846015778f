"""python -m kvlab.hf features: adds token features to finished traces, for the policies that read them
(docs/reference/configurations.md). Only value_out_norm1 needs the model."""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import numpy.typing

from kvlab import _kvlab
from kvlab._trace import Trace, mapped_tensors, rope_factor
from kvlab.hf.command_line import Parser, whole_number
from kvlab.hf.refused import Refused, refusing

Numbers = numpy.typing.NDArray[Any]
Arguments = argparse.Namespace

# ---------------------------------------------------------------------------------------------
# The trace


def part(trace: Trace, layer: int, name: Any) -> Numbers:
    """One layer's queries, keys or values [heads, tokens, head_size], before RoPE."""
    heads = trace.query_heads if name == "q" else trace.kv_heads
    return numpy.stack([trace.read(name, layer, head) for head in range(heads)])


def refuse_other_weights(trace: Trace, name: str, checksum: str) -> None:
    """Raises Refused if the trace was captured from other weights than those of --model."""
    if (wanted := trace.model["weights_xxh3"]) and wanted != checksum:
        found = checksum or "not in safetensors files"
        raise Refused(f"{trace.path}: was captured from weights {wanted}, but those of --model {name} are {found}")


def group(trace: Trace) -> int:
    return trace.query_heads // trace.kv_heads


def append_ends(trace: Trace) -> Numbers:
    """Returns [tokens]: the position after the last token of each token's append. A prompt segment is one append, and
    so is each decoded token."""
    ends: list[int] = []
    for start, tokens, kind in trace.segments:
        end = start + tokens
        ends += [end] * tokens if kind == "prompt" else range(start + 1, end + 1)
    return numpy.array(ends)


def row_of(trace: Trace, layer: int) -> dict[str, Any]:
    """The layer's entry of Trace.rows."""
    return trace.rows[trace.layer_numbers.index(layer)]


def rotated_keys(trace: Trace, layer: int) -> Numbers:
    """Keys [kv_heads, tokens, head_size] after the layer's RoPE at their positions, float64."""
    x, table = part(trace, layer, "k"), row_of(trace, layer)["rope"]
    frequencies = numpy.atleast_2d(trace.inv_freq)[table].astype(numpy.float64)
    factor = rope_factor(trace.path, table)
    angles = numpy.outer(numpy.arange(trace.tokens), frequencies)
    cos, sin = factor * numpy.cos(angles), factor * numpy.sin(angles)
    n, y = cos.shape[1], x.astype(numpy.float64)
    y[..., :n] = x[..., :n] * cos - x[..., n : 2 * n] * sin
    y[..., n : 2 * n] = x[..., n : 2 * n] * cos + x[..., :n] * sin
    return y


# ---------------------------------------------------------------------------------------------
# Features: each takes (trace, layer, arguments) and returns [kv_heads, tokens]


def scored(name: str, trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """Computes lagkv, expected_attention or redundancy in the same way as the decoders."""
    row = row_of(trace, layer)
    if name == "expected_attention" and (row["softcap"] > 0 or row["sink"] is not None):
        raise Refused(f"{trace.path}: layer {layer} has soft caps or sinks, which expected_attention does not support")
    settings = (arguments.sinks, arguments.lag, arguments.future)
    return numpy.stack([trace._held.score(name, layer, head, *settings) for head in range(trace.kv_heads)])


def key_cosine_rope(trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """The feature of KeyDiff: the cosine between a key after RoPE and the mean of the normalized keys, from the first
    token to the end of the key's append."""
    k, ends = rotated_keys(trace, layer), append_ends(trace)
    unit = k / numpy.maximum(numpy.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
    mean = unit.cumsum(axis=1)[:, ends - 1]
    feature: Numbers = (unit * mean).sum(axis=-1) / numpy.maximum(numpy.linalg.norm(mean, axis=-1), 1e-12)
    return feature


def output_projection(trace: Trace, folder: str, layer: int) -> Numbers:
    """o_proj [hidden, query_heads * head_size] of a layer in a checkpoint."""
    name, inputs = f"model.layers.{layer}.self_attn.o_proj.weight", trace.query_heads * trace.head_size
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found = mapped_tensors(str(file)).get(name)
        if found is None:
            continue
        bits = found[0].astype(numpy.uint32) << 16 if isinstance(found, tuple) else None  # bfloat16
        weight: Numbers = found.astype(numpy.float32) if bits is None else bits.view(numpy.float32)
        if weight.shape[1] != inputs:
            raise Refused(f"{file}: {name} takes {weight.shape[1]} inputs, but the trace has {inputs}")
        return weight
    raise Refused(f"{folder}: has no tensor {name}")


def value_out_norm1(trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """Sum over the group's query heads of the L1 norm of W_o v."""
    if arguments.model is None:
        raise Refused("feature value_out_norm1: needs --model DIR, the checkpoint that the trace was captured from")
    if layer == trace.layer_numbers[0]:
        with refusing():
            refuse_other_weights(trace, arguments.model, _kvlab.weights_xxh3(arguments.model))
    weight, v = output_projection(trace, arguments.model, layer), part(trace, layer, "v")
    feature = numpy.zeros((trace.kv_heads, trace.tokens))
    for query_head in range(trace.query_heads):
        own = weight[:, query_head * trace.head_size : (query_head + 1) * trace.head_size]
        head = query_head // group(trace)
        feature[head] += numpy.abs(v[head] @ own.T).sum(axis=-1, dtype=numpy.float64)
    return feature


FEATURES: dict[str, Callable[[Trace, int, Arguments], Numbers]] = {
    **{name: functools.partial(scored, name) for name in ("lagkv", "expected_attention", "redundancy")},
    "key_cosine_rope": key_cosine_rope,
    "value_out_norm1": value_out_norm1,
}


# ---------------------------------------------------------------------------------------------
# The command


def parse_arguments(argv: Sequence[str]) -> Arguments:
    parser = Parser(prog="kvlab.hf features", description="Adds a feature to finished traces.")
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="finished traces")
    several: Any = {"required": True, "action": "append", "choices": sorted(FEATURES)}
    add("--feature", metavar="NAME", help=", ".join(sorted(FEATURES)) + "; may be given several times", **several)
    add("--model", metavar="DIR", help="for value_out_norm1: the traces' checkpoint")
    add("--sinks", metavar="N", type=whole_number(0), default=4, help="first N tokens are not scored (default: 4)")
    add("--lag", metavar="N", type=whole_number(2), default=128, help="lagkv: tokens in a partition (default: 128)")
    future = "expected_attention: number of future positions whose queries count (default: 512)"
    add("--future", metavar="N", type=whole_number(1), default=512, help=future)
    add("--replace", action="store_true", help="replace the feature if a trace already has it")
    return parser.parse_args(argv)


def add(trace: Trace, name: str, arguments: Arguments) -> None:
    if name in trace._held.features and not arguments.replace:
        raise Refused(f"{trace.path}: has a feature {name} already; replace it with --replace")
    layers = [FEATURES[name](trace, layer, arguments).astype(numpy.float32) for layer in trace.layer_numbers]
    with refusing(f"{trace.path}: feature {name}: "):
        _kvlab.add_feature(trace._held, name, layers)
    print(f"{trace.path}: feature {name} of {trace.tokens} tokens")


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    with refusing():
        traces = [Trace(path, verify=False) for path in arguments.traces]
    for trace in traces:
        for name in dict.fromkeys(arguments.feature):
            add(trace, name, arguments)
    return 0
