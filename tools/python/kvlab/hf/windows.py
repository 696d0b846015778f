"""Caches of layers with a sliding window. They keep the same tokens as the model's own caches."""

from __future__ import annotations

import dataclasses

import numpy
import numpy.typing
import torch

from kvlab.hf.attention import Call, attention


class Window:
    """The last tokens of one sequence in one layer. They are the tokens that policy `window` would keep."""

    def __init__(self, size: int) -> None:
        self._size, self.tokens = size, 0
        self._k = self._v = torch.empty(0)

    def attend(self, call: Call) -> torch.Tensor:
        """Appends the call's n tokens and returns their attention outputs [n, query_heads, value_size]."""
        n, size = call.q.shape[1], self._size
        k = torch.cat((self._k, call.k), 1) if self.tokens else call.k
        v = torch.cat((self._v, call.v), 1) if self.tokens else call.v
        k, v = (held[:, -(size - 1 + n) :] for held in (k, v))
        self.tokens += n
        self._k, self._v = (held[:, -size:].clone() for held in (k, v))
        mask = None
        if n > 1:
            rows, keys = (torch.arange(-count, 0, device=k.device) for count in (n, k.shape[1]))
            ago = rows[:, None] - keys
            mask = torch.where((ago >= 0) & (ago < size), 0.0, -torch.inf)[None]
        return attention(dataclasses.replace(call, k=k, v=v, mask=mask))

    def kept(self) -> numpy.typing.NDArray[numpy.uint32]:
        return numpy.arange(max(0, self.tokens - self._size), self.tokens, dtype=numpy.uint32)

    def crop_obstacle(self) -> str:
        """Why the cache cannot go back to fewer tokens. Empty if it can."""
        return f"a layer's window of {self._size} tokens has dropped tokens" if self.tokens > self._size else ""

    def crop(self, tokens: int) -> None:
        self.tokens = min(self.tokens, tokens)
        self._k, self._v = self._k[:, : self.tokens], self._v[:, : self.tokens]

    @property
    def bytes(self) -> int:
        return self._k.nbytes + self._v.nbytes
