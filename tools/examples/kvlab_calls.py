"""ctypes declarations of the functions of kvlab.h, and of their structs, for an engine that has its own blocks."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from kvlab import _library
from kvlab._library import F32, I32, I64, SIZE, TYPES, U32, Args, P, Pages  # noqa: F401, TYPES for importers of this file

OBSERVATION_BYTES = 24


class Cache(ctypes.Structure):  # kvlab_cache_view
    _fields_ = [
        ("type", I32),
        ("sequences", I32),
        ("query_heads", I32),
        ("kv_heads", I32),
        ("head_size", I32),
        ("softmax_scale", F32),
        ("max_slots", I32),
        ("first_slot", P),
        ("keys", P),
        ("values", P),
        ("positions", P),
        ("lengths", P),
        ("next_slots", P),
        ("ages", P),
        ("pages", Pages),
    ]


class PolicyState(ctypes.Structure):  # kvlab_policy_state
    _fields_ = [
        ("states", P),
        ("rules", P),
        ("params", P),
        ("threshold16", P),
        ("seeds", P),
        ("sequence_ids", P),
        ("layer", U32),
        ("first_head", U32),
        ("seen", P),
        ("features", P),
        ("evict_at", P),
    ]


class WriteArgs(Args):  # kvlab_write_args
    _fields_ = [
        ("struct_size", SIZE),
        ("cache", Cache),
        ("tokens", I32),
        ("qkv", P),
        ("rotated", I32),
        ("rope", P),
        ("rope_rows", P),
        ("sequences", P),
        ("slots", P),
        ("now", P),
        ("q", P),
    ]


class EvictingAttentionArgs(Args):  # kvlab_evicting_attention_args
    _fields_ = [
        ("struct_size", SIZE),
        ("cache", Cache),
        ("policy", PolicyState),
        ("numbering", I32),
        ("now", P),
        ("q", P),
        ("inv_freq", P),
        ("rotated", I32),
        ("rope_factor", F32),
        ("out", P),
        ("lse", P),
        ("workspace", P),
        ("settled", I32),
    ]


class PrefillArgs(Args):  # kvlab_prefill_args
    _fields_ = [
        ("struct_size", SIZE),
        ("type", I32),
        ("query_heads", I32),
        ("kv_heads", I32),
        ("head_size", I32),
        ("softmax_scale", F32),
        ("first", I32),
        ("queries", I32),
        ("q", P),
        ("keys", P),
        ("values", P),
        ("first_slot", P),
        ("older", P),
        ("out", P),
        ("lse", P),
        ("rows", P),
        ("pages", Pages),
        ("sequences", I32),
        ("all_queries", I32),
        ("first_query", P),
        ("workspace", P),
        ("keys_end", I32),
    ]


class ObserveArgs(Args):  # kvlab_observe_args
    _fields_ = [
        ("struct_size", SIZE),
        ("prefill", PrefillArgs),
        ("needs", I32),
        ("keys_end", I32),
        ("position", U32),
        ("threshold16", P),
        ("seen", P),
        ("workspace", P),
        ("group_max", I32),
        ("weights", P),
        ("tail", U32),
        ("younger", I32),
        ("positions", P),
        ("youngers", P),
        ("appended", P),
    ]


class CompactArgs(Args):  # kvlab_compact_args
    _fields_ = [
        ("struct_size", SIZE),
        ("from", Cache),
        ("to", Cache),
        ("policy", PolicyState),
        ("to_states", P),
        ("now", P),
        ("appended", P),
        ("seen", P),
        ("workspace", P),
        ("to_features", P),
        ("by_layer", I32),
        ("smooth", U32),
        ("pool_max", I32),
        ("weighted", I32),
    ]


STRUCTS = {
    "kvlab_pages": Pages,
    "kvlab_cache_view": Cache,
    "kvlab_policy_state": PolicyState,
    "kvlab_write_args": WriteArgs,
    "kvlab_evicting_attention_args": EvictingAttentionArgs,
    "kvlab_prefill_args": PrefillArgs,
    "kvlab_observe_args": ObserveArgs,
    "kvlab_compact_args": CompactArgs,
}

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "kvlab_policy_needs": (I32, [P]),
    "kvlab_policy_slot_bytes": (SIZE, [P]),
    "kvlab_write": (I32, [ctypes.POINTER(WriteArgs), P]),
    "kvlab_evicting_attention_workspace": (SIZE, [P, ctypes.POINTER(Cache)]),
    "kvlab_evicting_attention": (I32, [P, ctypes.POINTER(EvictingAttentionArgs), P]),
    "kvlab_prefill_attention": (I32, [ctypes.POINTER(PrefillArgs), P]),
    "kvlab_observe_workspace": (SIZE, [ctypes.POINTER(ObserveArgs)]),
    "kvlab_observe": (I32, [ctypes.POINTER(ObserveArgs), P]),
    "kvlab_compact_workspace": (SIZE, [ctypes.POINTER(Cache)]),
    "kvlab_compact": (I32, [P, ctypes.POINTER(CompactArgs), P]),
}


@functools.cache
def library() -> Any:
    loaded = _library.library()
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class Policy:
    """A policy of the library, by name."""

    def __init__(self, name: str) -> None:
        self.handle = _library.policy(name)
        self.needs: int = library().kvlab_policy_needs(self.handle)
        self.slot_bytes: int = library().kvlab_policy_slot_bytes(self.handle)
