"""The kernel library's caches for PyTorch: `KvCache`, and the operators `torch.ops.kvlab.append` and `step`.

A `KvCache` wraps a kvlab_kv_cache object (docs/reference/c-api.md) and runs on the current CUDA stream. A step only
launches kernels, so torch.cuda.CUDAGraph can capture it and torch.compile can trace it. The first `KvCache` loads the
library.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import numpy.typing
import torch

from kvlab import _kvlab, _library
from kvlab._library import TYPES, done, library, policies

__all__ = ["CacheLayer", "KvCache", "policies"]

_NAMES = {getattr(torch, name): number for name, number in TYPES.items()}
_LIBRARY: Any = torch.library.Library("kvlab", "DEF")  # type: ignore[no-untyped-call]


class CacheLayer(NamedTuple):
    """A layer that the policy acts on."""

    number: int  # the model's number of the layer
    softmax_scale: float
    inv_freq: torch.Tensor  # [rotated / 2]
    rope_factor: float = 1.0
    output: torch.Tensor | None = None  # W_o [hidden, query_heads, head_size], only for the feature value_out_norm1
    sinks: torch.Tensor | None = None  # sink logits [query_heads], float32 (gpt-oss)


class KvCache:
    """The caches of one or more sequences in all layers that a policy acts on, in GPU memory."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        layers: Sequence[CacheLayer],
        query_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sequences: int = 1,
        draft_tokens: int = 0,
    ) -> None:
        """`plan`: a dict that _kvlab.slot_plan() returns. All sequences get the same numbers for each layer and KV
        head. `draft_tokens`: the maximum number of tokens of a sequence in a verification (`begin_drafts()`).

        Raises ValueError for an unsupported dtype, policy or number of layers, and RuntimeError for errors of CUDA.
        """
        if dtype not in _NAMES:
            raise ValueError(f"kvlab.ops.KvCache: dtype {dtype} is not supported; use {', '.join(TYPES)}")
        self.device, self.dtype, self._shape = torch.device(device), dtype, (query_heads, head_size)
        rules, tiers = (numpy.repeat(plan[name][:, None], sequences, 1) for name in ("rules", "tiers"))
        if len(rules) != len(layers):
            raise ValueError(f"kvlab.ops.KvCache: {len(layers)} layers are given, but the plan has {len(rules)}")
        self._drafted = 0  # number of tokens that are being verified
        self._sequences, self._given = sequences, (query_heads + 2 * rules.shape[2], head_size)
        known = _kvlab.built_in_features()
        features = numpy.array([known.index(name) for name in plan["features"]], numpy.int32)
        seeds = numpy.full(sequences, plan["seed"], numpy.uint64)
        policy = _library.policy(plan["policy"])
        params = _library.params(policy, plan["params"])
        tables = [(layer.inv_freq.detach().float().cpu().numpy().tobytes(), layer.rope_factor) for layer in layers]
        unlike = list(dict.fromkeys(tables))  # each different table once
        held = [ctypes.create_string_buffer(table, len(table)) for table, _ in unlike]
        ropes = [
            _library.Rope(ctypes.addressof(table), len(table) // 2, factor)
            for table, (_, factor) in zip(held, unlike)
        ]
        numbers = [
            _library.Layer(
                layer.number, layer.softmax_scale, unlike.index(table), _at(layer.output), _at(layer.sinks)
            )
            for layer, table in zip(layers, tables)
        ]
        self._outputs = [layer.output for layer in layers]  # the library reads these in every call, so they must
        self._sinks = [layer.sinks for layer in layers]  # live as long as the cache
        config = _library.KvCacheConfig(
            **{name: plan[name] for name in ("threshold16", "tokens", "every", "smooth", "once", "by_layer", "pool_max")},
            type=_NAMES[dtype],
            query_heads=query_heads,
            kv_heads=rules.shape[2],
            head_size=head_size,
            sequences=sequences,
            layer_count=len(layers),
            rope_count=len(ropes),
            tier_count=tiers.shape[3],
            feature_count=len(features),
            layers=ctypes.cast((_library.Layer * len(layers))(*numbers), ctypes.c_void_p),
            ropes=ctypes.cast((_library.Rope * len(ropes))(*ropes), ctypes.c_void_p),
            policy=policy,
            rules=rules.ctypes.data,
            tiers=tiers.ctypes.data,
            params=ctypes.addressof(params),
            seeds=seeds.ctypes.data,
            features=features.ctypes.data,
            hidden=next((len(output) for output in self._outputs if output is not None), 0),
            numbering=int(plan["cache_positions"]),
            draft_tokens=draft_tokens,
        )
        made = ctypes.c_void_p()
        torch.cuda.empty_cache()  # returns torch's unused memory, so that the library can allocate it
        self._done(lambda stream: library().kvlab_kv_cache_create(config, stream, ctypes.byref(made)))
        self.handle = int(made.value or 0)
        weakref.finalize(self, library().kvlab_kv_cache_destroy, made)

    def _done(self, call: Callable[[int], int]) -> None:
        """Calls the library with the device's current stream and raises its error."""
        with torch.cuda.device(self.device):
            done(call(torch.cuda.current_stream().cuda_stream))

    def clear(self) -> None:
        """Drops all tokens. Buffers keep their addresses, so captured CUDA graphs stay valid."""
        self._done(lambda stream: library().kvlab_kv_cache_clear(self.handle, stream))

    def start(self, sequence: int, seed: int | None = None) -> None:
        """Drops the tokens of one sequence, so that another text can use its slots. Other sequences are not changed.

        `seed`: a new random seed. Raises ValueError for a sequence that does not exist.
        """
        settings = _library.SequenceSettings()
        given = ctypes.c_uint64(0 if seed is None else seed)
        if seed is not None:
            settings.seed = ctypes.addressof(given)
        self._done(lambda stream: library().kvlab_kv_cache_start(self.handle, sequence, settings, stream))

    def copy(self, source: int, target: int) -> None:
        """Makes sequence `target` a copy of sequence `source`, for example of a prefix that both share."""
        self._done(lambda stream: library().kvlab_kv_cache_copy(self.handle, source, target, stream))

    def append(
        self, layer: int, qkv: torch.Tensor, fed: int, ends_prompt: bool = True, sequence: int = 0
    ) -> torch.Tensor:
        """Appends a part of a prompt to a layer and computes its attention.

        `qkv` [tokens, query_heads + 2 * kv_heads, head_size], before RoPE. `fed`: number of tokens of the sequence that
        the layer got before. Returns [tokens, query_heads, head_size]. Raises ValueError if shape or dtype do not fit.
        """
        out = self._out(qkv, len(qkv))
        torch.ops.kvlab.append.default(self.handle, sequence, layer, fed, ends_prompt, qkv, out)
        return out

    def begin_step(self, decodes: Sequence[bool] | None = None) -> None:
        """Does the host's work of a decode step. Call it before `step()` of all layers.

        `decodes`: which sequences decode a token in this step, by default all.
        """
        if decodes is not None and len(decodes) != self._sequences:
            right = f"give one for each of the {self._sequences} sequences"
            raise ValueError(f"kvlab.ops.KvCache: decodes has {len(decodes)} entries; {right}")
        chosen = None if decodes is None else bytes(decodes)
        self._done(lambda stream: library().kvlab_kv_cache_begin_step(self.handle, chosen, stream))

    def step(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Computes the attention of one decoded token for each sequence in one layer. Only launches kernels.

        `qkv` [sequences, query_heads + 2 * kv_heads, head_size], before RoPE. Returns [sequences, query_heads,
        head_size].
        """
        out = self._out(qkv, self._sequences)
        torch.ops.kvlab.step.default(self.handle, layer, qkv, out)
        return out

    def begin_drafts(self, tokens: Sequence[int]) -> None:
        """Begins the verification of drafts. Call `verify_drafts()` for all layers, and then `accept_drafts()`.

        `tokens`: the number of tokens to verify of each sequence, which are the last token of its text and its drafts.
        0: the sequence takes no part.
        """
        counts = self._counts("tokens", tokens)
        self._done(lambda stream: library().kvlab_kv_cache_begin_drafts(self.handle, counts.ctypes.data, stream))
        self._drafted = int(counts.sum())

    def verify_drafts(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Computes the attention of the tokens that are verified, in one layer.

        `qkv` [tokens, query_heads + 2 * kv_heads, head_size], before RoPE, the tokens of the first sequence first.
        Returns [tokens, query_heads, head_size].
        """
        out = self._out(qkv, self._drafted)
        stream = _check("verify_drafts", qkv, out)
        done(library().kvlab_kv_cache_verify_drafts(self.handle, layer, qkv.data_ptr(), out.data_ptr(), None, stream))
        return out

    def accept_drafts(self, accepted: Sequence[int]) -> None:
        """Ends the verification: appends the first `accepted` tokens of each sequence, and drops the others."""
        counts = self._counts("accepted", accepted)
        self._done(lambda stream: library().kvlab_kv_cache_accept_drafts(self.handle, counts.ctypes.data, stream))

    def _counts(self, name: str, given: Sequence[int]) -> numpy.typing.NDArray[numpy.uint32]:
        if len(given) != self._sequences:
            right = f"give one for each of the {self._sequences} sequences"
            raise ValueError(f"kvlab.ops.KvCache: {name} has {len(given)} entries; {right}")
        return numpy.array(given, numpy.uint32)

    def _out(self, qkv: torch.Tensor, rows: int) -> torch.Tensor:
        """Allocates the output of `rows` tokens. Checks `qkv`, because the library cannot see its shape."""
        expected = (rows, *self._given)
        if qkv.dtype is not self.dtype or tuple(qkv.shape) != expected:
            given = f"{qkv.dtype} {list(qkv.shape)}"
            raise ValueError(f"kvlab.ops.KvCache: qkv is {given}; it must be {self.dtype} {list(expected)}")
        return qkv.new_empty(rows, *self._shape)

    def info(self, sequence: int = 0) -> Any:
        """Returns `tokens`, `evictions`, `kv_bytes`, `allocated` (bytes) and `until_eviction` of a sequence. Does not wait
        for the GPU, because the host keeps these counts."""
        info = _library.SequenceInfo()
        done(library().kvlab_kv_cache_sequence_info(self.handle, sequence, info))
        return info

    def positions(self, layer: int, head: int, sequence: int = 0) -> numpy.typing.NDArray[numpy.uint32]:
        """Positions of the tokens that a KV head keeps, ascending. Waits for the GPU."""
        positions, count = numpy.empty(self.info(sequence).tokens + 1, numpy.uint32), ctypes.c_uint32()
        requested = (self.handle, sequence, layer, head, positions.ctypes.data, len(positions), ctypes.addressof(count))
        self._done(lambda stream: library().kvlab_kv_cache_positions(*requested, stream))
        return positions[: count.value]


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(name: str, qkv: torch.Tensor, out: torch.Tensor) -> int:
    """Returns the current stream. Raises ValueError unless both tensors are contiguous and on the current device."""
    for word, tensor in (("qkv", qkv), ("out", out)):
        if tensor.dtype is not qkv.dtype or tensor.device != qkv.device or not tensor.is_contiguous():
            gaps = "" if tensor.is_contiguous() else ", not contiguous"
            what = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}{gaps}"
            expected = f"it must be contiguous, {qkv.dtype}, on {qkv.device}"
            raise ValueError(f"kvlab::{name}: {word} is {what}; {expected}")
    if qkv.get_device() != torch.cuda.current_device():
        what = f"the tensors are on {qkv.device}, which is not the current device"
        raise ValueError(f"kvlab::{name}: {what}; call it in `with torch.cuda.device({qkv.get_device()}):`")
    return int(torch.cuda.current_stream(qkv.device).cuda_stream)


def _append(
    cache: int, sequence: int, layer: int, fed: int, ends_prompt: bool, qkv: torch.Tensor, out: torch.Tensor
) -> None:
    stream = _check("append", qkv, out)
    part = _library.AppendChunk(
        sequence=sequence,
        layer=layer,
        fed=fed,
        tokens=len(qkv),
        ends_prompt=int(ends_prompt),
        count=len(qkv),
        qkv=qkv.data_ptr(),
        out=out.data_ptr(),
    )
    done(library().kvlab_kv_cache_append(cache, part, stream))


def _step(cache: int, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
    stream = _check("step", qkv, out)
    done(library().kvlab_kv_cache_step(cache, layer, qkv.data_ptr(), out.data_ptr(), None, stream))


def _register() -> None:
    for name, schema, call in (
        ("append", "int cache, int sequence, int layer, int fed, bool ends_prompt", _append),
        ("step", "int cache, int layer", _step),
    ):
        _LIBRARY.define(f"{name}({schema}, Tensor qkv, Tensor(a!) out) -> ()")
        _LIBRARY.impl(name, call, "CUDA")
        torch.library.register_fake(f"kvlab::{name}", lambda *_, **__: None, lib=_LIBRARY)


_register()
