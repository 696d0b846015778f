"""`AttendedModel`: what kvlab knows about a model for which kvlab's caches compute attention. It also installs hooks in
the model, which stay while caches need them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from kvlab import _arguments, _kvlab
from kvlab._policy import Policy, resolve
from kvlab.hf.calls import few_logits
from kvlab.hf.conversation import Conversation
from kvlab.hf.hooks import Hooks
from kvlab.hf.layers import (
    decoder_of,
    layer_arguments,
    layer_count,
    layers_of,
    output_projections,
    output_weights,
    policy_layers,
    refuse_beyond_format,
)
from kvlab.hf.models import ROPE_TYPES, Shape, base_of, context_of, refuse_no_decoder, rope_types, text_config
from kvlab.hf.refused import Refused

_MAX_LENGTH = 2**24  # tokens; the model makes masks and rotations for a text of this length when it is inspected
_known: weakref.WeakKeyDictionary[Any, dict[int, AttendedModel]] = weakref.WeakKeyDictionary()


def attended_model(model: Any, length: int | None) -> AttendedModel:
    """The AttendedModel of a loaded model, which is inspected once for each `length`."""
    if not hasattr(model, "config"):
        raise Refused(f"kvlab.hf: the model has type {type(model).__name__}; give a loaded transformers model")
    base = base_of(model)
    config = text_config(base.config)
    refuse_no_decoder(str(getattr(config, "_name_or_path", "")) or type(base).__name__, base.config)
    tokens = context_of(base.config) if length is None else _arguments.whole("length", length, 1, _MAX_LENGTH)
    refuse_within_block(base)
    found = _known.setdefault(base, {}).get(tokens)
    if found is None or not found.is_of(base):
        found = _known[base][tokens] = AttendedModel(base, tokens)
    return found


def refuse_within_block(model: Any) -> None:
    for other in _known.get(base_of(model), {}).values():
        if other.block is not None:
            raise Refused(
                "kvlab.hf: a block of evicting(…) uses this model already; start another after that block "
                "has ended"
            )


class Block:
    """Starts a conversation for each cache that is used in a block of evicting()."""

    def __init__(self, attended: AttendedModel, conversation: Callable[[], Conversation]) -> None:
        self._attended, self._new = attended, conversation
        self._conversation = conversation()  # the conversation that began last
        self._owner: weakref.ref[Any] | None = None  # the cache of that conversation

    def begin(self) -> Conversation:
        """Starts a conversation for a new cache. If the cache of the last conversation was deleted, reuses that
        conversation."""
        if self._owner is None or self._owner() is None:
            self._conversation.begin()
        else:
            self._conversation = self._new()
        self._owner = None
        return self._conversation

    def owned_by(self, cache: Any) -> None:
        self._owner = weakref.ref(cache)

    def note(self, conversation: Conversation) -> None:
        """Called when a call of the conversation has ended."""


class AttendedModel:
    """What kvlab knows about a loaded model, for texts of at most `length` tokens, and the hooks that kvlab installed
    in it."""

    def __init__(self, model: Any, length: int) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            found = ", ".join(sorted(map(str, devices)))
            raise Refused(f"kvlab.hf: the model is on {found}; move it to the CPU or to one CUDA device")
        self._model, self._modules = weakref.ref(model), _state_of(model)
        self.device, self.dtype, self.length = devices.pop(), model.dtype, length
        self.decoder = decoder_of(model)
        self.layers = {layer.index: layer for layer in layers_of(self.decoder, [], length)}
        self.acted = policy_layers([*self.layers.values()], length)
        refuse_beyond_format(self.acted, "caches support only")
        first = self.acted[0]
        self.shape = Shape(len(self.acted), first.query_heads, first.kv_heads, first.key_size)
        self.layer_indices = {layer.index: index for index, layer in enumerate(self.acted)}
        self.windows = {layer.index: layer.window for layer in self.layers.values() if layer.index not in self.layer_indices}
        self.has_others = layer_count(self.decoder, [*self.layers.values()]) > len(self.layers)
        # The longest text, in tokens, of which no sliding window hides a token; None: any length, because there is no
        # window.
        self.max_tokens = min(layer.window for layer in self.acted) or None
        self.rope_types = rope_types(self.decoder.config)
        self.has_fixed_rope = self.rope_types <= set(ROPE_TYPES)
        self.block: Block | None = None
        self._hooks: weakref.ref[Hooks] | None = None
        self._checked = False

    def is_of(self, model: Any) -> bool:
        """Whether the model still has the modules that were inspected."""
        return (model.dtype, model.device) == (self.dtype, self.device) and _state_of(model) == self._modules

    @property
    def model(self) -> Any:
        model = self._model()
        if model is None:
            raise Refused("kvlab.hf: the model of this cache was deleted; keep it as long as its caches")
        return model

    # --- Caches ---------------------------------------------------------------------------------

    def request(
        self,
        policy: str | Policy,
        budget: int | str | None,
        tiers: str | None = None,
        centre: str | None = None,
        **words: Any,
    ) -> _kvlab.CacheRequest:
        """Makes a cache request. `words`: those other arguments of kvlab.hf.Cache, `length` included, that are not the
        defaults."""
        (text,), own = resolve([policy])
        setting = "" if tiers is None else ":tiers=" + _arguments.text("tiers", tiers).replace(",", "+").replace(":", "@")
        setting += "" if centre is None else ":centre=" + _arguments.text("centre", centre)
        positions = words.get("positions")
        return _kvlab.CacheRequest(
            policy=text + setting,
            own=own,
            budget="" if budget is None else _arguments.amount("budget", budget),
            prefill=_arguments.text("prefill", words.get("prefill", "dense")),
            positions="" if positions is None else _arguments.text("positions", positions),
            seed=_arguments.whole("seed", words.get("seed", 0), 0, 2**64 - 1),
            threshold=_arguments.real("request_threshold", words.get("request_threshold", 0.01)),
            length=words.get("length", self.length),
            **{size: getattr(self.shape, size) for size in ("layers", "kv_heads", "head_size")},
            layer_numbers=list(self.layer_indices),
        )

    def caches(self, request: Callable[[], _kvlab.CacheRequest]) -> Callable[[], Any]:
        """Returns a function that makes the caches of one sequence. Each sequence needs a new request, because a policy
        keeps the rows that were shown to it."""
        if self.device.type == "cuda":
            from kvlab.hf.cuda_caches import CudaCaches

            plan = _kvlab.slot_plan(request())
            return lambda: CudaCaches(
                plan, self.acted, self.dtype, self.device, lambda: output_weights(self.model, self.acted)
            )
        inv_freq, factors, rows = layer_arguments(self.acted)
        outputs = functools.cache(lambda: output_projections(self.model, self.acted))
        heads = (self.shape.query_heads, self.shape.head_size)
        return lambda: _kvlab.Caches(request(), *heads, inv_freq, factors, rows, outputs)

    def check(self) -> None:
        """Raises Refused unless the model computes the same logits, up to rounding, with a cache of kvlab that keeps
        all tokens as without kvlab. Only the first call runs the model."""
        if self._checked:
            return
        model = self.model
        plain = few_logits(model)
        make = self.caches(lambda: self.request("full", None, length=9))
        block = Block(self, lambda: Conversation(self, make, None, False))
        with self.run_in(block):
            off = float((few_logits(model) - plain).norm() / plain.norm())
        tokens = block._conversation.tokens
        if not bool(plain.isfinite().all()):
            raise Refused(
                f"kvlab.hf: logits of the plain {type(model).__name__} are not finite; check its weights "
                "for NaN and infinity"
            )
        floats = all(parameter.is_floating_point() for parameter in model.parameters())
        linear = floats and all(hasattr(layer.output, "weight") for layer in self.acted if layer.output)
        tolerance = 1e-3 if linear and self.dtype == torch.float32 else 0.1
        if not off <= tolerance or tokens != 9:
            raise Refused(
                f"kvlab.hf: {type(model).__name__} is not supported: with a cache that keeps all tokens, its logits"
                f" differ by {off:.2g} from those without kvlab, and the cache counted {tokens} of 9 tokens; use a model that"
                f" calls attention as Llama does in transformers {transformers.__version__}"
            )
        self._checked = True

    # --- Hooks ----------------------------------------------------------------------------------

    def installed(self) -> Hooks:
        """The model's hooks. They stay while a reference to the returned object exists."""
        hooks = None if self._hooks is None else self._hooks()
        if hooks is None:
            hooks = Hooks(self)
            self._hooks = weakref.ref(hooks)
        return hooks

    @contextlib.contextmanager
    def run_in(self, block: Block) -> Iterator[None]:
        """In the `with` block, calls without one of kvlab's caches get their conversations from `block`."""
        refuse_within_block(self.model)
        hooks = self.installed()
        self.block = block
        try:
            yield
        finally:
            self.block = None
            hooks.close_calls()


def _state_of(model: Any) -> list[tuple[Any, Any]]:
    """Returns references to the model's modules, and to the functions by which other code replaced their `forward`."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [
        (weakref.ref(module), None if own is None else weakref.ref(own)) for module, own in zip(model.modules(), forwards)
    ]
