"""The queries, keys and values of a layer, for policies with `rows=True`."""

from __future__ import annotations

import collections
import functools
import os
import threading
from typing import Any

import numpy
import numpy.typing

from kvlab import _kvlab
from kvlab._trace import mapped_tensors, rope_factor

Floats = numpy.typing.NDArray[numpy.float32]

_MAX_HELD = 256  # layers held at once, over all sequences


class Rows:
    """Queries, keys and values of one layer. In a replay they are those of all tokens. Outside of replays they are
    those of the prompt only.

    `q` [query_heads, tokens, head_size], `k` and `v` [kv_heads, tokens, head_size], float32, before RoPE. `inv_freq`
    [rotated / 2], `rope_factor` and `softmax_scale` describe the layer's attention. In a replay `ids` [tokens] are the
    token ids, and `output` [query_heads, head_size, directions] is the trace's sketch of the output projection W_o, if
    the trace has one. Outside of replays both are None. `memo` is a dict in which a policy may store what it computes
    once.
    """

    def __init__(self, q: Floats, k: Floats, v: Floats, inv_freq: Floats, rope_factor: float, scale: float) -> None:
        self.q, self.k, self.v = q, k, v
        self.inv_freq, self.rope_factor, self.softmax_scale = inv_freq, rope_factor, scale
        self.ids: numpy.typing.NDArray[numpy.int32] | None = None
        self.output: Floats | None = None
        self.memo: dict[Any, Any] = {}

    def turns(self, first: int, count: int) -> tuple[Floats, Floats]:
        """Returns the cos and sin of RoPE, each [count, rotated / 2] and multiplied by `rope_factor`, for the `count`
        positions from `first` on."""
        angles = numpy.outer(numpy.arange(first, first + count), self.inv_freq.astype(float))
        cos, sin = self.rope_factor * numpy.cos(angles), self.rope_factor * numpy.sin(angles)
        return cos.astype(numpy.float32), sin.astype(numpy.float32)

    def turned(self, x: Floats) -> Floats:
        """Applies RoPE at the positions 0, 1, 2, ... to `x` [heads, tokens, head_size], which is q or k, and returns
        the result."""
        cos, sin = self.turns(0, x.shape[1])
        n, y = len(self.inv_freq), x.copy()
        y[..., :n] = x[..., :n] * cos - x[..., n : 2 * n] * sin
        y[..., n : 2 * n] = x[..., n : 2 * n] * cos + x[..., :n] * sin
        return y


class Sight:
    """The rows that one replay or evaluation shows to a policy. The extension stores them by calling `rows()` and
    `trace()`; `read()` returns them to the policy's function."""

    def __init__(self) -> None:
        self._traces: dict[int, _kvlab.Trace] = {}
        self._shown: collections.OrderedDict[tuple[int, int], Rows] = collections.OrderedDict()
        self._read = functools.lru_cache(maxsize=4)(self._rows_of_trace)
        self._lock = threading.Lock()

    def trace(self, sequence: int, path: str) -> None:
        if sequence not in self._traces or self._traces[sequence].path != path:
            self._traces[sequence] = _kvlab.Trace.open(path, False, None)
            self._read.cache_clear()

    def rows(
        self, sequence: int, layer: int, first: int, q: Floats, k: Floats, v: Floats, inv_freq: Floats, *rest: float
    ) -> None:
        parts: list[Any] = [part.swapaxes(0, 1) for part in (q, k, v)]
        with self._lock:
            before = self._shown.pop((sequence, layer), None)
            if first and before is not None:
                gap = first - before.k.shape[1]  # decoded tokens, which are not shown; filled with NaN
                parts = [
                    numpy.concatenate((old[:, :first], numpy.full_like(new[:, :1], numpy.nan).repeat(max(gap, 0), 1), new), 1)
                    for old, new in zip((before.q, before.k, before.v), parts)
                ]
            self._shown[sequence, layer] = Rows(parts[0], parts[1], parts[2], inv_freq, *rest)
            while len(self._shown) > _MAX_HELD:
                self._shown.popitem(last=False)

    def read(self, sequence: int, layer: int) -> Rows:
        with self._lock:
            shown = self._shown.get((sequence, layer))
            return shown if shown is not None else self._read(sequence, layer)

    def _rows_of_trace(self, sequence: int, layer: int) -> Rows:
        trace = self._traces[sequence]
        row: dict[str, Any] = trace.rows[trace.layer_numbers.index(layer)]
        table: Any = row["rope"] if trace.inv_freq.ndim > 1 else ...
        q, k, v = (
            numpy.stack([trace.read(part, layer, head) for head in range(heads)])
            for part, heads in (("q", trace.query_heads), ("k", trace.kv_heads), ("v", trace.kv_heads))
        )
        rows = Rows(q, k, v, trace.inv_freq[table], rope_factor(trace.path, row["rope"]), row["scale"])
        rows.ids = trace.ids
        if os.path.exists(sketch := os.path.join(trace.path, "output.safetensors")):
            (bits,) = mapped_tensors(sketch)[f"layers.{layer}.sketch"]  # bfloat16
            directions = bits.shape[-1]
            rows.output = (bits.astype(numpy.uint32) << 16).view(numpy.float32).reshape(len(q), -1, directions)
        return rows
