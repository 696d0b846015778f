"""The kernel library, kvlab.h, by ctypes: its structs, its functions, its errors."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

P, U32, I32, F32, I64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_float, ctypes.c_int64
SIZE = ctypes.c_size_t

VERSION = 4
TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
NEEDS = ("nothing", "mass", "requests", "both")
UNLIMITED = 2**32 - 1
OBSERVATION_BYTES = 24
INVALID_VALUE, NOT_SUPPORTED = 1, 801


class Pages(ctypes.Structure):  # kvlab_pages
    _fields_ = [
        ("blocks", P),
        ("page", I32),
        ("most_blocks", I32),
        ("by_pair", I32),
        ("block_stride", I64),
        ("slot_stride", I64),
        ("head_stride", I64),
    ]


class Cache(ctypes.Structure):  # kvlab_cache
    _fields_ = [
        ("type", I32),
        ("sequences", I32),
        ("query_heads", I32),
        ("kv_heads", I32),
        ("head_size", I32),
        ("softmax_scale", F32),
        ("most_slots", I32),
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
        ("columns", P),
        ("room_at", P),
    ]


class Args(ctypes.Structure):
    """Of a call: with its own size in front."""

    def __init__(self, *members: Any, **named: Any) -> None:
        super().__init__(ctypes.sizeof(self), *members, **named)


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


class ColumnsArgs(Args):  # kvlab_columns_args
    _fields_ = [
        ("struct_size", SIZE),
        ("cache", Cache),
        ("count", I32),
        ("columns", I32 * 4),
        ("slots", P),
        ("tokens", I32),
        ("now", P),
        ("keys", P),
        ("key_row", I64),
        ("unit_keys", P),
        ("to", P),
        ("output", P),
        ("hidden", I32),
        ("admitted", P),
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
        ("admitted", P),
    ]


class ShrinkArgs(Args):  # kvlab_shrink_args
    _fields_ = [
        ("struct_size", SIZE),
        ("from", Cache),
        ("to", Cache),
        ("policy", PolicyState),
        ("to_states", P),
        ("now", P),
        ("admitted", P),
        ("seen", P),
        ("workspace", P),
        ("to_columns", P),
        ("by_layer", I32),
        ("smooth", U32),
        ("pool_max", I32),
        ("weighted", I32),
    ]


STRUCTS = {
    "kvlab_pages": Pages,
    "kvlab_cache": Cache,
    "kvlab_policy_state": PolicyState,
    "kvlab_write_args": WriteArgs,
    "kvlab_columns_args": ColumnsArgs,
    "kvlab_evicting_attention_args": EvictingAttentionArgs,
    "kvlab_prefill_args": PrefillArgs,
    "kvlab_observe_args": ObserveArgs,
    "kvlab_shrink_args": ShrinkArgs,
}


def _pointer(struct: Any) -> Any:
    return ctypes.POINTER(struct)


_TEXT = ctypes.c_char_p
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "kvlab_version": (I32, []),
    "kvlab_last_error": (_TEXT, []),
    "kvlab_find_policy": (P, [_TEXT]),
    "kvlab_policy_name": (_TEXT, [I32]),
    "kvlab_policy_needs": (I32, [P]),
    "kvlab_policy_slot_bytes": (SIZE, [P]),
    "kvlab_policy_params_bytes": (SIZE, [P]),
    "kvlab_policy_params": (I32, [P, P, I32, P]),
    "kvlab_policy_weighted": (I32, [P]),
    "kvlab_policy_weights": (I32, [P, P, U32, P, P]),
    "kvlab_policy_column": (_TEXT, [P, I32]),
    "kvlab_number_by_age": (I32, [_pointer(Cache), P]),
    "kvlab_write": (I32, [_pointer(WriteArgs), P]),
    "kvlab_columns": (I32, [_pointer(ColumnsArgs), P]),
    "kvlab_evicting_attention_workspace": (SIZE, [P, _pointer(Cache)]),
    "kvlab_evicting_attention": (I32, [P, _pointer(EvictingAttentionArgs), P]),
    "kvlab_prefill_attention": (I32, [_pointer(PrefillArgs), P]),
    "kvlab_observe_workspace": (SIZE, [_pointer(ObserveArgs)]),
    "kvlab_observe": (I32, [_pointer(ObserveArgs), P]),
    "kvlab_shrink_workspace": (SIZE, [_pointer(Cache)]),
    "kvlab_shrink": (I32, [P, _pointer(ShrinkArgs), P]),
}


@functools.cache
def library() -> Any:
    """Loaded once: of the package, where it was built with KVLAB_CUDA=1, or the one that KVLAB_KERNELS names."""
    path = pathlib.Path(os.environ.get("KVLAB_KERNELS") or pathlib.Path(__file__).with_name("libkvlab_kernels.so"))
    if not path.exists():
        raise RuntimeError(
            f"{path}: there is no kernel library; KVLAB_CUDA=1 pip install ., or KVLAB_KERNELS=…/libkvlab_kernels.so"
        )
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path}: not this version's kernel library: {error}") from None
    if loaded.kvlab_version() != VERSION:
        raise RuntimeError(f"{path}: version {loaded.kvlab_version()} of the kernel library; {VERSION} is expected")
    return loaded


class LibraryPolicy:
    """A policy of the library, by its name."""

    def __init__(self, name: str) -> None:
        held = library()
        self.name, self.handle = name, held.kvlab_find_policy(name.encode())
        if not self.handle:
            known = ", ".join(policies())
            raise ValueError(f"policy {name}: the kernel library does not hold it; it holds {known}")
        self.needs: int = held.kvlab_policy_needs(self.handle)
        self.slot_bytes: int = held.kvlab_policy_slot_bytes(self.handle)
        self.weighted = bool(held.kvlab_policy_weighted(self.handle))

    def params(self, values: list[float]) -> bytes:
        """As the kernels read them, of one sequence."""
        to = ctypes.create_string_buffer(library().kvlab_policy_params_bytes(self.handle))
        given = (ctypes.c_double * len(values))(*values)
        if library().kvlab_policy_params(self.handle, given, len(values), to):
            raise ValueError(f"policy {self.name}: {values} are no parameters of it: {len(to) // 8} in their ranges are")
        return to.raw

    def weights(self, params: bytes, queries: int) -> tuple[list[float], int]:
        """Of a prompt's queries, by how many are younger, and from where on they are 0."""
        to, tail = (F32 * queries)(), U32()
        if library().kvlab_policy_weights(self.handle, params or None, queries, to, ctypes.byref(tail)):
            raise ValueError(f"policy {self.name}: the kernel library does not weigh its queries")
        return list(to), tail.value


@functools.cache
def policy(name: str) -> LibraryPolicy:
    return LibraryPolicy(name)


def policies() -> list[str]:
    """The names of those that the library holds."""
    found: list[str] = []
    while name := library().kvlab_policy_name(len(found)):
        found.append(name.decode())
    return found
