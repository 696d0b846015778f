"""Quantization of blocks of channels (docs/guides/precision-tiers.md) and rotations, reimplemented for experiments."""

import numpy


def hadamard(size):
    matrix = numpy.ones((1, 1))
    while len(matrix) < size:
        matrix = numpy.block([[matrix, matrix], [matrix, -matrix]])
    return matrix.astype(numpy.float32) / numpy.sqrt(numpy.float32(size))


def quantize(rows, bits, block, turned):
    """Quantizes rows [token, dim] to `bits` and dequantizes them. Each block of channels has an fp16 scale and
    minimum."""
    if bits == 16:
        return rows
    own = rows.reshape(len(rows), -1, block)
    turn = hadamard(block) if turned else numpy.eye(block, dtype=numpy.float32)
    own = own @ turn
    lowest = own.min(axis=2, keepdims=True).astype(numpy.float16).astype(numpy.float32)
    scale = ((own.max(axis=2, keepdims=True) - lowest) / (2**bits - 1)).astype(numpy.float16).astype(numpy.float32)
    scale = numpy.maximum(scale, numpy.float32(6e-8))
    own = numpy.clip(numpy.rint((own - lowest) / scale), 0, 2**bits - 1) * scale + lowest
    return (own @ turn.T).reshape(rows.shape)


def rotated(rows, inv_freq):
    """Rotates rows [token, dim] by RoPE."""
    half = len(inv_freq)
    angle = numpy.arange(len(rows))[:, None] * inv_freq[None]
    low, high = rows[:, :half], rows[:, half : 2 * half]
    turned = [low * numpy.cos(angle) - high * numpy.sin(angle), high * numpy.cos(angle) + low * numpy.sin(angle)]
    return numpy.concatenate([*turned, rows[:, 2 * half :]], axis=1).astype(numpy.float32)
