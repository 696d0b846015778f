"""The sequences of one cache: the caches of each sequence and, on request, a record of the queries, keys and values
that were fed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import numpy.typing
import torch

from kvlab import _arguments
from kvlab._trace import MAX_THREADS, MAX_TOKENS
from kvlab.hf.calls import Calls
from kvlab.hf.layers import layer_arguments
from kvlab.hf.refused import Refused, refusing
from kvlab.hf.windows import Window

if TYPE_CHECKING:
    from kvlab._trace import Trace
    from kvlab.hf.attended_model import AttendedModel

Parts = tuple[torch.Tensor, ...]


class Row:
    """The caches of one sequence, and the queries, keys and values that were recorded for its trace."""

    def __init__(self, caches: Any, windows: dict[int, int]) -> None:
        self.caches = caches  # of the layers that policies act on
        self.windows = {layer: Window(size) for layer, size in windows.items()}
        self.given: dict[int, list[Parts]] = {}  # recorded q, k and v of each call, by index of the layer
        self.segments: list[tuple[int, bool]] = []  # recorded segments: tokens, and whether it is a prompt

    def add_segment(self, tokens: int, is_prompt: bool) -> None:
        """Records a segment. Consecutive decoded tokens form one segment."""
        if self.segments and not is_prompt and not self.segments[-1][1]:
            tokens += self.segments.pop()[0]
        self.segments.append((tokens, is_prompt))

    def tokens(self, layers: int) -> set[int]:
        """The set of the layers' token counts. It has one element, except after a call that failed."""
        return {self.caches.tokens(index) for index in range(layers)} | {w.tokens for w in self.windows.values()}

    def copy(self) -> Row:
        if not hasattr(self.caches, "copy"):
            raise Refused("a cache on CUDA cannot be copied; compute the prefix again, or use model.to('cpu')")
        made = copy.copy(self)
        with refusing():
            made.caches = self.caches.copy()
        made.windows = {layer: copy.copy(window) for layer, window in self.windows.items()}
        made.given = {index: list(parts) for index, parts in self.given.items()}
        made.segments = list(self.segments)
        return made


class Conversation:
    """The sequences of one cache: a `Row` for each row of the batch."""

    def __init__(self, attended: AttendedModel, make: Callable[[], Any], threads: int | None, record: bool) -> None:
        """`make`: a function that makes empty caches for one sequence."""
        self.attended, self._make, self._record = attended, make, _arguments.flag("record", record)
        self._threads = os.cpu_count() or 1 if threads is None else _arguments.whole("threads", threads, 1, MAX_THREADS)
        self.rows: list[Row] = []
        self.graph: Any = None  # CUDA graph of a decoded token
        self.begin()

    def begin(self) -> None:
        """Starts again with one empty sequence."""
        self.hold(1)
        self.calls = Calls(self.attended.decoder)
        self.fault = ""  # why the conversation cannot continue

    def hold(self, count: int) -> None:
        """Starts again with `count` empty sequences. Buffers on the GPU keep their addresses, so that a captured graph
        stays valid."""
        again = [row.caches for row in self.rows[:count] if hasattr(row.caches, "begin_anew")]
        for caches in again:
            caches.begin_anew()
        again += [self._make() for _ in range(count - len(again))]
        self.rows = [Row(caches, self.attended.windows) for caches in again]

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversation:
        self.refuse_fault()
        self.calls.end()
        made = copy.copy(self)
        made.rows = [row.copy() for row in self.rows]
        made.calls, made.graph = copy.copy(self.calls), None
        memo[id(self)] = made
        return made

    def refuse_fault(self) -> None:
        if self.fault:
            raise Refused(f"kvlab.hf: {self.fault}, so its cache cannot continue; use a new cache")

    def crop(self, tokens: int) -> None:
        """Drops all but the first `tokens` tokens. Raises Refused before it drops anything."""
        self.refuse_fault()
        if tokens >= self.tokens:
            return
        why = "the state of layers without attention cannot go back" if self.attended.has_others else ""
        why = why or ("rows are padded" if any(self.calls.pads) else "")
        for row in self.rows:
            why = why or next((window.crop_obstacle() for window in row.windows.values()), "")
            if not hasattr(row.caches, "crop"):
                raise Refused("kvlab.hf: a cache on CUDA cannot be cropped or copied; use model.to('cpu')")
        if why:
            what = f"the cache cannot be cropped to {tokens} of its {self.tokens} tokens, because {why}"
            raise Refused(f"kvlab.hf: {what}; copy.deepcopy() the cache before you feed tokens that you may remove")
        for row in self.rows:
            with refusing("kvlab.hf: "):
                row.caches.crop(tokens)
            for window in row.windows.values():
                window.crop(tokens)
            row.given = {index: _first(parts, tokens) for index, parts in row.given.items()}
            row.segments = _first_segments(row.segments, tokens)
        self.calls.crop(tokens)

    # --- Contents -------------------------------------------------------------------------------

    def row(self, row: int) -> Row:
        row = _arguments.whole("row", row, 0, MAX_TOKENS)
        if row >= len(self.rows):
            raise IndexError(f"row {row} does not exist; the batch has {len(self.rows)} rows")
        return self.rows[row]

    @property
    def tokens(self) -> int:
        return max(int(row.caches.tokens(0)) for row in self.rows)

    def kept(self, layer: int, head: int, row: int) -> numpy.typing.NDArray[numpy.uint32]:
        self.calls.end()
        layer, head = (_arguments.whole(name, value, 0, MAX_TOKENS) for name, value in (("layer", layer), ("head", head)))
        held, layer_indices = self.row(row), self.attended.layer_indices
        if layer in held.windows:
            return held.windows[layer].kept()
        if layer not in layer_indices:
            raise IndexError(
                f"kept: layer {layer} has no cache; the layers with a cache are "
                f"{', '.join(map(str, self.attended.layers))}"
            )
        if head >= self.attended.shape.kv_heads:
            raise IndexError(f"kept: head {head} does not exist; the layer has {self.attended.shape.kv_heads} KV heads")
        kept: numpy.typing.NDArray[numpy.uint32] = held.caches.kept(layer_indices[layer], head)
        return kept

    def sum(self, name: str) -> int:
        return sum(int(getattr(row.caches, name)) for row in self.rows)

    def trace(self, out: str | os.PathLike[str] | None, row: int) -> Trace:
        from kvlab._trace import Trace

        self.calls.end()
        held = self.row(row)
        if not held.given:
            raise Refused("trace: nothing was recorded; use record=True and call the model")
        q, k, v = (
            torch.stack([torch.cat([given[part] for given in layer]).transpose(0, 1) for layer in held.given.values()])
            for part in range(3)
        )
        inv_freq, factors, rows = layer_arguments(self.attended.acted)
        config = {
            "inv_freq": inv_freq,
            "rope_factor": factors,
            "rows": [row | {"span": 0} for row in rows],
            "layer_numbers": list(self.attended.layer_indices),
        }
        segments = [(count, "prompt" if is_prompt else "decode") for count, is_prompt in held.segments]
        return Trace.from_arrays(q, k, v, config=config, segments=segments, out=out)

    # --- Attention ------------------------------------------------------------------------------

    def attend(self, row: int, index: int, parts: list[torch.Tensor], is_prompt: bool) -> torch.Tensor:
        """Appends tokens to a layer and returns their attention outputs [tokens, query_heads, head_size].

        `parts`: q, k and v [tokens, heads, head_size] before RoPE.
        """
        held, on_cuda = self.rows[row], self.attended.device.type == "cuda"
        if not on_cuda:
            parts = [part.float() for part in parts]
        if self._record:
            held.given.setdefault(index, []).append(tuple(part.cpu() for part in parts))
            if index == 0:
                held.add_segment(len(parts[0]), is_prompt)
        if on_cuda:
            attended: torch.Tensor = held.caches.attend(index, torch.cat(parts, 1), is_prompt)
            return attended
        arrays = (part.contiguous().numpy() for part in parts)
        return torch.from_numpy(held.caches.attend(index, *arrays, is_prompt, self._threads))


def _first(given: list[Parts], tokens: int) -> list[Parts]:
    """The recorded parts of the first `tokens` tokens."""
    left: list[Parts] = []
    for parts in given:
        if tokens > 0:
            left.append(tuple(part[:tokens] for part in parts))
        tokens -= len(parts[0])
    return left


def _first_segments(segments: list[tuple[int, bool]], tokens: int) -> list[tuple[int, bool]]:
    left = []
    for count, is_prompt in segments:
        if tokens > 0:
            left.append((min(count, tokens), is_prompt))
        tokens -= count
    return left
