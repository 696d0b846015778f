"""A sketch of a model's output projections, bit for bit that of `kvlab capture`: see traces/extras.hpp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import numpy.typing
import torch

Bits = numpy.typing.NDArray[numpy.uint64]
Numbers = numpy.typing.NDArray[numpy.float64]

COLUMNS = 64
SEED = 1  # of captures


def split_mix(x: Bits) -> Bits:
    """Of an array of uint64, which wraps."""
    x = x + numpy.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


def uniform(bits: Bits) -> Numbers:
    """In (0, 1]."""
    return ((bits >> numpy.uint64(11)) + numpy.uint64(1)).astype(numpy.float64) * 2.0**-53


def each(function: Callable[[float], float], values: Numbers) -> Numbers:
    """By the C library: numpy's own logarithm and cosine may round the last bit otherwise."""
    return numpy.array([function(value) for value in values.tolist()])


def sketch_normal(seed: int, first: int, count: int) -> Numbers:
    """`count` elements of R from index `first` on, before its variance of 1/64."""
    key = split_mix(numpy.array([seed], dtype=numpy.uint64))
    index = 2 * numpy.arange(first, first + count, dtype=numpy.uint64)
    u, v = uniform(split_mix(key ^ index)), uniform(split_mix(key ^ (index + numpy.uint64(1))))
    return numpy.sqrt(-2 * each(math.log, u)) * each(math.cos, 2 * math.pi * v)


def output_sketch(projections: Iterable[torch.Tensor], seed: int = SEED) -> dict[str, Any]:
    """The tensors of output.safetensors. `projections`: each layer's weight [hidden, inputs].

    Sums are in float32, row by row of the weight, product and sum each rounded.
    """
    tensors = {}
    for layer, weight in enumerate(projections):
        hidden, inputs = weight.shape
        drawn = sketch_normal(seed, layer * hidden * COLUMNS, hidden * COLUMNS) / math.sqrt(COLUMNS)
        r = torch.from_numpy(drawn).float().view(hidden, 1, COLUMNS).to(weight.device)
        rows = weight.detach().float().view(hidden, inputs, 1)
        sketch = torch.zeros(inputs, COLUMNS, device=weight.device)
        product = torch.empty_like(sketch)
        for row, of_r in zip(rows, r):
            torch.mul(row, of_r, out=product)
            sketch.add_(product)
        tensors[f"layers.{layer}.sketch"] = sketch.bfloat16().cpu()
    return tensors
