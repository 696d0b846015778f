"""Reads kvlab traces into numpy, as docs/trace.md says: for scripts that look at attention itself.

Checks no checksums: `kvlab trace verify` does.
"""

import json
import pathlib

import numpy

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}


def read_tensors(path):
    """{name: array} of a safetensors file, mapped; bfloat16 is widened when it is sliced (see as_float32)."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = numpy.memmap(path, mode="r", offset=8 + size)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            tensors[name] = data[first:last].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def as_float32(array):
    """bfloat16 (mapped as its bits) and float16, widened."""
    if array.dtype == numpy.uint16:
        return (array.astype(numpy.uint32) << 16).view(numpy.float32)
    return array.astype(numpy.float32)


class Trace:
    """A finished trace; see `layer`."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.manifest = json.loads((self.directory / "manifest.json").read_text())
        config = self.manifest["config"]
        self.layers, self.head_size = config["layers"], config["head_size"]
        self.query_heads, self.kv_heads = config["query_heads"], config["kv_heads"]
        self.tokens, self.segments = self.manifest["tokens"], self.manifest["segments"]
        fed = read_tensors(self.directory / "tokens.safetensors")
        self.inv_freq, self.rope_factor = fed["inv_freq"], float(fed["rope_factor"][0])
        self.softmax_scale = float(fed["softmax_scale"][0])
        self.shards = [read_tensors(self.directory / shard["file"]) for shard in self.manifest["shards"]]

    def layer(self, index):
        """Queries [query head, token, dim], keys and values [KV head, token, dim], before RoPE, float32."""
        parts = ([shard[f"layers.{index}.{name}"] for shard in self.shards] for name in "qkv")
        return tuple(as_float32(numpy.concatenate(part, axis=1)) for part in parts)

    def rotated(self, vectors):
        """[head, token, dim] at the tokens' own positions: dimensions i and i + rotated / 2 turn together."""
        angles = numpy.arange(vectors.shape[1])[:, None] * self.inv_freq.astype(numpy.float64)
        cos, sin = (numpy.float32(self.rope_factor) * f(angles).astype(numpy.float32) for f in (numpy.cos, numpy.sin))
        half = len(self.inv_freq)
        low, high, rest = vectors[..., :half], vectors[..., half : 2 * half], vectors[..., 2 * half :]
        return numpy.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    def attention(self, index):
        """Of each query head of a layer: [query, key] probabilities under the full cache, float32."""
        queries, keys, _ = self.layer(index)
        queries, keys = self.rotated(queries), self.rotated(keys)
        future = numpy.triu(numpy.ones((self.tokens, self.tokens), dtype=bool), 1)
        for head in range(self.query_heads):
            logits = queries[head] @ keys[head // (self.query_heads // self.kv_heads)].T * self.softmax_scale
            logits[future] = -numpy.inf
            logits -= logits.max(axis=1, keepdims=True)
            numpy.exp(logits, out=logits)
            yield logits / logits.sum(axis=1, keepdims=True)
