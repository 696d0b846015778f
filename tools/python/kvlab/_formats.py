"""Quantizes keys and values, to show what a storage format loses."""

from __future__ import annotations

from typing import Any

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab


def quantize(rows: Any, format: str) -> numpy.typing.NDArray[numpy.float32]:
    """Quantizes keys or values and dequantizes them again, as a cache with that tier does.

    >>> error = kvlab.quantize(keys, "q4_0") - keys

    `rows`: floats [..., head_size], converted to float32; keys after RoPE. `format`: a format of one row, such as "4"
    or "q8_0" (docs/guides/precision-tiers.md lists them); each row is quantized by itself. Formats of llama.cpp whose
    name ends in "_rot" first rotate each row, in blocks whose length is the largest power of two that divides
    head_size. This is how llama.cpp rotates keys; it rotates values in blocks of 64 channels. Returns an array of
    float32 of the same shape as `rows`.

    Raises ValueError if the format is not known, if head_size is not a multiple of 32, or if a number is NaN or too
    large for the format's scale.
    """
    try:
        array = numpy.asarray(rows, dtype=numpy.float32)
    except (TypeError, ValueError, OverflowError):  # the last one for integers beyond the range of a float
        raise _arguments.refuse("rows", rows, "an array of floats [..., head_size]") from None
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(f"rows: has shape {list(array.shape)}; its shape must be [..., head_size]")
    flat = numpy.ascontiguousarray(array.reshape(-1, array.shape[-1]))
    quantized: numpy.typing.NDArray[numpy.float32] = _kvlab.quantize(flat, _arguments.text("format", format))
    return quantized.reshape(array.shape)
