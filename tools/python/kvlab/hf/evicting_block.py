"""Evicts by the rule while a transformers model runs."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from kvlab import _kvlab
from kvlab._policy import Policy
from kvlab.hf.attended_model import Block, attended_model
from kvlab.hf.cache import Facts
from kvlab.hf.conversation import Conversation
from kvlab.hf.layers import layer_count
from kvlab.hf.refused import Refused


class evicting(Facts, Block):
    """While the block runs, the model's attention keeps what a policy keeps: `with evicting(model, "h2o", budget=256)`.

    The short form of kvlab.hf.Cache: each empty cache that a call in the block brings, or that the model makes, becomes
    one of kvlab's and stays one behind the block. Each prompt goes by `prefill`, each decoded token by itself. Layers
    with a window keep that, by themselves. The first block of a model begins with a look at whether `full` gives the
    plain model's logits. The object says what was kept of the conversation that began last, and with `record=True` gives
    the queries, keys and values as a trace, whose replay keeps the same. `graph=True`, on CUDA: a CUDA graph for a
    decoded token.
    """

    def __init__(
        self,
        model: Any,
        policy: str | Policy,
        budget: int | str | None = None,
        *,
        ladder: str | None = None,
        tiers: str | None = None,
        prefill: str = "dense",
        positions: str | None = None,
        seed: int = 0,
        request_threshold: float = 0.01,
        length: int | None = None,
        threads: int | None = None,
        record: bool = False,
        graph: bool = False,
    ) -> None:
        """As kvlab.hf.Cache. `ladder`: an older word for `tiers`."""
        attended = attended_model(model, length)
        words = {"prefill": prefill, "positions": positions or "", "seed": seed, "threshold": request_threshold}
        tiers = tiers or ladder

        def request() -> _kvlab.CacheRequest:
            return attended.request(policy, budget, tiers, **words)

        make = attended.caches(request)
        self._budgets = _kvlab.budget_range(request())
        self._said = "policy " + str(policy) + ("" if budget is None else f" at {budget}")
        self._is_share = "%" in str(budget) and length is None
        self._has_tiers = bool(tiers) or "tiers=" in str(policy)
        super().__init__(attended, lambda: Conversation(attended, make, threads, record))
        self._graph = None
        if graph:
            if attended.device.type != "cuda" or record:
                raise Refused("evicting: graph=True needs a model on CUDA, and record=False")
            if not attended.has_fixed_rope:
                what = f"RoPE of type {', '.join(sorted(attended.rope_types))} may change with the length"
                raise Refused(f"evicting: graph=True: {what}, which a graph does not see; graph=False is expected")
            blocks, layers = layer_count(attended.decoder, [*attended.layers.values()]), attended.layers
            if odd := [n for n in range(blocks) if n not in attended.layer_indices or not layers[n].still]:
                what = "has a window, no KV cache, or a RoPE that is not given to it"
                raise Refused(f"evicting: graph=True: layer {odd[0]} {what}; graph=False is expected")
            from kvlab.hf.step_graph import StepGraphs

            self._graph = StepGraphs(attended)

    def begin_anew(self) -> None:
        """Forgets what began last. The next call with an empty cache begins another conversation, as it does anyway."""
        self.begin()

    def __enter__(self) -> evicting:
        self._attended.check()
        if self._is_share:
            what = f"a share of the model's context of {self._attended.length} tokens: {self._tokens_of_budget()}"
            _warn(f"{self._said}: {what}. For a share of fewer tokens give length=")
        self._longest, self._has_evicted = 0, False
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._attended.run_in(self))
            if self._graph:
                stack.enter_context(self._graph.in_model(self._attended.model))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        self._stack.close()
        if raised is not None:
            return
        self._conversation.calls.end()
        if self._longest and self._budgets and not self._has_evicted and not self._has_tiers:
            what = f"the longest text had {self._longest} tokens, and the budget is {self._tokens_of_budget()}"
            _warn(f"{self._said}: nothing was evicted, because {what}. A smaller budget evicts")

    def note(self, conversation: Conversation) -> None:
        self._longest = max(self._longest, conversation.tokens)
        self._has_evicted = self._has_evicted or conversation.sum("evictions") > 0

    def _tokens_of_budget(self) -> str:
        least, most = self._budgets
        return f"{least} tokens" if least == most else f"{least} to {most} tokens"


def _warn(text: str) -> None:
    warnings.warn("kvlab.hf.evicting: " + text, stacklevel=3)
