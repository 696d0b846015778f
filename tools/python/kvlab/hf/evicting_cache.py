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
import transformers

from kvlab import _kvlab
from kvlab._policy import Policy, resolve
from kvlab.hf.calls import Calls, cache_among, cache_word, count_in, few_logits
from kvlab.hf.models import (
    TRANSFORMERS,
    attention_modules,
    base_of,
    output_projections,
    output_weights,
    refuse_unsupported,
    rope_of,
    shape_of,
)
from kvlab.hf.refused import Refused

if TYPE_CHECKING:
    from kvlab._trace import Trace


class evicting:
    """While the block runs, the model's attention keeps what a policy keeps: `with evicting(model, "h2o", budget=256)`.

    Whatever calls the model in the block, such as `generate`, sees kvlab's caches in place of transformers' own: one
    sequence at a time, each prompt by `prefill`, each decoded token by itself. Before another sequence, `begin_anew`.
    The block begins with a look at whether `full` gives the plain model's logits. Afterwards the object says what was
    kept, and with `record=True` gives the queries, keys and values as a trace, whose replay keeps the same.
    `graph=True`, on CUDA: a CUDA graph for a decoded token.
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
        if not hasattr(model, "config"):
            raise Refused(f"evicting: a {type(model).__name__}; a loaded model of transformers is expected")
        self._model = base_of(model)
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
            **{size: getattr(self._shape, size) for size in ("layers", "kv_heads", "head_size")},
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
        self._calls, self._to_check = Calls(self._model.model), True
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets the sequence: the next call, with a cache that is empty, begins another."""
        if self._caches is not None and hasattr(self._caches, "begin_anew"):
            self._caches.begin_anew()
        else:
            self._caches = self._make()
        self._rows: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(self._shape.layers)]
        self._prompt_tokens = 0
        self._start = 0  # tokens before those of the call that goes on

    def __enter__(self) -> evicting:
        if self._to_check:
            self._check()
        for index, module in enumerate(attention_modules(self._model)):
            forward = _forward_of(self, index, hasattr(module, "q_norm"))
            self._replace_forward(module, types.MethodType(forward, module))
        self._hook = self._model.model.register_forward_pre_hook(
            lambda _, *call: self._calls.look(*call) if self._attend_token is None else None, with_kwargs=True
        )
        if self._graph:
            self._replace_forward(self._model, self._graph.forward_of(self._model.forward))
        return self

    def _check(self) -> None:
        """Whether a cache that keeps all gives what the model gives without ours."""
        plain = few_logits(self._model)
        full = evicting(self._model, "full", length=9, threads=self._threads)
        full._to_check = False
        with full:
            off = float((few_logits(self._model) - plain).norm() / plain.norm())
        linear = all(type(module.o_proj) is torch.nn.Linear for module in attention_modules(self._model))
        most = 1e-3 if linear and self._model.dtype == torch.float32 else 0.1
        if not off <= most or full.tokens != 9:
            raise Refused(
                f"evicting: with caches that keep nine tokens and count {full.tokens}, logits differ by {off:.2g} from the"
                f" plain {type(self._model).__name__}'s; an attention that transformers {transformers.__version__} calls as"
                " Llama's is expected"
            )

    def __exit__(self, raised: object, *_: object) -> None:
        for module, before in self._replaced:
            del module.forward  # the class's own shows again
            if before is not None:  # what somebody else had put there, such as accelerate
                module.forward = before
        self._replaced.clear()
        self._hook.remove()
        if raised is None:
            self._calls.end()

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

    def _begin_call(self, past: Any) -> None:
        """Where the sequence goes on, by the model's own cache `past`."""
        if past is None:
            why = "use_cache=False in it or in the model's config"
            raise Refused(f"evicting: the call comes without a cache, as with {why}; use_cache=True is expected")
        self._start, held = int(past.get_seq_length()), self.tokens
        if self._start == 0 and held > 0:
            raise Refused(
                f"evicting: the call begins anew, and {held} tokens are held; {cache_word(self._model)}= of the call before"
                " goes on, such as a chat, and begin_anew() in front begins another sequence"
            )

    def _attend(self, layer: int, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """q, k and v [tokens, heads, head_size] before RoPE."""
        if self._attend_token is not None:
            return self._attend_token(layer, torch.cat(tensors, 1))
        start = self._start
        if start != self._caches.tokens(layer):
            raise Refused(
                f"evicting: the call's cache holds {start} tokens, and ours {self._caches.tokens(layer)} in layer {layer};"
                " a sequence that goes back (beams, assisted decoding), or that began elsewhere, is not supported"
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
        count, past = hidden_states.shape[1], cache_among((*arguments, *words.values()))
        counts = layer == 0 and caches._attend_token is None
        if counts:
            caches._begin_call(past)
        shape = (count, -1, caches._shape.head_size)
        q = module.q_proj(hidden_states).view(shape)
        k, v = module.k_proj(hidden_states).view(shape), module.v_proj(hidden_states).view(shape)
        if has_norms:
            q, k = module.q_norm(q), module.k_norm(k)
        out = caches._attend(layer, (q, k, v))
        if counts:
            count_in(past, count, hidden_states)
        made = module.o_proj(out.reshape(1, count, -1).to(hidden_states.dtype))
        return (made, None) if TRANSFORMERS >= (4, 48) else (made, None, past)

    return forward
