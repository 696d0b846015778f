"""Evicts by the rule while a transformers model runs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import numpy.typing
import torch
import transformers

from kvlab import _kvlab
from kvlab._policy import Policy, resolve
from kvlab.hf.attention import Call, attending
from kvlab.hf.calls import Calls, CountedCache, cache_among, cache_word, few_logits
from kvlab.hf.layers import (
    Given,
    acted_on,
    decoder_of,
    layer_count,
    layers_of,
    listening,
    output_projections,
    output_weights,
    refuse_beyond_format,
    said,
    turns_among,
)
from kvlab.hf.models import Shape, base_of, refuse_no_decoder, text_config
from kvlab.hf.refused import Refused
from kvlab.hf.windows import Window

if TYPE_CHECKING:
    from kvlab._trace import Trace


class _Row:
    """What is held of one sequence."""

    def __init__(self, caches: Any, spans: dict[int, int]) -> None:
        self.caches = caches  # of the layers that policies act on
        self.windows = {layer: Window(span) for layer, span in spans.items()}
        self.given: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # where they are recorded: q, k and v by place
        self.prompt_tokens = 0

    def tokens(self, places: int) -> set[int]:
        """That the layers have had: one number, but where a call has ended in the middle."""
        return {self.caches.tokens(place) for place in range(places)} | {w.tokens for w in self.windows.values()}


class evicting:
    """While the block runs, the model's attention keeps what a policy keeps: `with evicting(model, "h2o", budget=256)`.

    Whatever calls the model in the block, such as `generate`, sees kvlab's caches in place of transformers' own: of each
    sequence of a batch its own, each prompt by `prefill`, each decoded token by itself. Before other sequences,
    `begin_anew`. Layers with a window keep that, by themselves. The block begins with a look at whether `full` gives the
    plain model's logits. Afterwards the object says what was kept, and with `record=True` gives the queries, keys and
    values as a trace, whose replay keeps the same. `graph=True`, on CUDA: a CUDA graph for a decoded token.
    """

    def __init__(
        self,
        model: Any,
        policy: str | Policy,
        budget: int | str | None = None,
        *,
        ladder: str | None = None,
        prefill: str = "dense",
        positions: str | None = None,
        seed: int = 0,
        request_threshold: float = 0.01,
        length: int | None = None,
        threads: int | None = None,
        record: bool = False,
        graph: bool = False,
    ) -> None:
        """`policy`: as everywhere, or a policy.json, which brings all but `length` and what comes behind it. `ladder`:
        as the command takes it, such as "16:16t,4:100%".

        `length`: how many tokens there may be, of which a budget such as "20%" is a share (the model's context)."""
        if not hasattr(model, "config"):
            raise Refused(f"evicting: a {type(model).__name__}; a loaded model of transformers is expected")
        self._model = base_of(model)
        config = text_config(self._model.config)
        refuse_no_decoder(str(getattr(config, "_name_or_path", "")) or type(self._model).__name__, self._model.config)
        devices = {parameter.device for parameter in self._model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            found = ", ".join(sorted(map(str, devices)))
            raise Refused(f"evicting: the model is on {found}; the CPU or one CUDA device is expected")
        self._device, self._threads, self._record = devices.pop(), threads or os.cpu_count() or 1, record
        length = int(length or config.max_position_embeddings)
        self._decoder = decoder_of(self._model)
        self._layers = {layer.index: layer for layer in layers_of(self._decoder, [], length)}
        self._acted = acted_on([*self._layers.values()], length)
        refuse_beyond_format(self._acted, "caches have")
        first = self._acted[0]
        self._shape = Shape(len(self._acted), first.query_heads, first.kv_heads, first.key_size)
        self._places = {layer.index: place for place, layer in enumerate(self._acted)}
        self._spans = {layer.index: layer.span for layer in self._layers.values() if layer.index not in self._places}
        # Tokens that a window beyond the text hides none of.
        self._most = min(layer.span for layer in self._acted) or None
        setting = "" if ladder is None else ":ladder=" + ladder.replace(",", "+").replace(":", "@")
        words: dict[str, Any] = {"ladder": setting, "prefill": prefill, "positions": positions or ""}
        words |= {"seed": seed, "threshold": request_threshold}
        self._make = self._caches_of(policy, "" if budget is None else str(budget), length=length, **words)
        self._attend_token: Callable[[int, torch.Tensor], torch.Tensor] | None = None  # while a graph is captured
        self._graph = None
        if graph:
            if self._device.type != "cuda" or record:
                raise Refused("evicting: graph=True needs a model on CUDA, and record=False")
            blocks = layer_count(self._decoder, [*self._layers.values()])
            if odd := [n for n in range(blocks) if n not in self._places or not self._layers[n].still]:
                what = "has a window, no KV cache, or a RoPE that is not given to it"
                raise Refused(f"evicting: graph=True: layer {odd[0]} {what}; graph=False is expected")
            from kvlab.hf.step_graph import StepGraph

            self._graph = StepGraph(self, self._model)
        self._to_check = True
        self._begin()

    def _caches_of(self, policy: str | Policy, budget: str, ladder: str = "", **words: Any) -> Callable[[], Any]:
        """What makes those of one sequence."""
        (text,), own = resolve([policy])
        asked = _kvlab.CacheRequest(
            policy=text + ladder,
            own=own,
            budget=budget,
            **words,
            **{size: getattr(self._shape, size) for size in ("layers", "kv_heads", "head_size")},
            layer_numbers=list(self._places),
        )
        if self._device.type == "cuda":
            from kvlab.hf.slot_caches import SlotCaches

            plan = _kvlab.slot_plan(asked)
            weights = functools.partial(output_weights, self._model, self._acted)
            return lambda: SlotCaches(plan, self._acted, self._model.dtype, self._device, weights)
        inv_freq, factors, rows = said(self._acted)
        outputs = functools.cache(lambda: output_projections(self._model, self._acted))
        heads = (self._shape.query_heads, self._shape.head_size)
        return lambda: _kvlab.Caches(asked, *heads, inv_freq, factors, rows, outputs)

    def _begin(self) -> None:
        self._calls = Calls(self._decoder)
        self._past: CountedCache | None = None
        self._given: dict[int, Given] = {}
        self._rows = [_Row(self._make(), self._spans)]
        self._before, self._new = [0], [0]  # tokens of each row before those of the call that goes on, and those

    def begin_anew(self) -> None:
        """Forgets the sequences: the next call, with a cache that is empty, begins others."""
        self._hold(len(self._rows))

    def _hold(self, count: int) -> None:
        """So many sequences without tokens."""
        again = [row.caches for row in self._rows[:count] if hasattr(row.caches, "begin_anew")]
        for caches in again:
            caches.begin_anew()
        again += [self._make() for _ in range(count - len(again))]
        self._rows = [_Row(caches, self._spans) for caches in again]

    def __enter__(self) -> evicting:
        if self._to_check:
            self._check()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(attending(self._decoder, self._attend, batches=True))
            stack.enter_context(listening(self._acted, self._given))
            for module, hook in (
                (self._model, self._look_around),
                (self._decoder, self._look),
                *((layer.module, self._look_at_cache) for layer in self._layers.values()),
            ):
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if self._graph:
                before = vars(self._model).get("forward")  # what somebody else had put there, such as accelerate
                stack.callback(
                    lambda: (
                        vars(self._model).pop("forward") if before is None else setattr(self._model, "forward", before)
                    )
                )
                self._model.forward = self._graph.forward_of(self._model.forward)
            self._stack = stack.pop_all()
        return self

    def _check(self) -> None:
        """Whether a cache that keeps all gives what the model gives without ours."""
        plain = few_logits(self._model)
        full = copy.copy(self)
        full._to_check, full._graph, full._record = False, None, False
        full._make = self._caches_of("full", "", length=9, prefill="dense", positions="", seed=0, threshold=0.01)
        full._begin()
        with full:
            off = float((few_logits(self._model) - plain).norm() / plain.norm())
        floats = all(parameter.is_floating_point() for parameter in self._model.parameters())
        linear = floats and all(hasattr(layer.output, "weight") for layer in self._acted if layer.output)
        most = 1e-3 if linear and self._model.dtype == torch.float32 else 0.1
        if not off <= most or full.tokens != 9:
            raise Refused(
                f"evicting: with caches that keep nine tokens and count {full.tokens}, logits differ by {off:.2g} from the"
                f" plain {type(self._model).__name__}'s; an attention that transformers {transformers.__version__} calls as"
                " Llama's is expected"
            )

    def __exit__(self, raised: object, *_: object) -> None:
        self._stack.close()
        if self._past is not None:
            self._past.release()
        self._past = None
        if raised is None:
            self._calls.end()

    def _row(self, row: int) -> _Row:
        if not 0 <= row < len(self._rows):
            raise IndexError(f"row {row}; the batch has {len(self._rows)}")
        return self._rows[row]

    def kept(self, layer: int, head: int, row: int = 0) -> numpy.typing.NDArray[numpy.uint32]:
        """Positions of the tokens that KV head `head` holds now, ascending. `layer` as the model counts."""
        held = self._row(row)
        if layer in held.windows:
            return held.windows[layer].kept()
        if layer not in self._places:
            raise IndexError(f"kept: layer {layer}; those that attend are {', '.join(map(str, self._layers))}")
        kept: numpy.typing.NDArray[numpy.uint32] = held.caches.kept(self._places[layer], head)
        return kept

    @property
    def tokens(self) -> int:
        """Tokens that the sequence, of a batch the longest, has so far."""
        return max(int(row.caches.tokens(0)) for row in self._rows)

    @property
    def evictions(self) -> int:
        return sum(int(row.caches.evictions) for row in self._rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are held now where policies act: on the CPU in float32 or a ladder's codes,
        on CUDA in the model's dtype."""
        return sum(int(row.caches.kv_bytes) for row in self._rows)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that keys and values take up there, room for tokens to come among them."""
        return sum(int(row.caches.allocated_bytes) for row in self._rows)

    @property
    def window_bytes(self) -> int:
        """Bytes of the keys and values of layers with a window, in the model's dtype."""
        return sum(window.bytes for row in self._rows for window in row.windows.values())

    def trace(self, out: str | os.PathLike[str] | None = None, row: int = 0) -> Trace:
        """What attention was given of a sequence, where policies act: needs `record=True`."""
        from kvlab._trace import Trace

        held = self._row(row)
        if not held.given:
            raise Refused("trace: nothing was recorded; evicting(…, record=True), and run the model")
        q, k, v = (
            torch.stack([torch.cat([given[part] for given in layer]).transpose(0, 1) for layer in held.given.values()])
            for part in range(3)
        )
        inv_freq, factors, rows = said(self._acted)
        config = {
            "inv_freq": inv_freq,
            "rope_factor": factors,
            "rows": [row | {"span": 0} for row in rows],
            "layer_numbers": list(self._places),
        }
        return Trace.from_arrays(q, k, v, config=config, prompt_tokens=held.prompt_tokens, out=out)

    def _look_around(self, model: Any, arguments: Any, words: Any) -> None:
        if arguments:
            words = dict(zip(inspect.signature(model.forward).parameters, arguments)) | words
        self._calls.outer_mask = words.get("attention_mask")

    def _look(self, _: Any, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        """At a call of the decoder: where its sequences go on."""
        if self._attend_token is not None:
            return
        seen = self._calls.look(arguments, words)
        if seen is None:
            return
        start, n, self._new = seen
        held, count = self.tokens, len(self._new)
        if start == 0 and held > 0:
            raise Refused(
                f"evicting: the call begins anew, and {held} tokens are held; {cache_word(self._model)}= of the call before"
                " goes on, such as a chat, and begin_anew() in front begins another sequence"
            )
        if start == 0 and (count > 1 or len(self._rows) > 1):
            self._hold(count)
        self._before = [start + n - pads - new for pads, new in zip(self._calls.pads, self._new)]
        for row, before, new in zip(self._rows, self._before, self._new):
            if have := row.tokens(len(self._acted)) - {before}:
                what = "a sequence that goes back (beams, assisted decoding), or that began elsewhere, is not supported"
                raise Refused(f"evicting: the call's cache holds {before} tokens, and ours {have.pop()}; {what}")
            if self._most is not None and before + new > self._most:
                what = f"more than {self._most} tokens, of which the model's window hides some"
                raise Refused(f"evicting: {what}; another length= is expected")

    def _look_at_cache(self, _: Any, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        past = cache_among((*arguments, *words.values()))
        if self._attend_token is not None or (self._past is not None and past is self._past.past):
            return
        if past is None:
            raise Refused("evicting: a layer's attention is called without the model's cache, which is expected")
        if self._past is not None:
            self._past.release()
        self._past = CountedCache(past, next(iter(self._layers)))

    def _attend(self, call: Call) -> torch.Tensor:
        """[n, query_heads, value_size]"""
        layer = self._layers.get(call.layer)
        if layer is None or not layer.fits(call):
            raise Refused(
                f"evicting: layer {call.layer} attends otherwise than at first; the same scale, window and shape are expected"
            )
        n, row = call.q.shape[1], call.row
        turns = (
            None if layer.still or layer.index not in self._places else turns_among(self._given[layer.index], n, row)
        )
        if row + 1 == len(self._new):
            self._given.pop(layer.index, None)  # the hidden states of a prompt are not held for all layers
        if self._attend_token is not None:
            qkv = (layer.stored(call.q, turns), layer.stored(call.k, turns), call.v.transpose(0, 1))
            return self._attend_token(self._places[call.layer], torch.cat(qkv, 1))
        held, new = self._rows[row], self._new[row]
        if call.k.shape[1] != n:
            raise Refused(
                f"evicting: layer {call.layer}: {n} queries come with {call.k.shape[1]} keys; so many are expected"
            )
        if window := held.windows.get(call.layer):
            own = {name: getattr(call, name)[:, n - new :] for name in ("q", "k", "v")}
            out = window.attend(dataclasses.replace(call, **own))
        else:
            parts = (layer.stored(call.q, turns), layer.stored(call.k, turns), call.v.transpose(0, 1))
            out = self._attend_to_caches(
                held, self._places[call.layer], [part[n - new :] for part in parts], self._before[row] == 0 or n > 1
            )
        return out if new == n else torch.cat((out.new_zeros(n - new, *out.shape[1:]), out))

    def _attend_to_caches(self, held: _Row, place: int, parts: list[torch.Tensor], is_prompt: bool) -> torch.Tensor:
        """q, k and v [tokens, heads, head_size] before RoPE."""
        on_cuda = self._device.type == "cuda"
        if not on_cuda:
            parts = [part.float() for part in parts]
        if self._record:
            held.given.setdefault(place, []).append(tuple(part.cpu() for part in parts))
            if place == 0 and held.prompt_tokens == 0:
                held.prompt_tokens = len(parts[0])
        if on_cuda:
            attended: torch.Tensor = held.caches.attend(place, torch.cat(parts, 1), is_prompt)
            return attended
        rows = (part.contiguous().numpy() for part in parts)
        return torch.from_numpy(held.caches.attend(place, *rows, is_prompt, self._threads))
