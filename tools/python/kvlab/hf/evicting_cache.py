"""Evicts by the rule while a transformers model runs."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import numpy.typing
import torch

from kvlab import _kvlab
from kvlab._policy import Policy, resolve
from kvlab.hf.models import (
    TRANSFORMERS,
    attention_modules,
    output_projections,
    output_weights,
    refuse_unsupported,
    rope_of,
    shape_of,
)
from kvlab.hf.trace_files import Refused

if TYPE_CHECKING:
    from kvlab._trace import Trace


class evicting:
    """While the block runs, the model's attention keeps what a policy keeps: `with evicting(model, "h2o", budget=256)`.

    Whatever calls the model in the block, such as `generate`, sees kvlab's caches in place of transformers' own: one
    sequence at a time, each prompt by `prefill`, each decoded token by itself. A call with a new, empty cache begins
    anew. Afterwards the object says what was kept, and with `record=True` gives the queries, keys and values as a
    trace, whose replay keeps the same. `graph=True`, on CUDA: a CUDA graph for a decoded token.
    """

    def __init__(
        self,
        model: Any,
        policy: str | Policy,
        budget: int | str | None = None,
        *,
        prefill: str = "dense",
        positions: str | None = None,
        seed: int = 0,
        request_threshold: float = 0.01,
        length: int | None = None,
        threads: int | None = None,
        record: bool = False,
        graph: bool = False,
    ) -> None:
        """`length`: how many tokens there may be, of which a budget such as "20%" is a share (the model's context)."""
        if int(torch.__version__.split(".")[0]) < 2:
            raise Refused(f"evicting: torch {torch.__version__}; 2.0 or newer is expected")
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = self._model.config
        refuse_unsupported(str(getattr(config, "_name_or_path", "")) or type(self._model).__name__, config)
        devices = {parameter.device for parameter in self._model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            found = ", ".join(sorted(map(str, devices)))
            raise Refused(f"evicting: the model is on {found}; the CPU or one CUDA device is expected")
        self._device = devices.pop()
        self._shape = shape_of(self._model)
        rope = rope_of(self._model, self._shape)
        texts, own = resolve([policy])
        asked = _kvlab.CacheRequest(
            policy=texts[0],
            own=own,
            budget="" if budget is None else str(budget),
            prefill=prefill,
            positions=positions or "",
            seed=seed,
            threshold=request_threshold,
            length=int(length or config.max_position_embeddings),
            layers=self._shape.layers,
            kv_heads=self._shape.kv_heads,
        )
        self._make: Callable[[], Any]
        if self._device.type == "cuda":
            from kvlab.hf.slot_caches import SlotCaches

            plan = _kvlab.SlotPlan(asked)
            weights = functools.partial(output_weights, self._model)
            self._make = lambda: SlotCaches(plan, self._shape, rope, self._model.dtype, self._device, weights)
        else:
            heads = (self._shape.query_heads, self._shape.head_size)
            inv_freq, turns = rope.inv_freq.tolist(), (rope.factor, rope.softmax_scale)
            outputs = functools.cache(lambda: output_projections(self._model, self._shape))
            self._make = lambda: _kvlab.Caches(asked, *heads, inv_freq, *turns, outputs)
        self._rope = rope
        self._threads = threads or os.cpu_count() or 1
        self._record = record
        self._replaced: list[tuple[Any, Any]] = []  # and their own forwards
        self._caches: Any = None
        self._attend_token: Callable[[int, torch.Tensor], torch.Tensor] | None = None  # while a graph is captured
        self._graph = None
        if graph:
            if self._device.type != "cuda" or record:
                raise Refused("evicting: graph=True needs a model on CUDA, and record=False")
            from kvlab.hf.step_graph import StepGraph

            self._graph = StepGraph(self, self._model)
        self._begin()

    def _begin(self) -> None:
        if self._caches is not None and hasattr(self._caches, "begin_anew"):
            self._caches.begin_anew()
        else:
            self._caches = self._make()
        self._rows: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(self._shape.layers)]
        self._prompt_tokens = 0

    def __enter__(self) -> evicting:
        for index, module in enumerate(attention_modules(self._model)):
            forward = _forward_of(self, index, hasattr(module, "q_norm"))
            self._replace_forward(module, types.MethodType(forward, module))
        self._hook = self._model.model.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
        if self._graph:
            self._replace_forward(self._model, self._graph.forward_of(self._model.forward))
        return self

    def __exit__(self, *_: object) -> None:
        for module, before in self._replaced:
            del module.forward  # the class's own shows again
            if before is not None:  # what somebody else had put there, such as accelerate
                module.forward = before
        self._replaced.clear()
        self._hook.remove()

    def _replace_forward(self, module: Any, forward: Any) -> None:
        self._replaced.append((module, vars(module).get("forward")))
        module.forward = forward

    def kept(self, layer: int, head: int) -> numpy.typing.NDArray[numpy.uint32]:
        """Positions of the tokens that KV head `head` holds now, ascending."""
        kept: numpy.typing.NDArray[numpy.uint32] = self._caches.kept(layer, head)
        return kept

    @property
    def tokens(self) -> int:
        """Tokens that the sequence has so far."""
        return int(self._caches.tokens(0))

    @property
    def evictions(self) -> int:
        return int(self._caches.evictions)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are held now: on the CPU in float32, on CUDA in the model's dtype."""
        return int(self._caches.kv_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that keys and values take up, room for tokens to come among them."""
        return int(self._caches.allocated_bytes)

    def trace(self, out: str | os.PathLike[str] | None = None) -> Trace:
        """What attention was given, of the sequence that ran last: needs `record=True`."""
        from kvlab._trace import Trace

        if not self._record or not self._rows[0]:
            raise Refused("trace: nothing was recorded; evicting(…, record=True), and run the model")
        q, k, v = (
            torch.stack([torch.cat([rows[part] for rows in layer]).transpose(0, 1) for layer in self._rows])
            for part in range(3)
        )
        config = {
            "inv_freq": self._rope.inv_freq.tolist(),
            "rope_factor": self._rope.factor,
            "softmax_scale": self._rope.softmax_scale,
        }
        return Trace.from_arrays(q, k, v, config=config, prompt_tokens=self._prompt_tokens, out=out)

    def _attend(self, layer: int, tensors: tuple[torch.Tensor, ...], start: int) -> torch.Tensor:
        """q, k and v [tokens, heads, head_size] before RoPE."""
        if self._attend_token is not None:
            return self._attend_token(layer, torch.cat(tensors, 1))
        if layer == 0 and start == 0 and self.tokens > 0:
            self._begin()
        if start != self._caches.tokens(layer):
            raise Refused(
                f"evicting: the model's cache holds {start} tokens and ours {self._caches.tokens(layer)}; a sequence that"
                " goes back (beams, assisted decoding) is not supported"
            )
        is_prompt = start == 0 or len(tensors[0]) > 1
        on_cuda = self._device.type == "cuda"
        if not on_cuda:
            tensors = tuple(tensor.detach().float() for tensor in tensors)
        if self._record:
            self._rows[layer].append(tuple(tensor.detach().cpu() for tensor in tensors))
            if layer == 0 and start == 0:
                self._prompt_tokens = len(tensors[0])
        if on_cuda:
            attended: torch.Tensor = self._caches.attend(layer, torch.cat(tensors, 1).detach(), is_prompt)
            return attended
        rows = (tensor.contiguous().numpy() for tensor in tensors)
        return torch.from_numpy(self._caches.attend(layer, *rows, is_prompt, self._threads))


def _forward_of(caches: evicting, layer: int, has_norms: bool) -> Any:
    """An attention module's forward, with the caches in the place of its attention."""

    def forward(module: Any, hidden_states: torch.Tensor, *arguments: Any, **words: Any) -> tuple[Any, ...]:
        batch, count, _ = hidden_states.shape
        if batch != 1:
            raise Refused(f"evicting: a batch of {batch}; one sequence at a time is supported")
        past = words.get("past_key_values", words.get("past_key_value"))
        start = 0 if past is None else int(past.get_seq_length())
        if layer > 0:
            start = max(0, start - count) if past is not None else 0
        shape = (count, -1, caches._shape.head_size)
        q = module.q_proj(hidden_states).view(shape)
        k, v = module.k_proj(hidden_states).view(shape), module.v_proj(hidden_states).view(shape)
        if has_norms:
            q, k = module.q_norm(q), module.k_norm(k)
        out = caches._attend(layer, (q, k, v), start)
        if layer == 0 and past is not None:  # transformers counts the tokens of its cache: it gets as many zeros
            zeros = hidden_states.new_zeros(1, 1, count, 1)
            past.update(zeros, zeros, 0)
        made = module.o_proj(out.reshape(1, count, -1).to(hidden_states.dtype))
        return (made, None) if TRANSFORMERS >= (4, 48) else (made, None, past)

    return forward


def _refuse_padding(module: Any, arguments: Any, words: dict[str, Any]) -> None:
    mask, ids = words.get("attention_mask"), words.get("input_ids", arguments[0] if arguments else None)
    if isinstance(ids, torch.Tensor) and ids.shape[-1] == 1 and ids.device.type != "cpu":
        return  # a step: what is behind it was looked at, and to look means to wait
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise Refused("evicting: attention_mask leaves tokens out; a sequence without padding is expected")
