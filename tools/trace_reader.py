"""Reads kvlab traces into numpy, as docs/trace.md says: for scripts that look at keys, values and attention.

Checks no checksums: `kvlab trace verify` does.
"""

import json
import pathlib
import sys

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "python"))

from kvlab.hf.trace_files import FORMAT, Refused


class Tensors:
    """A safetensors file; tensors are widened to float32."""

    def __init__(self, path):
        self.path = path
        try:
            self.bytes = numpy.memmap(path, dtype=numpy.uint8, mode="r")
            size = int.from_bytes(self.bytes[:8].tobytes(), "little")
            self.header = json.loads(self.bytes[8 : 8 + size].tobytes())
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: cannot be read as safetensors: {error}") from None
        self.start = 8 + size

    def names(self):
        return [name for name in self.header if name != "__metadata__"]

    def read(self, name):
        if name not in self.header:
            raise Refused(f"{self.path}: no tensor {name}")
        entry = self.header[name]
        begin, end = (self.start + offset for offset in entry["data_offsets"])
        raw = self.bytes[begin:end]
        if entry["dtype"] == "BF16":
            values = (raw.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        elif entry["dtype"] in ("F32", "F16"):
            values = raw.view({"F32": numpy.float32, "F16": numpy.float16}[entry["dtype"]])
            values = values.astype(numpy.float32)
        else:
            raise Refused(f"{self.path}: {name} is {entry['dtype']}; F32, F16 or BF16 is expected")
        return values.reshape(entry["shape"])


class Trace:
    """A finished trace."""

    def __init__(self, directory):
        self.directory, self.name = pathlib.Path(directory), str(directory)
        path = self.directory / "manifest.json"
        try:
            self.manifest = json.loads(path.read_text())
            config, format = self.manifest["config"], self.manifest["format"]
            self.layers, self.heads = config["layers"], config["query_heads"]
            self.kv_heads, self.size = config["kv_heads"], config["head_size"]
            self.tokens, self.segments = self.manifest["tokens"], self.manifest["segments"]
            self.shards = [Tensors(self.directory / shard["file"]) for shard in self.manifest["shards"]]
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}; a finished trace is expected") from None
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{path}: not a manifest of a trace: {error}") from None
        if format not in (1, FORMAT):
            raise Refused(f"{path}: trace format {format}; up to {FORMAT} is expected")
        self.fixed = Tensors(self.directory / "tokens.safetensors")

    def part(self, layer, name):
        """[heads, tokens, head_size], before RoPE."""
        return numpy.concatenate([shard.read(f"layers.{layer}.{name}") for shard in self.shards], axis=1)

    def group(self):
        return self.heads // self.kv_heads

    def admission_ends(self):
        """[tokens]: where each token's admission ends: a prompt's segment at once, decoded tokens one by one."""
        ends = []
        for segment in self.segments:
            end = segment["start"] + segment["tokens"]
            each = range(segment["start"] + 1, end + 1)
            ends += [end] * segment["tokens"] if segment["kind"] == "prompt" else each
        return numpy.array(ends)

    def rotated(self, x):
        """x [tokens, head_size] of one head at the tokens' own positions, float64."""
        frequencies = self.fixed.read("inv_freq").astype(numpy.float64)
        angles = numpy.outer(numpy.arange(len(x)), frequencies)
        factor = float(self.fixed.read("rope_factor")[0])
        cos, sin = factor * numpy.cos(angles), factor * numpy.sin(angles)
        n, y = len(frequencies), x.astype(numpy.float64)
        y[:, :n], y[:, n : 2 * n] = x[:, :n] * cos - x[:, n : 2 * n] * sin, x[:, n : 2 * n] * cos + x[:, :n] * sin
        return y

    def attention(self, layer):
        """Of each query head: [query, key] probabilities under the full cache, float32."""
        queries, keys = self.part(layer, "q"), self.part(layer, "k")
        scale = float(self.fixed.read("softmax_scale")[0])
        future = numpy.triu(numpy.ones((self.tokens, self.tokens), dtype=bool), 1)
        for head in range(self.heads):
            query, key = (self.rotated(x).astype(numpy.float32) for x in (queries[head], keys[head // self.group()]))
            logits = query @ key.T * scale
            logits[future] = -numpy.inf
            logits -= logits.max(axis=1, keepdims=True)
            numpy.exp(logits, out=logits)
            yield logits / logits.sum(axis=1, keepdims=True)
