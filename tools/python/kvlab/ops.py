"""The kernel library as torch operators, `torch.ops.kvlab.*`: tensors where they lie, on the current stream.

They are the functions of kvlab.h (docs/kernel-library.md) by the same names: no copy, no allocation, no waiting, so that
a torch.cuda.CUDAGraph captures them and torch.compile traces them. What they write is given, and marked so in their
schemas. Policies are given by name. `import kvlab.ops` registers them; the library is loaded at the first call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvlab import _kvlab, _library
from kvlab._library import TYPES, library, policies

__all__ = ["attention_workspace", "observe_workspace", "policies", "shrink_workspace"]

_NAMES = {getattr(torch, name): number for name, number in TYPES.items()}
_LIBRARY = torch.library.Library("kvlab", "DEF")

# first_slot, keys, values, positions, lengths and next_slots are those of kvlab_cache.
_SCHEMAS = {
    "write": "Tensor qkv, Tensor? rope, Tensor rope_rows, Tensor sequences, Tensor? slots, Tensor? now,"
    " Tensor first_slot, Tensor next_slots, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) positions, Tensor(d!) q",
    "columns": "str[] names, Tensor keys, Tensor first_slot, Tensor slots, Tensor? now, Tensor values,"
    " Tensor(a!)? unit_keys, Tensor(b!) to, Tensor? output=None",
    "evicting_attention": "str policy, Tensor q, Tensor now, int layer, float softmax_scale, int most_slots,"
    " Tensor first_slot, Tensor keys, Tensor values, Tensor(a!) positions, Tensor(b!) lengths, Tensor(c!) next_slots,"
    " Tensor(d!)? ages, Tensor(e!)? states, Tensor rules, Tensor? params, Tensor? threshold16, Tensor seeds,"
    " Tensor sequence_ids, Tensor? columns, Tensor? room_at, Tensor? inv_freq, float rope_factor,"
    " Tensor(f!) workspace, Tensor(g!) out",
    "prefill_attention": "Tensor q, Tensor keys, Tensor values, Tensor first_slot, Tensor? older, int first,"
    " float softmax_scale, Tensor(a!) out, Tensor(b!)? rows",
    "observe": "str policy, Tensor q, Tensor keys, Tensor first_slot, Tensor? older, Tensor rows, int first,"
    " float softmax_scale, int keys_end, int position, int younger, Tensor? weights, int tail, bool group_max,"
    " Tensor? threshold16, Tensor(a!) seen, Tensor(b!) workspace",
    "shrink": "str policy, int layer, int query_heads, int most_slots, Tensor first_slot, Tensor(a!) keys,"
    " Tensor(b!) values, Tensor(c!) positions, Tensor(d!) lengths, Tensor(e!) next_slots, Tensor(f!)? states,"
    " Tensor? columns, int to_most_slots, Tensor to_first_slot, Tensor(g!) to_keys, Tensor(h!) to_values,"
    " Tensor(i!) to_positions, Tensor(j!) to_lengths, Tensor(k!) to_next_slots, Tensor(l!)? to_states,"
    " Tensor(m!)? to_columns, Tensor rules, Tensor? params, Tensor? threshold16, Tensor seeds, Tensor sequence_ids,"
    " Tensor? room_at, Tensor now, Tensor admitted, Tensor(n!)? seen, bool weighted, bool by_layer, int smooth,"
    " bool pool_max, Tensor(o!) workspace",
    "number_by_age": "int query_heads, int kv_heads, int most_slots, Tensor first_slot, Tensor positions,"
    " Tensor lengths, Tensor(a!) ages, Tensor keys",
}


def _at(tensor: Any) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# Of what is neither int32 nor of the cache's type; None: bytes, of any.
_KINDS = {
    **dict.fromkeys(("first_slot", "seeds"), torch.int64),
    **dict.fromkeys(("columns", "inv_freq", "rope", "rows", "to", "unit_keys", "weights"), torch.float32),
    **dict.fromkeys(("params", "seen", "states", "workspace"), None),
}


def _check(name: str, like: torch.Tensor, values: dict[str, Any], **others: Any) -> int:
    """The stream. All have to lie where `like` does, without gaps; `values` are of its type."""
    for word, tensor in values.items():
        _check_one(name, like, word, tensor, like.dtype)
    for word, tensor in others.items():
        _check_one(name, like, word, tensor, _KINDS.get(word.removeprefix("to_"), torch.int32))
    return _stream(name, like.device)


def _check_one(name: str, like: torch.Tensor, word: str, tensor: Any, kind: torch.dtype | None) -> None:
    if tensor is None:
        return
    if (
        (kind is None or tensor.dtype is kind)
        and tensor.get_device() == like.get_device()
        and tensor.is_contiguous()
    ):
        return
    what = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
    gaps = "" if tensor.is_contiguous() else ", not contiguous"
    expected = f"{kind} on {like.device}" if kind else f"a tensor on {like.device}"
    raise ValueError(f"kvlab::{name}: {word} is {what}{gaps}; {expected}, contiguous, is expected")


def _stream(name: str, device: torch.device) -> int:
    if device.index != torch.cuda.current_device():
        raise ValueError(f"kvlab::{name}: tensors are on {device}; with torch.cuda.device({device.index}): is expected")
    return int(torch.cuda.current_stream(device).cuda_stream)


def _type(name: str, tensor: torch.Tensor) -> int:
    if tensor.dtype not in _NAMES:
        raise ValueError(f"kvlab::{name}: {tensor.dtype}; one of {', '.join(TYPES)} is expected")
    return _NAMES[tensor.dtype]


def _done(error: int) -> None:
    if error:
        refused = error in (_library.INVALID_VALUE, _library.NOT_SUPPORTED)
        raise (ValueError if refused else RuntimeError)(library().kvlab_last_error().decode())


def _cache(name: str, heads: tuple[int, int], most_slots: int, *tensors: Any, scale: float = 0.0) -> _library.Cache:
    """Of query and KV heads; `tensors` as the struct has them, from first_slot on."""
    first_slot, keys = tensors[:2]
    sequences = first_slot.numel() // heads[1]
    numbers = (_type(name, keys), sequences, *heads, keys.shape[-1], scale, most_slots)
    return _library.Cache(*numbers, *map(_at, tensors))


def _write(*given: Any) -> None:
    qkv, rope, rope_rows, sequences, slots, now, first_slot, next_slots, keys, values, positions, q = given
    numbers = {"rope_rows": rope_rows, "sequences": sequences, "slots": slots, "now": now, "next_slots": next_slots}
    given_values = {"qkv": qkv, "keys": keys, "values": values, "q": q}
    stream = _check("write", qkv, given_values, rope=rope, first_slot=first_slot, positions=positions, **numbers)
    heads = (q.shape[-2], (qkv.shape[-2] - q.shape[-2]) // 2)
    args = _library.WriteArgs(
        _cache("write", heads, 0, first_slot, keys, values, positions, None, next_slots),
        qkv.shape[0],
        qkv.data_ptr(),
        0 if rope is None else 2 * rope.shape[-2],
        *map(_at, (rope, rope_rows, sequences, slots, now, q)),
    )
    _done(library().kvlab_write(args, stream))


def _columns(*given: Any) -> None:
    """`keys` may be a part of each row, such as that of q, k and v. `output`: W_o [hidden, query head, head size], for
    value_out_norm1."""
    names, keys, first_slot, slots, now, values, unit_keys, to, output = (*given, None)[:9]
    others = {"first_slot": first_slot, "slots": slots, "now": now, "unit_keys": unit_keys, "to": to}
    stream = _check("columns", values, {"values": values, "keys": keys[0], "output": output}, **others)
    known = _kvlab.built_in_columns()
    for column in names:
        if column not in known:
            raise ValueError(f"kvlab::columns: {column}; one of {', '.join(known)} is expected")
    cache = _cache("columns", (0 if output is None else output.shape[1], keys.shape[-2]), 0, first_slot, keys, values)
    args = _library.ColumnsArgs(cache, len(names))
    for at, column in enumerate(names):
        args.columns[at] = known.index(column)
    args.slots, args.now, args.unit_keys, args.to, args.output = map(_at, (slots, now, unit_keys, to, output))
    args.hidden = 0 if output is None else output.shape[0]
    args.tokens, args.keys, args.key_row = keys.shape[0] // cache.sequences, keys.data_ptr(), keys.stride(0)
    _done(library().kvlab_columns(args, stream))


def _state(layer: int, states: Any, columns: Any, room_at: Any, *rules: Any) -> _library.PolicyState:
    """`rules`: rules, params, threshold16, seeds and sequence_ids."""
    return _library.PolicyState(_at(states), *map(_at, rules), layer, 0, None, _at(columns), _at(room_at))


def _evicting_attention(policy: str, *given: Any) -> None:
    q, now, layer, softmax_scale, most_slots, first_slot, keys, values, positions, lengths, next_slots, ages = given[
        :12
    ]
    states, rules, params, threshold16, seeds, sequence_ids, columns, room_at, inv_freq, rope_factor = given[12:22]
    workspace, out = given[22:]
    numbers = {"positions": positions, "lengths": lengths, "next_slots": next_slots, "rules": rules, "room_at": room_at}
    given_values = {"q": q, "keys": keys, "values": values, "out": out}
    others = {"params": params, "threshold16": threshold16, "seeds": seeds, "sequence_ids": sequence_ids, "ages": ages}
    more = {"first_slot": first_slot, "states": states, "columns": columns, "inv_freq": inv_freq, "workspace": workspace}
    stream = _check("evicting_attention", q, given_values, now=now, **numbers, **others, **more)
    slots = (first_slot, keys, values, positions, lengths, next_slots, ages)
    heads = (q.shape[1], first_slot.numel() // q.shape[0])
    args = _library.EvictingAttentionArgs(
        _cache("evicting_attention", heads, most_slots, *slots, scale=softmax_scale),
        _state(layer, states, columns, room_at, rules, params, threshold16, seeds, sequence_ids),
        0 if inv_freq is None else 1,
        *map(_at, (now, q, inv_freq)),
        0 if inv_freq is None else 2 * inv_freq.numel(),
        rope_factor,
        *map(_at, (out, None, workspace)),
    )
    held = _library.policy(policy)
    _done(library().kvlab_evicting_attention(held.handle, args, stream))


def _prefill(name: str, q: Any, first: int, softmax_scale: float, *tensors: Any) -> _library.PrefillArgs:
    """`tensors`: keys, values, first_slot, older, out, lse and rows."""
    (queries, query_heads, size), kv_heads = q.shape, tensors[2].numel()
    numbers = (_type(name, q), query_heads, kv_heads, size, softmax_scale, first, queries)
    return _library.PrefillArgs(*numbers, q.data_ptr(), *map(_at, tensors))


def _prefill_attention(*given: Any) -> None:
    q, keys, values, first_slot, older, first, softmax_scale, out, rows = given
    given_values = {"q": q, "keys": keys, "values": values, "out": out}
    stream = _check("prefill_attention", q, given_values, first_slot=first_slot, older=older, rows=rows)
    args = _prefill("prefill_attention", q, first, softmax_scale, keys, values, first_slot, older, out, None, rows)
    _done(library().kvlab_prefill_attention(args, stream))


def _observe(policy: str, *given: Any) -> None:
    q, keys, first_slot, older, rows, first, softmax_scale, keys_end, position, younger, weights, tail = given[:12]
    group_max, threshold16, seen, workspace = given[12:]
    numbers = {"first_slot": first_slot, "older": older, "threshold16": threshold16}
    others = {"rows": rows, "weights": weights, "seen": seen, "workspace": workspace}
    stream = _check("observe", q, {"q": q, "keys": keys}, **numbers, **others)
    args = _library.ObserveArgs(
        _prefill("observe", q, first, softmax_scale, keys, None, first_slot, older, None, None, rows),
        _library.policy(policy).needs,
        keys_end,
        position,
        *map(_at, (threshold16, seen, workspace)),
        int(group_max),
        _at(weights),
        tail,
        younger,
    )
    _done(library().kvlab_observe(args, stream))


def _shrink(policy: str, layer: int, query_heads: int, *given: Any) -> None:
    (most, *slots, states, columns), (to_most, *to_slots, to_states, to_columns) = given[:9], given[9:18]
    rules, room_at, now, admitted, seen = given[18:23], *given[23:27]
    weighted, by_layer, smooth, pool_max, workspace = given[27:]
    numbers = {"lengths": slots[4], "to_lengths": to_slots[4], "rules": rules[0], "room_at": room_at}
    given_values = {"keys": slots[1], "values": slots[2], "to_keys": to_slots[1], "to_values": to_slots[2]}
    there = {"first_slot": slots[0], "states": states, "columns": columns, "seen": seen, "workspace": workspace}
    to = {"to_first_slot": to_slots[0], "to_states": to_states, "to_columns": to_columns}
    others = dict(zip(("params", "threshold16", "seeds", "sequence_ids"), rules[1:], strict=True))
    stream = _check("shrink", slots[1], given_values, now=now, admitted=admitted, **numbers, **there, **to, **others)
    heads = (query_heads, slots[0].numel() // now.numel())
    args = _library.ShrinkArgs(
        _cache("shrink", heads, most, *slots),
        _cache("shrink", heads, to_most, *to_slots),
        _state(layer, states, columns, room_at, *rules),
        *map(_at, (to_states, now, admitted, seen, workspace, to_columns)),
        int(by_layer),
        smooth,
        int(pool_max),
        int(weighted),
    )
    _done(library().kvlab_shrink(_library.policy(policy).handle, args, stream))


def _number_by_age(*given: Any) -> None:
    query_heads, kv_heads, most_slots, first_slot, positions, lengths, ages, keys = given
    stream = _check("number_by_age", ages, {}, ages=ages, positions=positions, lengths=lengths, first_slot=first_slot)
    slots = (first_slot, keys, keys, positions, lengths, None, ages)
    cache = _cache("number_by_age", (query_heads, kv_heads), most_slots, *slots)
    _done(library().kvlab_number_by_age(cache, stream))


def attention_workspace(
    policy: str, dtype: torch.dtype, sequences: int, query_heads: int, kv_heads: int, head_size: int, most_slots: int
) -> int:
    """Bytes for evicting_attention, zeroed once; 0: the shape is not supported."""
    cache = _library.Cache(_NAMES[dtype], sequences, query_heads, kv_heads, head_size, 0.0, most_slots)
    return int(library().kvlab_evicting_attention_workspace(_library.policy(policy).handle, ctypes.byref(cache)))


def shrink_workspace(sequences: int, kv_heads: int, most_slots: int) -> int:
    """Bytes for shrink, of the cache that it shrinks."""
    cache = _library.Cache(0, sequences, kv_heads, kv_heads, 64, 0.0, most_slots)
    return int(library().kvlab_shrink_workspace(ctypes.byref(cache)))


def observe_workspace(dtype: torch.dtype, query_heads: int, kv_heads: int, head_size: int, queries: int) -> int:
    """Bytes for observe."""
    args = _library.ObserveArgs(_library.PrefillArgs(_NAMES[dtype], query_heads, kv_heads, head_size, 0.0, 0, queries))
    return int(library().kvlab_observe_workspace(ctypes.byref(args)))


def _register() -> None:
    for name, schema in _SCHEMAS.items():
        _LIBRARY.define(f"{name}({schema}) -> ()")
        _LIBRARY.impl(name, globals()[f"_{name}"], "CUDA")
        torch.library.register_fake(f"kvlab::{name}", lambda *_, **__: None, lib=_LIBRARY)


_register()
