"""Transformers caches whose keys and values kvlab stores, one object for each conversation."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy
import numpy.typing
import torch
import transformers

from kvlab import _arguments, _kvlab
from kvlab._policy import Policy
from kvlab._trace import MAX_TOKENS
from kvlab.hf.conversation import Conversation
from kvlab.hf.refused import Refused

if TYPE_CHECKING:
    from kvlab._trace import Trace
    from kvlab.hf.attended_model import AttendedModel


def conversation_of(cache: Any) -> Conversation | None:
    """The conversation of one of kvlab's caches. None for any other object."""
    found = vars(cache).get("_conversation") if isinstance(cache, HeldCache) else None
    return found


def refuse_filled(cache: Any) -> None:
    """Raises Refused if a cache cannot become one of kvlab's, because it already has tokens or because its class is not
    supported."""
    if cache is None:
        return
    own = type(cache).__module__.startswith("transformers.models.")  # the cache class of a model family
    if not own and (type(cache) is not transformers.DynamicCache or getattr(cache, "offloading", False)):
        what = f"the call's cache is a {type(cache).__name__}"
        raise Refused(f"kvlab.hf: {what}; pass a plain DynamicCache or a kvlab.hf.Cache")
    if tokens := int(cache.get_seq_length()):
        what = f"the call's cache holds {tokens} tokens that were computed without kvlab"
        raise Refused(f"kvlab.hf: {what}; pass an empty cache")


def budget_text(budgets: list[int]) -> str:
    """Says the smallest and the largest number of tokens of a budget, over layers and KV heads."""
    lowest, highest = budgets
    return f"{lowest} tokens" if lowest == highest else f"{lowest} to {highest} tokens"


def warn_of_share(what: str, budget: str, budgets: list[int], attended: AttendedModel) -> None:
    """Warns if the budget is a share, because it is a share of the model's context length and not of the text's
    length."""
    if "%" in budget:
        share = f"the budget is a share of the model's context of {attended.length} tokens"
        advice = "If your texts are shorter, give their maximum length as length="
        warnings.warn(f"kvlab.hf.{what}: {share}, so it is {budget_text(budgets)}. {advice}", stacklevel=3)


class Facts:
    """Properties of a conversation that users can read, from a cache or from a block of evicting()."""

    _conversation: Conversation

    def kept(self, layer: int, head: int, row: int = 0) -> numpy.typing.NDArray[numpy.uint32]:
        """Positions of the tokens that a KV head keeps now, ascending.

        `layer`: the model's number of the layer. `row` is the sequence in the batch. Raises IndexError if there is no
        such layer, head or row.
        """
        return self._conversation.kept(layer, head, row)

    @property
    def tokens(self) -> int:
        """Number of tokens of the sequence so far, including evicted tokens. In a batch, the number of the longest
        sequence."""
        return self._conversation.tokens

    @property
    def evictions(self) -> int:
        """Number of evicted tokens, summed over layers, KV heads and rows."""
        return self._conversation.sum("evictions")

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of live tokens, in the layers that the policy acts on.

        Tokens count in the format of their tier; without tiers in float32 on the CPU, in the model's dtype on CUDA.
        """
        return self._conversation.sum("kv_bytes")

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated for keys and values in those layers, free slots included.

        On the CPU this is more than `kv_bytes` with quantized tiers, because the CPU stores the dequantized values in
        float32.
        """
        return self._conversation.sum("allocated_bytes")

    @property
    def window_bytes(self) -> int:
        """Bytes of the keys and values in layers with a sliding window, in the model's dtype."""
        return sum(window.bytes for row in self._conversation.rows for window in row.windows.values())

    def trace(self, out: str | os.PathLike[str] | None = None, row: int = 0) -> Trace:
        """Makes a trace of the queries, keys and values of a sequence, in the layers that the policy acts on.

        Needs `record=True`; otherwise raises Refused. A call of several tokens is a prompt segment. `out`: a new folder
        for the trace; without it the trace is in a temporary folder. `row`: the sequence in the batch.
        """
        return self._conversation.trace(out, row)


class HeldCache(Facts):
    """Mixin for a transformers cache class. The transformers class counts tokens, and kvlab stores their keys and
    values."""

    _installed: Any  # the model's hooks, which must live as long as the cache

    def update(self, keys: Any, values: Any, layer_idx: int, *arguments: Any, **words: Any) -> tuple[Any, Any]:
        """Called by transformers. Returns the new keys and values unchanged, because the model's hooks compute
        attention over the cache.

        Raises Refused outside of a call of the cache's model.
        """
        if not self._installed.is_filling(self._conversation):
            what = f"a {type(self).__name__} was filled outside of a call of its model"
            raise Refused(f"kvlab.hf: {what}; pass it as past_key_values to the model that it was made for")
        if layer_idx == self._first_layer:
            self.count(keys.shape[-2], *arguments, **words)
        return keys, values

    @property
    def _first_layer(self) -> int:
        """The first layer that attends."""
        return next(iter(self._conversation.attended.layers))

    def count(self, tokens: int, *arguments: Any, **words: Any) -> None:
        """Adds `tokens` to the number of tokens that the transformers class counts. It counts the tokens that it
        stores, so this stores one zero for each token."""
        before, zeros = self._counted, torch.zeros(1, 1, tokens, 1, dtype=torch.int8)
        super().update(zeros, zeros, self._first_layer, *arguments, **words)  # type: ignore[misc]
        if self._counted != before + tokens:
            what = f"transformers did not count {tokens} new tokens in a {type(self).__name__} of {before} tokens"
            raise Refused(f"kvlab.hf: {what}")

    @property
    def _counted(self) -> int:
        return int(self.get_seq_length())  # type: ignore[attr-defined]

    def crop(self, count: int) -> None:
        """Removes the last tokens, as transformers' own `crop` does.

        `count` is the negative number of tokens to remove; with transformers before 5.24 it is the number of tokens to
        keep. Raises Refused if the earlier state cannot be restored, because tokens have been evicted or quantized
        since then, or because the policy has observed the attention of the tokens to remove.
        """
        count = _arguments.whole("count", count, -MAX_TOKENS, MAX_TOKENS)
        by_number = "tokens_to_remove" in inspect.signature(transformers.DynamicCache.crop).parameters
        if by_number and count > 0:
            raise Refused(
                f"kvlab.hf: crop({count}) is not valid; give the number of tokens to remove as a negative "
                "number"
            )
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
        """Drops all tokens."""
        if self._conversation.attended.has_others:
            super().reset()  # type: ignore[misc]
        self._conversation.begin()
        self._uncount(0)

    def _refuse_rows(self, *_: Any, **__: Any) -> None:
        raise Refused("kvlab.hf: reordered rows (beams, assisted decoding) are not supported; use one row per text")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_rows

    def __copy__(self) -> Any:
        return copy.deepcopy(self)  # two objects must not share one conversation

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens} tokens, {self.kv_bytes} bytes of keys and values)"


@functools.cache
def _held(kind: Any) -> Any:
    return type(f"Held{kind.__name__}", (HeldCache, kind), {})


def adopt(cache: Any, conversation: Conversation) -> None:
    """Turns an empty transformers cache into one of kvlab's, in place, by changing its class."""
    kind: Any = type(cache)
    cache.__class__ = _held(kind)
    cache._conversation, cache._installed = conversation, conversation.attended.installed()


class Cache(HeldCache, transformers.DynamicCache):  # type: ignore[misc]
    """A transformers cache from which a policy evicts tokens.

    >>> cache = kvlab.hf.Cache(model, "h2o:sinks=4", budget=256)
    >>> model.generate(ids, past_key_values=cache, max_new_tokens=200)

    Pass it where you pass a DynamicCache. Queries then attend only to the tokens that the policy keeps. One object
    belongs to one conversation, which may have any number of calls and turns. `copy.deepcopy` makes an independent
    conversation (on the CPU only), so that you can compute a prefix once and ask many questions about it. In a batch,
    each sequence has its own caches.

    `kept(layer, head, row=0)` returns the positions of the tokens that a KV head keeps. With `record=True`, `trace()`
    makes a trace of the conversation. `tokens`, `evictions`, `kv_bytes`, `allocated_bytes` and `window_bytes` are
    numbers about the conversation. `crop()` and `reset()` work as in any transformers cache.

    The first cache of a model checks that the model computes the same logits with kvlab as without it. The check takes
    about as long as eight forward passes of 64 tokens.
    """

    def __init__(
        self,
        model: Any,
        policy: str | Policy,
        budget: int | str | None = None,
        *,
        tiers: str | None = None,
        centre: str | None = None,
        prefill: str = "dense",
        positions: str | None = None,
        seed: int = 0,
        request_threshold: float = 0.01,
        length: int | None = None,
        threads: int | None = None,
        record: bool = False,
    ) -> None:
        """`policy`: a name with settings, a Python policy, a compiled header, or the path of a policy.json, which also
        sets budget, tiers, centre, prefill, positions, seed and threshold.

        `budget`, `prefill`, `positions`, `seed`, `request_threshold`: as in `kvlab.replay()`. `tiers`: a tier plan such
        as "16:16t,4:100%". `centre`: the vectors that are subtracted from keys before these are quantized: "prompt",
        the mean of the first 128 keys of the first prompt, or "@FILE", the vectors in a file of `kvlab plan
        --centre-out`. Both run on the CPU only.

        `length`: the maximum number of tokens of the conversation. A budget such as "20%" is a share of `length`.
        Default: the model's context.

        `threads`: number of CPU threads, by default one for each core. `record`: store queries, keys and values for
        `trace()`.

        Raises Refused for a model, policy or setting that is not supported.
        """
        from kvlab.hf.attended_model import attended_model

        attended = attended_model(model, length)
        words = {"prefill": prefill, "positions": positions, "seed": seed, "request_threshold": request_threshold}

        def request() -> _kvlab.CacheRequest:
            return attended.request(policy, budget, tiers, centre, **words)

        self._conversation = Conversation(attended, attended.caches(request), threads, record)
        if length is None and (budgets := _kvlab.budget_range(request())):
            share = _kvlab.budget_text(request())
            warn_of_share(f"Cache: policy {policy} at {share}", share, budgets, attended)
        attended.check()
        self._installed = attended.installed()
        own = {"config": model.config} if "config" in inspect.signature(transformers.DynamicCache).parameters else {}
        super().__init__(**own)
