"""python -m kvlab.hf columns: adds one number a token to finished traces, for the policies that read them
(docs/configurations.md). Needs no model but for value_out_norm1.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import numpy.typing

from kvlab import _kvlab
from kvlab._trace import Trace, mapped_tensors
from kvlab.hf.command_line import Parser, whole_number
from kvlab.hf.refused import Refused, refusing

Numbers = numpy.typing.NDArray[Any]
Arguments = argparse.Namespace

# ---------------------------------------------------------------------------------------------
# The trace


def part(trace: Trace, layer: int, name: Any) -> Numbers:
    """[heads, tokens, head_size], before RoPE."""
    heads = trace.query_heads if name == "q" else trace.kv_heads
    return numpy.stack([trace.read(name, layer, head) for head in range(heads)])


def refuse_other_weights(trace: Trace, name: str, checksum: str) -> None:
    """Those that --model names, where the trace names its own."""
    if (wanted := trace.model["weights_xxh3"]) and wanted != checksum:
        found = checksum or "not in safetensors files"
        raise Refused(f"{trace.path}: was captured from weights {wanted}; those of --model {name} are {found}")


def group(trace: Trace) -> int:
    return trace.query_heads // trace.kv_heads


def admission_ends(trace: Trace) -> Numbers:
    """[tokens]: where each token's admission ends: a prompt's segment at once, decoded tokens one by one."""
    ends: list[int] = []
    for start, tokens, kind in trace.segments:
        end = start + tokens
        ends += [end] * tokens if kind == "prompt" else range(start + 1, end + 1)
    return numpy.array(ends)


def row_of(trace: Trace, layer: int) -> dict[str, Any]:
    """How the layer's queries attend."""
    return trace.rows[trace.layer_numbers.index(layer)]


def turns(trace: Trace, layer: int, positions: Numbers) -> tuple[Numbers, Numbers]:
    """cos and sin [positions, pairs] of the layer's own rotation, times its factor."""
    table = row_of(trace, layer)["rope"]
    frequencies = numpy.atleast_2d(trace.inv_freq)[table].astype(numpy.float64)
    factor = mapped_tensors(str(pathlib.Path(trace.path) / "tokens.safetensors"))["rope_factor"][table]
    angles = numpy.outer(positions, frequencies)
    return float(factor) * numpy.cos(angles), float(factor) * numpy.sin(angles)


def rotated_keys(trace: Trace, layer: int) -> Numbers:
    """[kv_heads, tokens, head_size] at the tokens' own positions, float64."""
    x = part(trace, layer, "k")
    cos, sin = turns(trace, layer, numpy.arange(trace.tokens))
    n, y = cos.shape[1], x.astype(numpy.float64)
    y[..., :n] = x[..., :n] * cos - x[..., n : 2 * n] * sin
    y[..., n : 2 * n] = x[..., n : 2 * n] * cos + x[..., :n] * sin
    return y


# ---------------------------------------------------------------------------------------------
# Columns: each takes (trace, layer, arguments) and returns [kv_heads, tokens]


def softmax(x: Numbers) -> Numbers:
    e: Numbers = numpy.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def lag_scores(states: Numbers, lag: int) -> Numbers:
    """[partitions, lag] of one head, [partitions * lag, dim]: by the range of the partition behind each."""
    parts = states.reshape(-1, lag, states.shape[-1]).astype(numpy.float64)
    low, high = parts[1:].min(axis=1, keepdims=True), parts[1:].max(axis=1, keepdims=True)
    relative = (parts[:-1] - low) / numpy.maximum(high - low, 1e-12)
    return softmax(relative.std(axis=-1, ddof=1))


def lagkv(trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """LagKV: a token's place in its partition by the mean of its key's (behind RoPE) and its value's score; 1: not
    scored yet."""
    lag, sinks = arguments.lag, arguments.sinks
    k, v = rotated_keys(trace, layer), part(trace, layer, "v")
    column = numpy.ones((trace.kv_heads, trace.tokens))
    partitions = max(0, (trace.tokens - sinks) // lag)
    if partitions < 2:
        return column
    inner = slice(sinks, sinks + partitions * lag)
    for head in range(trace.kv_heads):
        scores = (lag_scores(k[head, inner], lag) + lag_scores(v[head, inner], lag)) / 2
        places = scores.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable") / lag
        column[head, sinks : sinks + (partitions - 1) * lag] = places.reshape(-1)
    return column


def mean_rotation(trace: Trace, layer: int, first: int, count: int) -> tuple[Numbers, Numbers]:
    """cos and sin [head_size / 2 pairs] averaged over positions; 1 and 0 for dimensions that do not turn."""
    cos, sin = turns(trace, layer, numpy.arange(first, first + count))
    return cos.mean(axis=0), sin.mean(axis=0)


def rotation_matrix(cos: Numbers, sin: Numbers, size: int) -> Numbers:
    """R with R x = x rotated: dimensions i and i + half go together."""
    half, matrix = len(cos), numpy.eye(size)
    first, second = numpy.arange(half), numpy.arange(half) + half
    matrix[first, first], matrix[second, second] = cos, cos
    matrix[first, second], matrix[second, first] = -sin, sin
    return matrix


def expected_attention(trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """Expected Attention: what queries drawn as those of the latest prompt would give, times the value's length."""
    q, v, keys = part(trace, layer, "q"), part(trace, layer, "v"), rotated_keys(trace, layer)
    row, sinks = row_of(trace, layer), arguments.sinks
    if row["softcap"] > 0 or row["sink"] is not None:
        raise Refused(f"{trace.path}: layer {layer} caps its scores or has sinks, which expected_attention knows not")
    scale = row["scale"]
    lengths = numpy.sqrt((v.astype(numpy.float64) ** 2).sum(axis=-1))
    column = numpy.zeros((trace.kv_heads, trace.tokens))
    for first, tokens, kind in trace.segments:
        end = first + tokens
        if kind == "prompt" or first == 0:
            seen = end
            rotation = rotation_matrix(*mean_rotation(trace, layer, seen, arguments.future), trace.head_size)
        past = min(sinks, seen - 1)
        for head in range(trace.kv_heads):
            total = numpy.zeros(end - first)
            for g in range(group(trace)):
                queries = q[head * group(trace) + g, past:seen].astype(numpy.float64)
                mean = rotation @ queries.mean(axis=0)
                spread = rotation @ numpy.cov(queries.T, bias=True) @ rotation.T
                logits = scale * keys[head] @ mean
                logits += scale**2 / 2 * numpy.einsum("ni,ij,nj->n", keys[head], spread, keys[head])
                known = logits[past:seen]
                total += numpy.exp(logits[first:end] - known.max()) / numpy.exp(known - known.max()).sum()
            column[head, first:end] = total / group(trace) * lengths[head, first:end]
    return column


def redundancy(trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """R-KV: the softmax, over the tokens up to the admission's end, of each key's mean cosine with the others."""
    k, ends = part(trace, layer, "k").astype(numpy.float64), admission_ends(trace)
    column = numpy.zeros((trace.kv_heads, trace.tokens))
    for head in range(trace.kv_heads):
        unit = k[head] / numpy.maximum(numpy.sqrt((k[head] ** 2).sum(axis=-1, keepdims=True)), 1e-12)
        for end in numpy.unique(ends):
            # A mean of cosines is a product with the sum of unit keys, less one's own.
            own = (unit[:end] ** 2).sum(axis=-1)
            shares = softmax((unit[:end] @ unit[:end].sum(axis=0) - own) / end)
            column[head, :end][ends[:end] == end] = shares[ends[:end] == end]
    return column


def key_cosine_rope(trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """KeyDiff: cosine of the key, behind RoPE, with the mean of the unit keys up to its admission's end."""
    k, ends = rotated_keys(trace, layer), admission_ends(trace)
    unit = k / numpy.maximum(numpy.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
    mean = unit.cumsum(axis=1)[:, ends - 1]
    column: Numbers = (unit * mean).sum(axis=-1) / numpy.maximum(numpy.linalg.norm(mean, axis=-1), 1e-12)
    return column


def output_projection(trace: Trace, folder: str, layer: int) -> Numbers:
    """o_proj of a layer in a checkpoint, [hidden, query_heads * head_size]."""
    name, inputs = f"model.layers.{layer}.self_attn.o_proj.weight", trace.query_heads * trace.head_size
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found = mapped_tensors(str(file)).get(name)
        if found is None:
            continue
        bits = found[0].astype(numpy.uint32) << 16 if isinstance(found, tuple) else None  # bfloat16
        weight: Numbers = found.astype(numpy.float32) if bits is None else bits.view(numpy.float32)
        if weight.shape[1] != inputs:
            raise Refused(f"{file}: {name} takes {weight.shape[1]} inputs; the trace has {inputs}")
        return weight
    raise Refused(f"{folder}: no tensor {name}")


def value_out_norm1(trace: Trace, layer: int, arguments: Arguments) -> Numbers:
    """Σ over the group's query heads of the magnitudes of W_o v."""
    if arguments.model is None:
        raise Refused("column value_out_norm1: needs --model DIR, the checkpoint that the trace was captured from")
    if layer == trace.layer_numbers[0]:
        with refusing():
            refuse_other_weights(trace, arguments.model, _kvlab.weights_xxh3(arguments.model))
    weight, v = output_projection(trace, arguments.model, layer), part(trace, layer, "v")
    column = numpy.zeros((trace.kv_heads, trace.tokens))
    for query_head in range(trace.query_heads):
        own = weight[:, query_head * trace.head_size : (query_head + 1) * trace.head_size]
        head = query_head // group(trace)
        column[head] += numpy.abs(v[head] @ own.T).sum(axis=-1, dtype=numpy.float64)
    return column


COLUMNS: dict[str, Callable[[Trace, int, Arguments], Numbers]] = {
    f.__name__: f for f in (lagkv, expected_attention, redundancy, key_cosine_rope, value_out_norm1)
}


# ---------------------------------------------------------------------------------------------
# The command


def parse_arguments(argv: Sequence[str]) -> Arguments:
    parser = Parser(prog="kvlab.hf columns", description="Adds a column to finished traces.")
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="finished traces")
    several: Any = {"required": True, "action": "append", "choices": sorted(COLUMNS)}
    add("--column", metavar="NAME", help=", ".join(sorted(COLUMNS)) + "; repeatable", **several)
    add("--model", metavar="DIR", help="for value_out_norm1: the traces' checkpoint")
    add("--sinks", metavar="N", type=whole_number(0), default=4, help="first tokens that are not scored (default: 4)")
    add("--lag", metavar="N", type=whole_number(2), default=128, help="lagkv: tokens of a partition (default: 128)")
    future = "expected_attention: positions ahead that queries are taken from (default: 512)"
    add("--future", metavar="N", type=whole_number(1), default=512, help=future)
    add("--replace", action="store_true", help="where a trace has the column already")
    return parser.parse_args(argv)


def add(trace: Trace, name: str, arguments: Arguments) -> None:
    if name in trace._held.columns and not arguments.replace:
        raise Refused(f"{trace.path}: has a column {name} already; --replace makes it again")
    layers = [COLUMNS[name](trace, layer, arguments).astype(numpy.float32) for layer in trace.layer_numbers]
    with refusing(f"{trace.path}: column {name}: "):
        _kvlab.add_column(trace._held, name, layers)
    print(f"{trace.path}: column {name} of {trace.tokens} tokens")


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    with refusing():
        traces = [Trace(path, verify=False) for path in arguments.traces]
    for trace in traces:
        for name in dict.fromkeys(arguments.column):
            add(trace, name, arguments)
    return 0
