"""A model's decode step as a CUDA graph: one launch for a token."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvlab.hf.calls import cache_among

_OF_THE_HEAD = frozenset(("logits_to_keep", "num_logits_to_keep"))  # which the decoder does not see
_KNOWN = _OF_THE_HEAD.union(
    ("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "return_dict")
)


class StepGraph:
    """The forward pass of one token through caches of slots, captured at its second step: the first, which runs as
    ever, loads what the capture may not."""

    def __init__(self, evicting: Any, model: Any) -> None:
        self._evicting, self._model = evicting, model
        self._ids, self._position = (torch.zeros(1, 1, dtype=torch.int64, device=model.device) for _ in range(2))
        self._mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)  # of four dimensions: as it is
        self._graph: Any = None
        self._ran = False

    def forward_of(self, original: Any) -> Any:
        """The model's forward, with the graph for the steps that it knows."""

        @functools.wraps(original)
        def forward(*arguments: Any, **words: Any) -> Any:
            ids, past, fed = words.get("input_ids"), cache_among(words.values()), self._evicting.tokens
            others = (value for word, value in words.items() if word not in _KNOWN and value is not past)
            if (
                arguments
                or ids is None
                or past is None
                or any(value is not None and value is not False for value in others)
            ):
                return original(*arguments, **words)
            if (
                words.get("return_dict") is False
                or tuple(ids.shape) != (1, 1)
                or fed == 0
                or past.get_seq_length() != fed
                or past is not self._evicting._past.past
            ):
                return original(*arguments, **words)  # of a batch, of what is padded
            if not self._ran:
                self._ran = True
                return original(*arguments, **words)
            if self._graph is None:
                self._capture(original)  # before anything is counted: it may fail
            self._evicting._look(None, (), {word: words[word] for word in words if word not in _OF_THE_HEAD})
            logits = self._step(ids, fed)
            self._evicting._past.count(1)
            cache = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
            return CausalLMOutputWithPast(logits=logits, **{cache: past})

        return forward

    def _step(self, ids: torch.Tensor, fed: int) -> Any:
        caches = self._evicting._rows[0].caches
        self._ids.copy_(ids)
        self._position.fill_(fed)
        caches.before_token()
        self._graph.replay()
        caches.count_token()
        return self._logits.clone()

    def _capture(self, original: Any) -> None:
        caches, graph = self._evicting._rows[0].caches, torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            self._evicting._attend_token = caches.token
            try:
                words = {"attention_mask": self._mask, "use_cache": False, "return_dict": True}
                self._logits = original(input_ids=self._ids, position_ids=self._position, **words).logits
            finally:
                self._evicting._attend_token = None
        self._graph = graph
