"""Hooks in a model, through which kvlab's caches see its calls and compute its attention."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvlab.hf.attention import AttentionSwitch, Call
from kvlab.hf.cache import adopt, conversation_of, refuse_filled
from kvlab.hf.calls import cache_among
from kvlab.hf.layers import (
    Given,
    Layer,
    Rotation,
    is_rotation,
    recording_arguments,
    rotates_by_position,
    rotation_among,
)
from kvlab.hf.refused import Refused

if TYPE_CHECKING:
    from kvlab.hf.attended_model import AttendedModel
    from kvlab.hf.conversation import Conversation


@dataclasses.dataclass
class _Open:
    """A call of the decoder in progress."""

    conversation: Conversation
    cache: Any  # None until the model has made one
    new: list[int]  # new tokens of each row
    before: list[int]  # tokens of each row before the call
    first: list[int]  # the model's position of each row's first new token; without position_ids it includes padding
    # (rotation, RoPE table, row) of each rotation that was checked.
    compared: list[tuple[Any, bytes, int]] = dataclasses.field(default_factory=list)


class Hooks:
    """The hooks of one model. Outside of a block of evicting() they act only in calls that use one of kvlab's caches.
    They are removed when the last cache that holds this object is deleted."""

    def __init__(self, attended: AttendedModel) -> None:
        self._attended = attended
        self._depths: list[int] = []  # depths of the modules being called: 0 for the model, the highest for the decoder
        self._thread = threading.current_thread()  # the calling thread
        self._open: _Open | None = None
        self._given: dict[int, Given] = {}
        self._outer_mask: Any = None
        self.attend_token: Callable[[int, torch.Tensor], torch.Tensor] | None = None  # set while a graph is captured
        own, stack = weakref.ref(self), contextlib.ExitStack()  # the hooks in the model must not keep this object alive
        self._switch = AttentionSwitch(attended.decoder, lambda call: own()._attend(call), batches=True)  # type: ignore[union-attr]
        stack.callback(self._switch.close)
        for depth, module in enumerate(_path(attended.model, attended.decoder)):
            stack.callback(module.register_forward_pre_hook(_before(own, depth), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(_behind(own, depth), always_call=True).remove)

        def is_open() -> bool:
            hooks = own()
            return hooks is not None and (bool(hooks._depths) or hooks.attend_token is not None)

        for layer in attended.layers.values():
            stack.callback(layer.module.register_forward_pre_hook(_at_layer(own), with_kwargs=True).remove)
        stack.enter_context(recording_arguments(attended.acted, self._given, is_open))
        weakref.finalize(self, stack.close)

    def __deepcopy__(self, _: Any) -> Hooks:
        return self

    # --- Calls ----------------------------------------------------------------------------------

    def enter(self, depth: int, module: Any, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        """Called before a call of the model, of its decoder, or of a module between them."""
        if self.attend_token is not None:
            return
        if self._depths and self._thread is not threading.current_thread() and self._thread.is_alive():
            raise Refused("kvlab.hf: two threads call one model at the same time; make one call after the other")
        self.leave(depth)  # ends a call that was interrupted
        named = dict(zip(inspect.signature(module.forward).parameters, arguments)) | words if arguments else words
        if not self._depths:
            if not self._is_ours(cache_among(named.values())):
                return
            self._thread = threading.current_thread()
            self._switch.turn_on()
            self._outer_mask = named.get("attention_mask")
        self._depths.append(depth)
        if module is self._attended.decoder:
            self.look(named)

    def leave(self, depth: int) -> None:
        """Called after the call at this depth has returned or failed."""
        if not self._depths or self._thread is not threading.current_thread() and self._thread.is_alive():
            return
        while self._depths and self._depths[-1] >= depth:
            self._depths.pop()
        if not self._depths:
            self.close_calls()

    def close_calls(self) -> None:
        self._depths.clear()
        self._switch.turn_off()
        self._given.clear()
        self._outer_mask = None
        if self._open is not None:
            self._end(self._open)
            self._open = None

    def _end(self, opened: _Open) -> None:
        conversation, attended = opened.conversation, self._attended
        for row, before, new in zip(conversation.rows, opened.before, opened.new):
            if row.tokens(len(attended.acted)) != {before + new}:
                conversation.fault = f"a call that fed {max(opened.new)} tokens after {before} did not finish"
        if attended.block is not None:
            attended.block.note(conversation)

    def _is_ours(self, cache: Any) -> bool:
        conversation = conversation_of(cache)
        return self._attended.block is not None if conversation is None else conversation.attended is self._attended

    def look(self, words: dict[str, Any]) -> None:
        """Inspects a call of the decoder: finds its conversation and where its sequences continue."""
        cache, attended = cache_among(words.values()), self._attended
        conversation = conversation_of(cache)
        if conversation is not None and conversation.attended is not attended:
            raise Refused(
                "kvlab.hf: the call's cache was made for another model or another length=; use a cache that "
                "was made for these"
            )
        self._refuse_gradients(words.get("inputs_embeds"))
        if conversation is None:
            if attended.block is None:
                raise Refused("kvlab.hf: the model passed its decoder a cache that is not the one of the call")
            refuse_filled(cache)
            conversation = attended.block.begin()
        conversation.refuse_fault()
        seen = conversation.calls.look(words, self._outer_mask)
        if seen is None:
            return
        start, n, new = seen
        if start == 0 and (conversation.tokens > 0 or len(new) != len(conversation.rows)):
            conversation.hold(len(new))
        before = [start + n - pads - own for pads, own in zip(conversation.calls.pads, new)]
        first = before if words.get("position_ids") is not None else [start + n - own for own in new]
        opened = _Open(conversation, None, new, before, first)
        for row, held, own in zip(conversation.rows, before, new):
            if have := row.tokens(len(attended.acted)) - {held}:
                what = f"the call's cache counts {held} tokens but holds {have.pop()}"
                raise Refused(f"kvlab.hf: {what}; change a cache only by its own functions")
            if attended.max_tokens is not None and held + own > attended.max_tokens:
                what = f"the text has more than {attended.max_tokens} tokens, so the model's window hides some of them"
                raise Refused(f"kvlab.hf: {what}; give length=, the maximum number of tokens of a text")
        self._open = opened
        if cache is not None:
            self._take(cache)

    def _take(self, cache: Any) -> None:
        """Adopts the call's cache as one of kvlab's."""
        assert self._open is not None
        if conversation_of(cache) is None:
            refuse_filled(cache)
            adopt(cache, self._open.conversation)
            if self._attended.block is not None:
                self._attended.block.owned_by(cache)
        self._open.cache = cache

    def look_at_layer(self, given: tuple[Any, ...]) -> None:
        """Inspects a call of a layer that attends."""
        if self._open is None or self.attend_token is not None:
            return
        cache = cache_among(given)
        if cache is not None and cache is self._open.cache:
            return
        if cache is None:
            raise Refused("kvlab.hf: a layer's attention was called without the model's cache, which kvlab needs")
        if self._open.cache is not None or conversation_of(cache) is not None:
            raise Refused("kvlab.hf: a call has two caches; give one")
        self._take(cache)

    def is_filling(self, conversation: Conversation) -> bool:
        return self._open is not None and self._open.conversation is conversation

    def _refuse_gradients(self, embeddings: Any) -> None:
        if torch.is_grad_enabled() and (
            getattr(embeddings, "requires_grad", False) or any(p.requires_grad for p in self._attended.model.parameters())
        ):
            what = "kvlab's caches do not support gradients"
            raise Refused(f"kvlab.hf: {what}; call the model in torch.no_grad() or torch.inference_mode()")

    # --- Attention ------------------------------------------------------------------------------

    def _attend(self, call: Call) -> torch.Tensor:
        """Computes a layer's attention outputs [n, query_heads, value_size]."""
        attended, opened = self._attended, self._open
        layer = attended.layers.get(call.layer)
        if layer is None or not layer.fits(call):
            what = f"layer {call.layer} attends differently from the first call"
            raise Refused(f"kvlab.hf: {what}; its scale, window and shape must stay the same")
        if self.attend_token is not None:
            # Graphs are used only if every layer's module works without a rotation, so no rotation has to be inverted
            # here.
            qkv = (layer.stored(call.q, None), layer.stored(call.k, None), call.v.transpose(0, 1))
            return self.attend_token(attended.layer_indices[call.layer], torch.cat(qkv, 1))
        if opened is None:
            raise Refused(f"kvlab.hf: layer {call.layer} attends outside of a call of the decoder")
        n, row = call.q.shape[1], call.row
        before, new = opened.before[row], opened.new[row]
        if call.k.shape[1] != n:
            what = f"layer {call.layer}: got {n} queries and {call.k.shape[1]} keys"
            raise Refused(f"kvlab.hf: {what}; both must be of the same tokens")
        if window := opened.conversation.rows[row].windows.get(call.layer):
            own = {name: getattr(call, name)[:, n - new :] for name in ("q", "k", "v")}
            out = window.attend(dataclasses.replace(call, **own))
        else:
            self._compare_rotation(opened, layer, n, row)
            rotation = None if layer.unrotated else rotation_among(self._given[layer.index], n, row, layer.pairs)
            parts = [layer.stored(call.q, rotation), layer.stored(call.k, rotation), call.v.transpose(0, 1)]
            own_parts = [part[n - new :] for part in parts]
            index = attended.layer_indices[call.layer]
            out = opened.conversation.attend(row, index, own_parts, is_prompt=before == 0 or n > 1)
        if row + 1 == len(opened.new):
            # Frees the prompt's hidden states, so that they are not kept for all layers.
            self._given.pop(layer.index, None)
        return out if new == n else torch.cat((out.new_zeros(n - new, *out.shape[1:]), out))

    def _compare_rotation(self, opened: _Open, layer: Layer, n: int, row: int) -> None:
        """Raises Refused if the rotation differs from the layer's first one. This happens with a RoPE that changes with
        the length of the text."""
        attended = self._attended
        if not layer.pairs or (n == 1 and attended.device.type == "cuda" and attended.has_fixed_rope):
            return  # reading the rotation would wait for the GPU
        given, table = self._given[layer.index], layer.rope.key
        value = next(filter(is_rotation, (*given[0], *given[1].values())), None)
        if any(seen is value and (key, number) == (table, row) for seen, key, number in opened.compared):
            return
        opened.compared.append((value, table, row))
        before, new = opened.before[row], opened.new[row]
        rotation = rotation_among(given, n, row, layer.pairs)
        own = None if rotation is None else Rotation(rotation.cos[n - new :], rotation.sin[n - new :])
        if own is None or not rotates_by_position(own, layer.rope, layer.pairs, opened.first[row]):
            raise Refused(
                f"kvlab.hf: in a text of {before + new} tokens the model's RoPE"
                f" ({', '.join(sorted(attended.rope_types))}) rotates layer {layer.index} by other frequencies than"
                " before, but the cache's keys can have only one rotation; use a shorter text"
            )


def _path(model: Any, decoder: Any) -> list[Any]:
    """The modules on the path from the model to its decoder."""
    name = next(name for name, module in model.named_modules() if module is decoder)
    parts = name.split(".")
    found = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    return [module for module in found if not isinstance(module, torch.nn.ModuleList)]


def _before(own: weakref.ref[Hooks], depth: int) -> Any:
    def hook(module: Any, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        if hooks := own():
            hooks.enter(depth, module, arguments, words)

    return hook


def _behind(own: weakref.ref[Hooks], depth: int) -> Any:
    def hook(*_: Any) -> None:
        if hooks := own():
            hooks.leave(depth)

    return hook


def _at_layer(own: weakref.ref[Hooks]) -> Any:
    def hook(_: Any, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        if hooks := own():
            hooks.look_at_layer((*arguments, *words.values()))

    return hook
