"""Caches of transformers whose keys and values kvlab holds: one object for each conversation."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

import numpy
import numpy.typing
import torch
import transformers

from kvlab._policy import Policy
from kvlab.hf.conversation import Conversation
from kvlab.hf.refused import Refused

if TYPE_CHECKING:
    from kvlab._trace import Trace


def conversation_of(cache: Any) -> Conversation | None:
    """Of one of kvlab's caches; None of any other."""
    found = vars(cache).get("_conversation") if isinstance(cache, HeldCache) else None
    return found


def refuse_filled(cache: Any) -> None:
    """Whatever cannot become one of kvlab's caches: with tokens that it does not hold, or of another kind."""
    if cache is None:
        return
    own = type(cache).__module__.startswith("transformers.models.")  # of a family
    if not own and (type(cache) is not transformers.DynamicCache or getattr(cache, "offloading", False)):
        what = f"the call's cache is a {type(cache).__name__}"
        raise Refused(f"kvlab.hf: {what}; a plain DynamicCache, or a kvlab.hf.Cache, is expected")
    if tokens := int(cache.get_seq_length()):
        what = f"the call's cache holds {tokens} tokens that were computed without kvlab"
        raise Refused(f"kvlab.hf: {what}; an empty cache is expected")


class Facts:
    """What is held of a conversation, and what a block or a cache says of it."""

    _conversation: Conversation

    def kept(self, layer: int, head: int, row: int = 0) -> numpy.typing.NDArray[numpy.uint32]:
        """Positions of the tokens that KV head `head` holds now, ascending. `layer` as the model counts."""
        return self._conversation.kept(layer, head, row)

    @property
    def tokens(self) -> int:
        """Tokens that the sequence, of a batch the longest, has so far."""
        return self._conversation.tokens

    @property
    def evictions(self) -> int:
        return self._conversation.sum("evictions")

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are held now where policies act: on the CPU in float32 or a tier's format,
        on CUDA in the model's dtype or a tier's format."""
        return self._conversation.sum("kv_bytes")

    @property
    def allocated_bytes(self) -> int:
        """Bytes that keys and values take up there, room for tokens to come among them. The CPU computes the values that
        a quantized tier gives, and keeps them in float32: there this is more than `kv_bytes`."""
        return self._conversation.sum("allocated_bytes")

    @property
    def window_bytes(self) -> int:
        """Bytes of the keys and values of layers with a window, in the model's dtype."""
        return sum(window.bytes for row in self._conversation.rows for window in row.windows.values())

    def trace(self, out: str | os.PathLike[str] | None = None, row: int = 0) -> Trace:
        """What attention was given of a sequence, where policies act: needs `record=True`. A call of several tokens is a
        prompt segment."""
        return self._conversation.trace(out, row)


class HeldCache(Facts):
    """In front of a cache class of transformers: the class counts the tokens, kvlab holds their keys and values."""

    _installed: Any  # hooks of the model, as long as the cache

    def update(self, keys: Any, values: Any, layer_idx: int, *arguments: Any, **words: Any) -> tuple[Any, Any]:
        """Gives back what it is given: attention over what is held is computed by the hooks of the model."""
        if not self._installed.is_filling(self._conversation):
            what = f"a {type(self).__name__} is filled outside of the model that it was made for"
            raise Refused(f"kvlab.hf: {what}; a call of that model is expected")
        if layer_idx == self._first_layer:
            self.count(keys.shape[-2], *arguments, **words)
        return keys, values

    @property
    def _first_layer(self) -> int:
        """The first that attends."""
        return next(iter(self._conversation.attended.layers))

    def count(self, tokens: int, *arguments: Any, **words: Any) -> None:
        """Transformers counts the tokens of what it holds: as many zeros."""
        before, zeros = self._counted, torch.zeros(1, 1, tokens, 1, dtype=torch.int8)
        super().update(zeros, zeros, self._first_layer, *arguments, **words)  # type: ignore[misc]
        if self._counted != before + tokens:
            what = f"a {type(self).__name__} of {before} tokens has not counted {tokens} more"
            raise Refused(f"kvlab.hf: {what}")

    @property
    def _counted(self) -> int:
        return int(self.get_seq_length())  # type: ignore[attr-defined]

    def crop(self, count: int) -> None:
        """As transformers' own: of version 5.24 how many tokens go, as a negative number; before, how many stay."""
        by_number = "tokens_to_remove" in inspect.signature(transformers.DynamicCache.crop).parameters
        if by_number and count > 0:
            raise Refused(f"kvlab.hf: crop({count}); minus the number of tokens to remove is expected")
        stay = self._counted + count if by_number or count < 0 else min(count, self._counted)
        self._conversation.crop(max(stay, 0))
        self._uncount(max(stay, 0))

    def _uncount(self, tokens: int) -> None:
        if self._counted <= tokens:
            return
        layer = self.layers[self._first_layer]  # type: ignore[attr-defined]
        layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = tokens

    def reset(self) -> None:
        """Forgets all tokens."""
        if self._conversation.attended.has_others:
            super().reset()  # type: ignore[misc]
        self._conversation.begin()
        self._uncount(0)

    def _refuse_rows(self, *_: Any, **__: Any) -> None:
        raise Refused("kvlab.hf: rows that change places (beams, assisted decoding) are not supported; one row for each text")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_rows

    def __copy__(self) -> Any:
        return copy.deepcopy(self)  # two objects with one conversation would mix

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens} tokens, {self.kv_bytes} bytes of keys and values)"


@functools.cache
def _held(kind: Any) -> Any:
    return type(f"Held{kind.__name__}", (HeldCache, kind), {})


def adopt(cache: Any, conversation: Conversation) -> None:
    """Makes an empty cache of transformers one of kvlab's. It remains the object that it is."""
    kind: Any = type(cache)
    cache.__class__ = _held(kind)
    cache._conversation, cache._installed = conversation, conversation.attended.installed()


class Cache(HeldCache, transformers.DynamicCache):  # type: ignore[misc]
    """One conversation under a policy: `model.generate(ids, past_key_values=Cache(model, "h2o", 256))`.

    A cache of transformers, whose keys and values kvlab holds: the model's attention goes over what the policy keeps. It
    goes on from call to call and from turn to turn. `copy.deepcopy` gives a conversation of its own, so that a prefix
    that was computed once answers many questions. Each row of a batch has its own caches. The model is looked at once,
    when its first cache is made.
    """

    def __init__(
        self,
        model: Any,
        policy: str | Policy,
        budget: int | str | None = None,
        *,
        tiers: str | None = None,
        prefill: str = "dense",
        positions: str | None = None,
        seed: int = 0,
        request_threshold: float = 0.01,
        length: int | None = None,
        threads: int | None = None,
        record: bool = False,
    ) -> None:
        """`policy`: as everywhere, or a policy.json, which brings all but `length` and what comes behind it. `tiers`: as
        the command takes them, such as "16:16t,4:100%".

        `length`: how many tokens there may be, of which a budget such as "20%" is a share (the model's context)."""
        from kvlab.hf.attended_model import attended_model

        attended = attended_model(model, length)
        words = {"prefill": prefill, "positions": positions or "", "seed": seed, "threshold": request_threshold}
        make = attended.caches(lambda: attended.request(policy, budget, tiers, **words))
        self._conversation = Conversation(attended, make, threads, record)
        attended.check()
        self._installed = attended.installed()
        own = {"config": model.config} if "config" in inspect.signature(transformers.DynamicCache).parameters else {}
        super().__init__(**own)
