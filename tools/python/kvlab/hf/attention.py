"""Replaces the attention of every layer by one function, through transformers' attention interface."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from kvlab.hf.refused import Refused

SCORES = 1 << 26  # maximum number of attention scores that are computed at once, in float32
HIDDEN = -1e4  # a mask value of at most this hides a token

# Keywords of an attention call that do not change the result. All other keywords must be None or False.
_HARMLESS = frozenset(
    ("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states")
    + ("return_dict", "output_router_logits", "logits_to_keep", "position_embeddings", "training", "layer_idx")
)


@dataclasses.dataclass
class Call:
    """The arguments of a layer's attention for one sequence: n queries, and all keys and values so far."""

    module: Any
    layer: int
    row: int  # row of the batch
    q: torch.Tensor  # [query_heads, n, key_size], after the model's rotation, norm and scaling
    k: torch.Tensor  # [kv_heads, held, key_size]
    v: torch.Tensor  # [kv_heads, held, value_size]
    mask: torch.Tensor | None  # [1 or query_heads, n, held], added to the scores
    scale: float
    window: int  # 0: all
    softcap: float  # 0: none
    sink: torch.Tensor | None  # [query_heads]
    last: torch.Tensor | None = (
        None  # [tokens]: the mask's row of the last query of the whole text; None if it is unknown
    )


def attention(call: Call) -> torch.Tensor:
    """Attention outputs [n, query_heads, value_size] in float32: softmax(softcap(scale · q kᵀ) + mask) · v. A sink
    logit adds a column to the softmax that has no value vector."""
    query_heads, n, _ = call.q.shape
    kv_heads, held, value_size = call.v.shape
    group, step = query_heads // kv_heads, max(1, SCORES // (held * (query_heads // kv_heads)))
    out = call.q.new_empty(n, query_heads, value_size, dtype=torch.float32)
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        k, v = call.k[head].float(), call.v[head].float()
        for rows in (slice(first, min(first + step, n)) for first in range(0, n, step)):
            scores = call.q[own, rows].float() @ k.T * call.scale
            if call.softcap:
                scores = torch.tanh(scores / call.softcap) * call.softcap
            if call.mask is not None:
                scores += call.mask[own if len(call.mask) > 1 else slice(None), rows]
            if call.sink is not None:
                column = call.sink[own].float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, column), dim=-1)
            out[rows, own] = (scores.softmax(-1)[..., :held] @ v).transpose(0, 1)
    return out


def check_mask(call: Call, end: int) -> None:
    """Raises Refused unless the mask shows to each query exactly the tokens that causal attention with the call's
    window shows. The last query of the call is at position `end` - 1."""
    n, held = call.q.shape[1], call.k.shape[1]
    rows, keys = (torch.arange(end - count, end, device=call.q.device) for count in (n, held))
    ago = rows[:, None] - keys
    seen = (ago >= 0) & (ago < call.window) if call.window else ago >= 0
    shown = torch.ones_like(seen)[None] if call.mask is None else call.mask == 0
    if call.mask is not None and not bool((shown | (call.mask <= HIDDEN)).all()):
        raise Refused(
            f"--model: layer {call.layer}: its mask changes scores, but kvlab supports only masks that hide tokens"
        )
    min_end = min(end, call.window + n - 1) if call.window else end
    ahead = True
    if call.last is not None:
        ahead = torch.equal(
            call.last.nonzero()[:, 0], torch.arange(len(call.last), device=call.last.device)[-call.window :]
        )
    if not ahead or not min_end <= held <= end or not bool((shown == seen).all()):
        window = f"a window of {call.window} tokens" if call.window else "all tokens before it"
        raise Refused(
            f"--model: layer {call.layer}: a query should see {window}, but its mask shows other tokens; padding, "
            "chunked attention, attention to later tokens, and windows that only the mask defines are not supported"
        )


def _last_row(mask_function: Any, tokens: int, device: Any) -> torch.Tensor | None:
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(tokens, device=device)
    try:
        row: torch.Tensor = mask_function(zero, zero, zero + tokens - 1, keys).expand(tokens)
        return row
    except Exception:  # the mask's function may not support positions beyond the current text
        return None


def _calls(module: Any, q: Any, k: Any, v: Any, mask: Any, words: dict[str, Any]) -> list[Call]:
    """Splits the arguments of a batch into one Call for each sequence."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer < 0:
        raise Refused(
            f"--model: layer_idx of {type(module).__name__} is {layer}; it must be the layer's number"
        )
    if len(q) != len(k) or q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
        shapes = f"queries have shape {list(q.shape)} and keys {list(k.shape)}"
        raise Refused(f"--model: layer {layer}: {shapes}; kvlab needs [sequences, heads, tokens, size]")
    scale, window, softcap, sink = (words.pop(name, None) for name in ("scaling", "sliding_window", "softcap", "s_aux"))
    for name, value in words.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise Refused(
                f"--model: layer {layer}: its attention has the argument {name}, which kvlab does not support;"
                " it supports scaling, a mask, sliding_window, softcap and s_aux"
            )
    if mask is not None:
        if mask.ndim != 4:
            raise Refused(
                f"--model: layer {layer}: its mask has shape {list(mask.shape)}; it must be [1, heads, tokens, tokens]"
            )
        mask = mask[:, :, :, : k.shape[2]]
        mask = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    how = (scale, int(window or 0), float(softcap or 0), None if sink is None else sink.detach().reshape(-1))
    rows = zip(q.detach(), k.detach(), v.detach(), [None] * len(q) if mask is None else mask.expand(len(q), -1, -1, -1))
    return [Call(module, layer, row, *given, *how) for row, given in enumerate(rows)]


class AttentionSwitch:
    """Replaces the decoder's attention by a function while it is on."""

    def __init__(
        self, decoder: Any, attend: Callable[[Call], torch.Tensor], tokens: int = 0, *, batches: bool = False
    ) -> None:
        """`attend` returns the decoder's attention outputs [n, query_heads, value_size]. `tokens`: length of the whole
        text, for `Call.last`; 0 if that is not needed. `batches`: allow several sequences, and pass no masks."""
        self._decoder, self._name = decoder, f"kvlab_{id(self)}"  # a separate name for each switch
        configs = {id(module.config): module.config for module in decoder.modules() if hasattr(module, "config")}
        self._settings = [vars(one) for one in configs.values() if "_attn_implementation_internal" in vars(one)]
        self._before: list[Any] | None = None  # settings to restore; None while it is off
        rows: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # (mask, its last row), by the mask's address

        def function(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *_: Any, **words: Any) -> Any:
            calls = _calls(module, query, key, value, None if batches else attention_mask, words)
            if len(calls) != 1 and not batches:
                raise Refused(
                    f"--model: layer {calls[0].layer}: got {len(calls)} sequences; call the model with one "
                    "sequence"
                )
            if attention_mask is not None and attention_mask.data_ptr() in rows:
                calls[0].last = rows[attention_mask.data_ptr()][1]
            outs = [attend(call) for call in calls]
            return (torch.stack(outs) if len(outs) > 1 else outs[0][None]).to(value.dtype), None

        def mask(*arguments: Any, **words: Any) -> Any:
            if batches:
                return None
            made = eager_mask(*arguments, **words)
            if tokens and made is not None and "mask_function" in words:
                rows[made.data_ptr()] = (made, _last_row(words["mask_function"], tokens, made.device))
            return made

        AttentionInterface.register(self._name, function)
        AttentionMaskInterface.register(self._name, mask)

    def turn_on(self) -> None:
        if self._before is None:
            self._before = [own["_attn_implementation_internal"] for own in self._settings]
            self._decoder.set_attn_implementation(self._name)

    def turn_off(self) -> None:
        for own, value in zip(self._settings, self._before or ()):
            own["_attn_implementation_internal"] = value
        self._before = None

    def close(self) -> None:
        self.turn_off()
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self._name, None)


@contextlib.contextmanager
def attending(
    decoder: Any, attend: Callable[[Call], torch.Tensor], tokens: int = 0, *, batches: bool = False
) -> Iterator[None]:
    """Turns an AttentionSwitch on in the block."""
    switch = AttentionSwitch(decoder, attend, tokens, batches=batches)
    try:
        switch.turn_on()
        yield
    finally:
        switch.close()
