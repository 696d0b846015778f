"""ctypes declarations of the kernel library (kvlab.h): structs, functions and errors."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

P, U32, I32, F32, I64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_float, ctypes.c_int64
U64, SIZE = ctypes.c_uint64, ctypes.c_size_t

VERSION = 6
TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
INVALID_VALUE = 1


class Rope(ctypes.Structure):  # kvlab_rope
    _fields_ = [("inv_freq", P), ("rotated", I32), ("factor", F32)]


class Pages(ctypes.Structure):  # kvlab_pages
    _fields_ = [
        ("blocks", P),
        ("page", I32),
        ("max_blocks", I32),
        ("by_pair", I32),
        ("block_stride", I64),
        ("slot_stride", I64),
        ("head_stride", I64),
    ]


class Layer(ctypes.Structure):  # kvlab_layer
    _fields_ = [("number", U32), ("softmax_scale", F32), ("rope", I32), *((name, P) for name in ("output", "sinks", "keys", "values"))]


class Args(ctypes.Structure):
    """Arguments of a call. The first member is the size of the struct in bytes."""

    def __init__(self, *members: Any, **named: Any) -> None:
        super().__init__(ctypes.sizeof(self), *members, **named)


class KvCacheConfig(Args):  # kvlab_kv_cache_config
    _fields_ = [
        ("struct_size", SIZE),
        ("type", I32),
        *((name, I32) for name in ("query_heads", "kv_heads", "head_size")),
        *((name, I32) for name in ("sequences", "layer_count", "rope_count", "tier_count", "feature_count")),
        *((name, P) for name in ("layers", "ropes", "policy", "rules", "tiers", "params", "seeds", "features")),
        ("hidden", I32),
        ("numbering", I32),
        *((name, U32) for name in ("threshold16", "tokens", "part", "longest", "every", "smooth")),
        *((name, I32) for name in ("once", "by_layer", "pool_max", "interleaves_appends")),
        ("first_head", U32),
        ("devices", I32),
        ("gather", P),
        ("gather_context", P),
        ("pages", Pages),
        ("draft_tokens", U32),
    ]


class AppendChunk(Args):  # kvlab_append_chunk
    _fields_ = [
        ("struct_size", SIZE),
        ("sequence", I32),
        ("layer", I32),
        ("fed", U32),
        ("tokens", U32),
        ("ends_prompt", I32),
        ("first", U32),
        ("count", U32),
        ("qkv", P),
        ("out", P),
        ("lse", P),
    ]


class SequenceSettings(Args):  # kvlab_sequence_settings
    _fields_ = [
        ("struct_size", SIZE),
        *((name, P) for name in ("rules", "params", "seed", "sequence_id", "threshold16")),
    ]


class SequenceInfo(Args):  # kvlab_sequence_info
    _fields_ = [("struct_size", SIZE), ("tokens", U32), *((name, U64) for name in ("evictions", "kv_bytes", "allocated")), ("until_eviction", U32)]


STRUCTS = {
    "kvlab_pages": Pages,
    "kvlab_rope": Rope,
    "kvlab_layer": Layer,
    "kvlab_kv_cache_config": KvCacheConfig,
    "kvlab_append_chunk": AppendChunk,
    "kvlab_sequence_settings": SequenceSettings,
    "kvlab_sequence_info": SequenceInfo,
}


def _pointer(struct: Any) -> Any:
    return ctypes.POINTER(struct)


_TEXT = ctypes.c_char_p
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "kvlab_version": (I32, []),
    "kvlab_last_error": (_TEXT, []),
    "kvlab_find_policy": (P, [_TEXT]),
    "kvlab_policy_name": (_TEXT, [I32]),
    "kvlab_policy_params_bytes": (SIZE, [P]),
    "kvlab_policy_params": (I32, [P, P, I32, P]),
    "kvlab_kv_cache_memory": (I32, [_pointer(KvCacheConfig), P]),
    "kvlab_kv_cache_create": (I32, [_pointer(KvCacheConfig), P, P]),
    "kvlab_kv_cache_destroy": (None, [P]),
    "kvlab_kv_cache_clear": (I32, [P, P]),
    "kvlab_kv_cache_start": (I32, [P, I32, _pointer(SequenceSettings), P]),
    "kvlab_kv_cache_copy": (I32, [P, I32, I32, P]),
    "kvlab_kv_cache_append": (I32, [P, _pointer(AppendChunk), P]),
    "kvlab_kv_cache_begin_step": (I32, [P, P, P]),
    "kvlab_kv_cache_step": (I32, [P, I32, P, P, P, P]),
    "kvlab_kv_cache_begin_drafts": (I32, [P, P, P]),
    "kvlab_kv_cache_verify_drafts": (I32, [P, I32, P, P, P, P]),
    "kvlab_kv_cache_accept_drafts": (I32, [P, P, P]),
    "kvlab_kv_cache_sequence_info": (I32, [P, I32, _pointer(SequenceInfo)]),
    "kvlab_kv_cache_positions": (I32, [P, I32, I32, I32, P, U32, P, P]),
}


@functools.cache
def library() -> Any:
    """Loads the kernel library on the first call: the file that the environment variable KVLAB_KERNELS names, or else
    the one in the package.

    Raises RuntimeError if there is no such file, or if it belongs to another version.
    """
    path = pathlib.Path(os.environ.get("KVLAB_KERNELS") or pathlib.Path(__file__).with_name("libkvlab_kernels.so"))
    if not path.exists():
        raise RuntimeError(
            f"{path}: there is no kernel library; install a wheel that `make_wheel.sh --cuda` made, run `KVLAB_CUDA=1 "
            "pip install .` in the checkout, or set KVLAB_KERNELS to the path of a library"
        )
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path}: cannot be loaded as the kernel library of this version: {error}") from None
    if loaded.kvlab_version() != VERSION:
        raise RuntimeError(
            f"{path}: is version {loaded.kvlab_version()} of the kernel library; this package needs "
            f"{VERSION}"
        )
    return loaded


def done(error: int) -> None:
    """Raises ValueError or RuntimeError if a call returned an error code."""
    if error:
        raise (ValueError if error == INVALID_VALUE else RuntimeError)(library().kvlab_last_error().decode())


def policy(name: str) -> Any:
    """Returns the library's handle of a policy. Raises ValueError if the library does not contain the policy."""
    handle = library().kvlab_find_policy(name.encode())
    if not handle:
        known = ", ".join(policies())
        raise ValueError(f"policy {name}: is not in the kernel library, which has {known}")
    return handle


def params(handle: Any, values: list[float]) -> Any:
    """Returns the policy's parameters for one sequence, in the layout that the kernels read."""
    to = ctypes.create_string_buffer(library().kvlab_policy_params_bytes(handle))
    given = (ctypes.c_double * len(values))(*values)
    if library().kvlab_policy_params(handle, given, len(values), to):
        right = f"it takes {len(to) // 8} numbers, each within its range"
        raise ValueError(f"{values} are not valid parameters of the policy; {right}")
    return to


def policies() -> list[str]:
    """Names of the policies in the library."""
    found: list[str] = []
    while name := library().kvlab_policy_name(len(found)):
        found.append(name.decode())
    return found
