"""Runs a model's decode step as a CUDA graph, which is one launch for each token."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvlab.hf.attended_model import AttendedModel
from kvlab.hf.cache import conversation_of
from kvlab.hf.calls import cache_among
from kvlab.hf.conversation import Conversation

_OF_THE_HEAD = frozenset(("logits_to_keep", "num_logits_to_keep"))  # arguments that the decoder does not get
_KNOWN = _OF_THE_HEAD.union(
    ("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "return_dict")
)


class StepGraph:
    """A CUDA graph of the forward pass of one token with the caches of a conversation. The graph is captured at the
    second step. The first step runs without a graph, because it may load kernels and libraries, which is not possible
    during a capture."""

    def __init__(self, model: Any) -> None:
        self._ids, self._position = (torch.zeros(1, 1, dtype=torch.int64, device=model.device) for _ in range(2))
        # Four dimensions, because transformers uses such a mask unchanged.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._graph: Any = None
        self.ran = False

    def capture(self, original: Any, conversation: Conversation) -> None:
        """Captures the graph. Call this before the token is counted, because the capture may fail."""
        if self._graph is not None:
            return
        graph, hooks = torch.cuda.CUDAGraph(), conversation.attended.installed()
        with torch.no_grad(), torch.cuda.graph(graph):
            hooks.attend_token = conversation.rows[0].caches.token
            try:
                words = {"attention_mask": self._mask, "use_cache": False, "return_dict": True}
                self._logits = original(input_ids=self._ids, position_ids=self._position, **words).logits
            finally:
                hooks.attend_token = None
        self._graph = graph

    def step(self, ids: torch.Tensor, fed: int, caches: Any) -> Any:
        self._ids.copy_(ids)
        self._position.fill_(fed)
        caches.before_token()
        self._graph.replay()
        caches.count_token()
        return self._logits.clone()


class StepGraphs:
    """Replaces a model's forward, and runs each conversation's graph for the steps that it supports."""

    def __init__(self, attended: AttendedModel) -> None:
        self._attended = attended

    @contextlib.contextmanager
    def in_model(self, model: Any) -> Iterator[None]:
        before = vars(model).get("forward")  # set by another package, such as accelerate
        model.forward = self._forward_of(model, model.forward)
        try:
            yield
        finally:
            if before is None:
                vars(model).pop("forward")
            else:
                model.forward = before

    def _forward_of(self, model: Any, original: Any) -> Any:
        @functools.wraps(original)
        def forward(*arguments: Any, **words: Any) -> Any:
            cache = cache_among(words.values())
            conversation = conversation_of(cache)
            if conversation is None or arguments or not _is_plain_step(words, cache, conversation.tokens):
                return original(*arguments, **words)  # batches and padded rows run normally
            graph = conversation.graph = conversation.graph or StepGraph(model)
            if not graph.ran:
                graph.ran = True
                return original(*arguments, **words)
            graph.capture(original, conversation)
            fed = conversation.tokens
            self._attended.installed().look({word: words[word] for word in words if word not in _OF_THE_HEAD})
            logits = graph.step(words["input_ids"], fed, conversation.rows[0].caches)
            cache.count(1)
            name = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
            return CausalLMOutputWithPast(logits=logits, **{name: cache})

        return forward


def _is_plain_step(words: dict[str, Any], cache: Any, fed: int) -> bool:
    ids = words.get("input_ids")
    others = (value for word, value in words.items() if word not in _KNOWN and value is not cache)
    return (
        ids is not None
        and not any(value is not None and value is not False for value in others)
        and words.get("return_dict") is not False
        and tuple(ids.shape) == (1, 1)
        and fed > 0
        and cache.get_seq_length() == fed
    )
