#!/usr/bin/env python3
"""Adds columns to finished traces: one number a token, for the policies that read them (docs/configurations.md).

Needs numpy and xxhash; no model but for value_out_norm1.
"""

import json
import pathlib
import sys

import numpy
from command_line import Parser, whole_number
from trace_reader import Tensors, Trace

from kvlab.hf.trace_files import FORMAT, Refused, write_by_rename, write_manifest, xxh3_of_weights

# ---------------------------------------------------------------------------------------------
# Files


def safetensors_bytes(tensors):
    """tensors: name -> float32 array."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values())


def add_column(trace, name, layers, replace):
    """layers: for each an array [kv_heads, tokens]."""
    manifest = trace.manifest | {"format": FORMAT}
    manifest.setdefault("spans", [])
    extras = dict(manifest.get("extras", {}))
    columns = list(extras.get("columns", []))
    if any(column["name"] == name for column in columns) and not replace:
        raise Refused(f"{trace.name}: has a column {name} already; --replace makes it again")
    tensors = {}
    for layer, values in enumerate(layers):
        values = numpy.ascontiguousarray(values, dtype=numpy.float32)
        if values.shape != (trace.kv_heads, trace.tokens):
            wanted = [trace.kv_heads, trace.tokens]
            raise Refused(f"column {name}: layer {layer} is {list(values.shape)}; {wanted} is expected")
        if not numpy.isfinite(values).all():
            raise Refused(f"column {name}: layer {layer}: a value is not finite; nothing can be stored")
        tensors[f"layers.{layer}.column.{name}"] = values
    columns = [column for column in columns if column["name"] != name]
    if len(columns) < len(extras.get("columns", [])):  # its file is about to be replaced
        write_manifest(trace.directory, manifest | {"extras": extras | {"columns": columns}})
    file, content = f"column-{name}.safetensors", safetensors_bytes(tensors)
    checksum = write_by_rename(trace.directory / file, lambda part: part.write_bytes(content))
    columns.append({"name": name, "file": file, "xxh3": checksum})
    trace.manifest = manifest | {"extras": extras | {"columns": columns}}
    write_manifest(trace.directory, trace.manifest)


# ---------------------------------------------------------------------------------------------
# Columns: each takes (trace, layer, arguments) and returns [kv_heads, tokens]


def softmax(x):
    e = numpy.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def lag_scores(states, lag):
    """[partitions, lag] of one head, [partitions * lag, dim]: by the range of the partition behind each."""
    parts = states.reshape(-1, lag, states.shape[-1]).astype(numpy.float64)
    low, high = parts[1:].min(axis=1, keepdims=True), parts[1:].max(axis=1, keepdims=True)
    relative = (parts[:-1] - low) / numpy.maximum(high - low, 1e-12)
    return softmax(relative.std(axis=-1, ddof=1))


def lagkv(trace, layer, arguments):
    """LagKV: a token's place in its partition by the mean of its key's (behind RoPE) and its value's score; 1: not
    scored yet."""
    lag, sinks = arguments.lag, arguments.sinks
    k = numpy.stack([trace.rotated(keys) for keys in trace.part(layer, "k")])
    v = trace.part(layer, "v")
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


def mean_rotation(trace, first, count):
    """cos and sin [head_size / 2 pairs] averaged over positions; 1 and 0 for dimensions that do not turn."""
    frequencies = trace.fixed.read("inv_freq").astype(numpy.float64)
    angles = numpy.outer(numpy.arange(first, first + count), frequencies)
    factor = float(trace.fixed.read("rope_factor")[0])
    return factor * numpy.cos(angles).mean(axis=0), factor * numpy.sin(angles).mean(axis=0)


def rotation_matrix(cos, sin, size):
    """R with R x = x rotated: dimensions i and i + half go together."""
    half, matrix = len(cos), numpy.eye(size)
    first, second = numpy.arange(half), numpy.arange(half) + half
    matrix[first, first], matrix[second, second] = cos, cos
    matrix[first, second], matrix[second, first] = -sin, sin
    return matrix


def expected_attention(trace, layer, arguments):
    """Expected Attention: what queries drawn as those of the latest prompt would give, times the value's length."""
    q, k, v = (trace.part(layer, name) for name in "qkv")
    scale, sinks = float(trace.fixed.read("softmax_scale")[0]), arguments.sinks
    lengths = numpy.sqrt((v.astype(numpy.float64) ** 2).sum(axis=-1))
    keys = numpy.stack([trace.rotated(k[head]) for head in range(trace.kv_heads)])
    column = numpy.zeros((trace.kv_heads, trace.tokens))
    segments = trace.segments
    for index, segment in enumerate(segments):
        first, end = segment["start"], segment["start"] + segment["tokens"]
        if segment["kind"] == "prompt" or index == 0:
            seen = end
            rotation = rotation_matrix(*mean_rotation(trace, seen, arguments.future), trace.size)
        past = min(sinks, seen - 1)
        for head in range(trace.kv_heads):
            total = numpy.zeros(end - first)
            for g in range(trace.group()):
                queries = q[head * trace.group() + g, past:seen].astype(numpy.float64)
                mean = rotation @ queries.mean(axis=0)
                spread = rotation @ numpy.cov(queries.T, bias=True) @ rotation.T
                logits = scale * keys[head] @ mean
                logits += scale**2 / 2 * numpy.einsum("ni,ij,nj->n", keys[head], spread, keys[head])
                known = logits[past:seen]
                total += numpy.exp(logits[first:end] - known.max()) / numpy.exp(known - known.max()).sum()
            column[head, first:end] = total / trace.group() * lengths[head, first:end]
    return column


def redundancy(trace, layer, arguments):
    """R-KV: the softmax, over the tokens up to the admission's end, of each key's mean cosine with the others."""
    k, ends = trace.part(layer, "k").astype(numpy.float64), trace.admission_ends()
    column = numpy.zeros((trace.kv_heads, trace.tokens))
    for head in range(trace.kv_heads):
        unit = k[head] / numpy.maximum(numpy.sqrt((k[head] ** 2).sum(axis=-1, keepdims=True)), 1e-12)
        for end in numpy.unique(ends):
            # A mean of cosines is a product with the sum of unit keys, less one's own.
            own = (unit[:end] ** 2).sum(axis=-1)
            shares = softmax((unit[:end] @ unit[:end].sum(axis=0) - own) / end)
            column[head, :end][ends[:end] == end] = shares[ends[:end] == end]
    return column


def key_cosine_rope(trace, layer, arguments):
    """KeyDiff: cosine of the key, behind RoPE, with the mean of the unit keys up to its admission's end."""
    k, ends = numpy.stack([trace.rotated(keys) for keys in trace.part(layer, "k")]), trace.admission_ends()
    unit = k / numpy.maximum(numpy.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
    mean = unit.cumsum(axis=1)[:, ends - 1]
    return (unit * mean).sum(axis=-1) / numpy.maximum(numpy.linalg.norm(mean, axis=-1), 1e-12)


def output_projections(trace, directory):
    """Reads o_proj of each layer. Refuses a checkpoint that is not the trace's."""
    directory = pathlib.Path(directory)
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    found = xxh3_of_weights(single if single.exists() else None, index if index.exists() else None)
    wanted = trace.manifest.get("weights_xxh3")
    if wanted and found and wanted != found:
        raise Refused(f"{trace.name}: was captured from weights {wanted}; those of --model {directory} are {found}")
    files = [Tensors(path) for path in sorted(directory.glob("*.safetensors"))]
    if not files:
        raise Refused(f"{directory}: no *.safetensors; the checkpoint's folder is expected")

    def of_layer(layer):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        for file in files:
            if name in file.header:
                weight = file.read(name)
                wanted = trace.heads * trace.size
                if weight.shape[1] != wanted:
                    raise Refused(f"{file.path}: {name} takes {weight.shape[1]} inputs; the trace has {wanted}")
                return weight
        raise Refused(f"{directory}: no tensor {name}")

    return of_layer


def value_out_norm1(trace, layer, arguments):
    """Σ over the group's query heads of the magnitudes of W_o v."""
    if arguments.model is None:
        raise Refused("column value_out_norm1: needs --model DIR, the checkpoint that the trace was captured from")
    if layer == 0:
        arguments.projections = output_projections(trace, arguments.model)
    weight = arguments.projections(layer)
    v = trace.part(layer, "v")
    column = numpy.zeros((trace.kv_heads, trace.tokens))
    for query_head in range(trace.heads):
        own = weight[:, query_head * trace.size : (query_head + 1) * trace.size]
        head = query_head // trace.group()
        column[head] += numpy.abs(v[head] @ own.T).sum(axis=-1, dtype=numpy.float64)
    return column


COLUMNS = {f.__name__: f for f in (lagkv, expected_attention, redundancy, key_cosine_rope, value_out_norm1)}


# ---------------------------------------------------------------------------------------------
# The command


def parse_arguments(argv):
    parser = Parser(prog="columns.py", description="Adds a column to finished traces.")
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="finished traces")
    several = {"required": True, "action": "append", "choices": sorted(COLUMNS)}
    add("--column", metavar="NAME", help=", ".join(sorted(COLUMNS)) + "; repeatable", **several)
    add("--model", metavar="DIR", help="for value_out_norm1: the traces' checkpoint")
    add("--sinks", metavar="N", type=whole_number(0), default=4, help="first tokens that are not scored (default: 4)")
    add("--lag", metavar="N", type=whole_number(2), default=128, help="lagkv: tokens of a partition (default: 128)")
    add(
        "--future",
        metavar="N",
        type=whole_number(1),
        default=512,
        help="expected_attention: positions ahead that queries are taken from (default: 512)",
    )
    add("--replace", action="store_true", help="where a trace has the column already")
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    try:
        for trace in [Trace(directory) for directory in arguments.traces]:
            for name in dict.fromkeys(arguments.column):
                layers = [COLUMNS[name](trace, layer, arguments) for layer in range(trace.layers)]
                add_column(trace, name, layers, arguments.replace)
                print(f"{trace.name}: column {name} of {trace.tokens} tokens")
    except (Refused, OSError) as error:
        print(f"columns.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
