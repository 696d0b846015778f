"""The tokens that queries request, in the format of other cache simulators."""

from __future__ import annotations

import os
import pathlib
import secrets
from typing import Any, Literal

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab

# A record of libCacheSim's oracleGeneral: packed, little-endian, 24 bytes. The file has no header.
RECORD = numpy.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])


def accesses_of(
    trace: _kvlab.Trace,
    out: str | os.PathLike[str] | None,
    layer: int | None,
    head: int | None,
    top_k: int | None,
    request_threshold: float,
    queries: Literal["decode", "all"],
) -> numpy.typing.NDArray[Any]:
    """Computes what `Trace.accesses()` returns. That method documents the arguments."""
    max_value = 2**31 - 1
    _arguments.one_of("queries", queries, "decode", "all")
    top_k = None if top_k is None else _arguments.whole("top_k", top_k, 1, max_value)
    layer = None if layer is None else _arguments.whole("layer", layer, 0, max_value)
    head = None if head is None else _arguments.whole("head", head, 0, max_value)
    out = None if out is None else _arguments.path("out", out)
    request_threshold = _arguments.real("request_threshold", request_threshold, 0, 1)
    asking = [
        position
        for start, tokens, kind in trace.segments
        if queries == "all" or kind == "decode"
        for position in range(start, start + tokens)
    ]
    layers = trace.layer_numbers if layer is None else [layer]
    heads = range(trace.kv_heads) if head is None else [head]
    written = numpy.arange(trace.tokens, dtype="u4")  # each token is written at its own position
    times, objects = [], []
    for one in layers:
        for kv_head in heads:
            requested, tokens = trace.accesses(one, kv_head, top_k, request_threshold, asking)
            times += [requested, written]
            place = numpy.uint64((one * trace.kv_heads + kv_head) << 32)
            objects += [tokens.astype("u8") | place, written.astype("u8") | place]
    records = _in_order(numpy.concatenate(times), numpy.concatenate(objects))
    if out is not None:
        path = pathlib.Path(out)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # an unpredictable name
        part.touch(exist_ok=False)
        try:
            records.tofile(part)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    return records


def _in_order(times: numpy.typing.NDArray[Any], objects: numpy.typing.NDArray[Any]) -> numpy.typing.NDArray[Any]:
    """Records sorted by time, then object. `next` is the number of the next access to the same object. Accesses are
    numbered from 1 on; -1 means that there is no next access."""
    order = numpy.lexsort((objects, times))
    records = numpy.zeros(len(order), RECORD)
    records["time"], records["object"], records["size"] = times[order], objects[order], 1
    by_object = numpy.argsort(records["object"], kind="stable")
    same = records["object"][by_object][:-1] == records["object"][by_object][1:]
    records["next"] = -1
    records["next"][by_object[:-1][same]] = by_object[1:][same] + 1
    return records
