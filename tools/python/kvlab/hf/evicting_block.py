"""The block `evicting`: eviction while a transformers model runs."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from kvlab import _arguments, _kvlab
from kvlab._policy import Policy
from kvlab.hf.attended_model import Block, attended_model
from kvlab.hf.cache import Facts, budget_text, warn_of_share
from kvlab.hf.conversation import Conversation
from kvlab.hf.layers import layer_count
from kvlab.hf.refused import Refused


class evicting(Facts, Block):
    """A `with` block in which a policy evicts tokens from a model's caches.

    >>> with kvlab.hf.evicting(model, "h2o:sinks=4", budget=256) as caches:
    ...     model.generate(ids, max_new_tokens=500)
    >>> caches.kept(layer=0, head=0)

    A short form of `kvlab.hf.Cache`. Each empty cache that is passed to the model in the block, or that the model makes
    there, becomes a cache of kvlab. It stays one after the block. Layers with a sliding window keep their window. The
    first block of a model checks that the model computes the same logits with kvlab's policy `full` as without kvlab.

    The object describes the conversation that began last. It has `kept()`, `tokens`, `evictions`, `kv_bytes`,
    `allocated_bytes`, `window_bytes` and `trace()`, as `kvlab.hf.Cache` has. A replay of the trace keeps the same
    tokens.
    """

    def __init__(
        self,
        model: Any,
        policy: str | Policy,
        budget: int | str | None = None,
        *,
        ladder: str | None = None,  # old name
        tiers: str | None = None,
        centre: str | None = None,
        prefill: str = "dense",
        positions: str | None = None,
        seed: int = 0,
        request_threshold: float = 0.01,
        length: int | None = None,
        threads: int | None = None,
        record: bool = False,
        graph: bool = False,
    ) -> None:
        """Arguments and errors are those of `kvlab.hf.Cache`. `ladder` is the old name of `tiers`.

        `graph`: on CUDA, run the decode step of each token as a CUDA graph. This requires `record=False`, a RoPE that
        does not change with the length of the text, and a model without sliding windows.
        """
        _arguments.flag("graph", graph)
        attended = attended_model(model, length)
        words = {"prefill": prefill, "positions": positions, "seed": seed, "request_threshold": request_threshold}
        if ladder is not None:  # old name
            warnings.warn("evicting(ladder=) is called tiers now", FutureWarning, stacklevel=2)  # old name
        tiers = tiers or ladder  # old name

        def request() -> _kvlab.CacheRequest:
            return attended.request(policy, budget, tiers, centre, **words)

        make = attended.caches(request)
        self._budgets = _kvlab.budget_range(request())
        requested = _kvlab.budget_text(request())
        self._said = f"policy {policy}" + (f" at {requested}" if self._budgets else "")
        self._share = requested if length is None and self._budgets else ""
        self._has_tiers = bool(tiers) or any(setting in str(policy) for setting in ("tiers=", "ladder="))  # old name
        super().__init__(attended, lambda: Conversation(attended, make, threads, record))
        self._graph = None
        if graph:
            if attended.device.type != "cuda" or record:
                raise Refused("evicting: graph=True needs a model on CUDA, and record=False")
            if not attended.has_fixed_rope:
                what = f"RoPE of type {', '.join(sorted(attended.rope_types))} may change with the length"
                raise Refused(f"evicting: graph=True: {what}, which a CUDA graph cannot follow; use graph=False")
            blocks, layers = layer_count(attended.decoder, [*attended.layers.values()]), attended.layers
            if odd := [n for n in range(blocks) if n not in attended.layer_indices or not layers[n].unrotated]:
                what = "has a window, has no KV cache, or does not get its RoPE as an argument"
                raise Refused(f"evicting: graph=True: layer {odd[0]} {what}; use graph=False")
            from kvlab.hf.step_graph import StepGraphs

            self._graph = StepGraphs(attended)

    def begin_anew(self) -> None:
        """Starts a new conversation, which this object describes from now on. A call with an empty cache does the same.
        """
        self.begin()

    def __enter__(self) -> evicting:
        self._attended.check()
        warn_of_share(f"evicting: {self._said}", self._share, self._budgets, self._attended)
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
            what = f"the longest text had {self._longest} tokens, and the budget is {budget_text(self._budgets)}"
            _warn(f"{self._said}: nothing was evicted, because {what}. Use a smaller budget")

    def note(self, conversation: Conversation) -> None:
        """Called when a call of the conversation has ended, for the warning at the end of the block."""
        self._longest = max(self._longest, conversation.tokens)
        self._has_evicted = self._has_evicted or conversation.sum("evictions") > 0


def _warn(text: str) -> None:
    warnings.warn("kvlab.hf.evicting: " + text, stacklevel=3)
