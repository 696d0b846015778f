"""The caches of a model on CUDA. The kernel library stores their tokens and evicts them, through kvlab.ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import numpy.typing
import torch

from kvlab import _library
from kvlab.hf.layers import Layer
from kvlab.hf.models import name_of
from kvlab.hf.refused import Refused, one_line
from kvlab.ops import CacheLayer, KvCache


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise Refused(f"evicting: {one_line(error)}; use another length=, or model.to('cpu')") from None


class CudaCaches:
    """The caches of all layers for one sequence."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        layers: Sequence[Layer],
        dtype: torch.dtype,
        device: torch.device,
        outputs: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """`outputs`: a function that returns each layer's W_o [hidden, inputs]. It is called only for policies with a
        feature that reads W_o."""
        if name_of(dtype) not in _library.TYPES:
            raise Refused(f"evicting: dtype {name_of(dtype)} is not supported on CUDA; use {', '.join(_library.TYPES)}")
        for layer in layers:
            if layer.softcap or layer.sink is not None:
                what = "a soft cap" if layer.softcap else "sinks"
                why = f"layer {layer.index} has {what}, which caches on CUDA do not support"
                raise Refused(f"evicting: {why}; use model.to('cpu')")
        first = layers[0]
        self._plan, self._fed, self._heads = plan, [0] * len(layers), first.kv_heads
        weights: list[torch.Tensor | None] = [None] * len(layers)
        if "value_out_norm1" in plan["features"]:
            rows = (-1, first.query_heads, first.key_size)
            weights = [one.to(dtype).reshape(rows).contiguous() for one in outputs()]
        ropes = [(layer.rope.inv_freq, layer.rope.factor) for layer in layers]
        own = [
            CacheLayer(layer.index, layer.rope.softmax_scale, *rope, output)
            for layer, rope, output in zip(layers, ropes, weights)
        ]
        with _refusing():
            self._cache = KvCache(plan, own, first.query_heads, first.key_size, dtype, device)

    def begin_anew(self) -> None:
        """Drops all tokens. Buffers keep their addresses, so captured CUDA graphs stay valid."""
        self._cache.clear()
        self._fed = [0] * len(self._fed)

    # --- Contents -------------------------------------------------------------------------------

    def tokens(self, layer: int) -> int:
        return self._fed[layer]

    def kept(self, layer: int, head: int) -> numpy.typing.NDArray[numpy.uint32]:
        if not (0 <= layer < len(self._fed) and 0 <= head < self._heads):
            there = f"{len(self._fed)} layers of {self._heads} heads"
            raise IndexError(f"kept: layer {layer}, head {head} does not exist; the model has {there}")
        return self._cache.positions(layer, head)

    @property
    def evictions(self) -> int:
        return int(self._cache.info().evictions)

    @property
    def kv_bytes(self) -> int:
        return int(self._cache.info().kv_bytes)

    @property
    def allocated_bytes(self) -> int:
        return int(self._cache.info().allocated)

    # --- Attention ------------------------------------------------------------------------------

    def attend(self, layer: int, qkv: torch.Tensor, is_prompt: bool) -> torch.Tensor:
        """Appends tokens `qkv` [tokens, query_heads + 2 * kv_heads, head_size], before RoPE. Returns [tokens,
        query_heads, head_size]."""
        if is_prompt:
            return self._append(layer, qkv)
        if layer == 0:
            self.before_token()
        self._fed[layer] += 1
        return self.token(layer, qkv)

    def _append(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        outs: list[torch.Tensor] = []
        step = self._plan["chunk"] or len(qkv)
        for first in range(0, len(qkv), step):
            part = qkv[first : first + step]
            with _refusing():
                outs.append(self._cache.append(layer, part, self._fed[layer], first + len(part) == len(qkv)))
            self._fed[layer] += len(part)
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def before_token(self) -> None:
        """Does the host's work of a decode step. Called before token() of any layer."""
        with _refusing():
            self._cache.begin_step()

    def count_token(self) -> None:
        """Counts a decode step in which no layer called attend(), because a CUDA graph was replayed."""
        self._fed = [fed + 1 for fed in self._fed]

    def token(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Computes the attention of one decoded token. Only launches kernels."""
        return self._cache.step(layer, qkv)
