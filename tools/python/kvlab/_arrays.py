"""Writes traces from arrays in memory, for models that no capture supports."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab

_MAX_SIZE, _MAX_TOKENS = 65_536, 2**31 - 1  # the limits of traces/manifest.hpp


def write_arrays(
    folder: str, q: Any, k: Any, v: Any, ids: Any, config: Any, prompt_tokens: Any, segments: Any
) -> None:
    """Writes the trace of Trace.from_arrays(). A trace is verified by recomputing the attention outputs of some
    queries, so only the outputs of these queries are computed here."""
    arrays = {name: _exported(array, name) for name, array in (("q", q), ("k", k), ("v", v))}
    q, k, v = arrays.values()
    _check_alike("k", k, "q", q, True)
    _check_alike("v", v, "k", k, False)
    layers, query_heads, tokens, head_size = q.shape
    _check_sizes(layers=layers, query_heads=query_heads, kv_heads=k.shape[1], tokens=tokens, head_size=head_size)
    fed = _ids(numpy.zeros(tokens, numpy.int64) if ids is None else ids, tokens)
    if prompt_tokens is not None:
        prompt_tokens = _arguments.whole("prompt_tokens", prompt_tokens, 1, tokens)
        segments = [(prompt_tokens, "prompt")] + [(tokens - prompt_tokens, "decode")] * (prompt_tokens < tokens)
    kinds = _kinds(segments, tokens)
    settings = _Config(config)
    arithmetic = (settings.inv_freq(head_size), settings.factors(), settings.scale(head_size))
    rows = settings.rows(layers)
    if len(rows) != layers:
        raise ValueError(
            f"config: rows has {len(rows)} entries, but there are {layers} layers; give one entry for "
            "each layer"
        )
    sizes = {"layers": layers, "query_heads": query_heads, "kv_heads": k.shape[1], "head_size": head_size}
    name = _arguments.text("config: name", settings.get("name", "arrays"))
    header = _header(name, sizes | {"dtype": _dtype(q)}, "arrays")
    starts = range(0, tokens, _kvlab.shard_tokens)
    ends = sorted({*kinds, *starts[1:]} - {0} | {tokens})
    checked = sorted({min(start + row, tokens - 1) for start in starts for row in _kvlab.check_grid()})
    outputs = [_outputs(arrays, layer, arithmetic, rows[layer], checked) for layer in range(layers)]
    numbers = settings.numbers(layers)
    writer = writer_of(folder, json.dumps(header), *arithmetic, rows, numbers, layers)
    try:
        prompt = True
        for start, end in zip([0, *ends], ends):
            prompt = kinds.get(start, prompt)
            writer.begin(fed[start:end], prompt, prompt and start in kinds)
            here = [i for i, position in enumerate(checked) if start <= position < end]
            for layer in range(layers):
                out = numpy.zeros((end - start, query_heads, head_size), numpy.float32)
                out[[checked[i] - start for i in here]] = outputs[layer][here]
                parts = {name: _floats(array[layer, :, start:end]).swapaxes(0, 1) for name, array in arrays.items()}
                writer.layer(layer, **parts, out=out)
            writer.end()
        writer.finish()
    finally:
        writer.close()


def write_selections(
    folder: str,
    selected: Any,
    head_size: Any,
    prompt_tokens: Any,
    segments: Any,
    queries: str,
    ids: Any,
    name: Any,
    layer_numbers: Any,
) -> None:
    """Writes the trace of Trace.from_selections()."""
    layers = selected_layers(selected)
    kv_heads, rows = layers[0].shape[:2]
    _arguments.whole("selected: number of KV heads", kv_heads, 1, _MAX_SIZE)
    head_size = _arguments.whole("head_size", head_size, 1, _MAX_SIZE)
    if prompt_tokens is not None:
        prompt_tokens = _arguments.whole("prompt_tokens", prompt_tokens, 1, _MAX_TOKENS)
        decoded = rows if queries == "decode" else rows - prompt_tokens
        segments = [(prompt_tokens, "prompt")] + [(decoded, "decode")] * (decoded > 0)
    listed = _listed(segments)
    tokens = sum(count for count, _ in listed)
    fed = _ids(_ids_of(layers, tokens) if ids is None else ids, tokens)
    sizes = {"layers": len(layers), "query_heads": kv_heads, "kv_heads": kv_heads, "head_size": head_size}
    header = _header(_arguments.text("name", name), sizes | {"dtype": "bfloat16"}, "selections")
    numbers = _Config({} if layer_numbers is None else {"layer_numbers": layer_numbers}).numbers(len(layers))
    _kvlab.write_selections(folder, json.dumps(header), numbers, fed, listed, queries, layers)


def _ids_of(layers: list[numpy.typing.NDArray[numpy.int32]], tokens: int) -> numpy.typing.NDArray[numpy.int64]:
    """Random token ids that depend on the selections, so that different traces do not count as one text."""
    seed = 0
    for layer in layers:
        seed = zlib.crc32(layer.tobytes(), seed)
    return numpy.random.default_rng(seed).integers(0, 2**31 - 1, tokens)


def selected_layers(selected: Any) -> list[numpy.typing.NDArray[numpy.int32]]:
    """Converts the array [layers, kv_heads, queries, K] to a list with an int32 array [kv_heads, queries, K] for each
    layer."""
    shape = "whole numbers, [kv_heads, queries, K] for each layer"
    if hasattr(selected, "detach"):
        selected = selected.detach().cpu().numpy()
    layers = []
    for given in _arguments.items("selected", selected, shape):
        try:
            layer = numpy.asarray(given.detach().cpu().numpy() if hasattr(given, "detach") else given)
        except (TypeError, ValueError, OverflowError):
            raise _arguments.refuse("selected", given, shape) from None
        if layer.ndim != 3 or layer.dtype.kind not in "iu":
            found = f"layer {len(layers)} has dtype {layer.dtype} and {layer.ndim} dimensions"
            raise ValueError(f"selected: {found}; {shape} are expected")
        if layer.size and not (-(2**31) <= layer.min() and layer.max() < 2**31):
            raise ValueError(f"selected: layer {len(layers)} has a number outside int32; token positions are expected")
        layers.append(numpy.ascontiguousarray(layer, numpy.int32))
    if not layers:
        raise ValueError(f"selected: has no layers; {shape} are expected")
    return layers


def _header(name: str, config: dict[str, Any], engine: str) -> dict[str, Any]:
    """Returns the keys of the manifest that describe the model, if only the model's shape is known."""
    return {
        "model": name,
        "config": config | {"rope": {"rope_type": "default"}},
        "rounding": "none" if config["dtype"] == "float32" else "model_dtype",
        "weights_xxh3": "",
        "tokenizer_xxh3": "",
        "capture": {"engine": engine, "version": _kvlab.version, "device": "cpu", "options": {}},
        "spans": [],
    }


def _listed(segments: Any) -> list[tuple[int, bool]]:
    """Tokens of each segment, and whether it is a prompt."""
    listed = _arguments.items("segments", segments if segments is not None else [], "a list of (tokens, kind)")
    tokens = sum(one[0] for one in listed if isinstance(one, (list, tuple)) and one and isinstance(one[0], int))
    kinds = _kinds(segments, min(max(tokens, 0), _MAX_TOKENS))
    return [(end - start, kinds[start]) for start, end in zip(kinds, [*list(kinds)[1:], tokens])]


def _kinds(segments: Any, tokens: int) -> dict[int, bool]:
    """Returns a dict from the first token of each segment to whether the segment is a prompt."""
    if segments is None or not (listed := _arguments.items("segments", segments, "a list of (tokens, kind)")):
        raise ValueError("prompt_tokens and segments are missing; give one of them")
    kinds, begin = {}, 0
    for one in listed:
        pair = _arguments.items("segments", one, "(tokens, kind)")
        if len(pair) != 2 or not isinstance(pair[1], str):
            raise _arguments.refuse("segments", one, "(tokens, kind)")
        count, kind = _arguments.whole("segments", pair[0], 0, tokens), pair[1]
        if kind not in ("prompt", "decode") or count < 1 or (begin == 0 and kind == "decode"):
            what = f"segments: {(count, kind)} at token {begin}"
            raise ValueError(f"{what} is not valid; give (tokens, 'prompt') or (tokens, 'decode') with 1 token or more; the first segment must be a prompt")
        kinds[begin] = kind == "prompt"
        begin += count
    if begin != tokens:
        raise ValueError(
            f"segments: have {begin} tokens in all, but the arrays have {tokens}; list the segments of "
            "all tokens"
        )
    return kinds


def writer_of(
    folder: str,
    header: str,
    inv_freq: list[list[float]],
    factors: list[float],
    scale: float,
    rows: list[dict[str, Any]],
    numbers: list[int],
    layers: int,
) -> _kvlab.TraceWriter:
    """A writer for a model of `layers` layers. The writer uses the older format, which older versions of kvlab can
    read, if the trace has all layers and these attend in the same way, without a window, a softcap or sinks."""
    if all(row == rows[0] and not any(map(row.get, ("span", "softcap", "sink"))) for row in rows) and numbers == list(
        range(layers)
    ):
        table = rows[0].get("rope", 0)  # its format has one RoPE table, so tables that no layer uses are left out
        return _kvlab.TraceWriter(folder, header, inv_freq[table], factors[table], rows[0].get("scale", scale))
    return _kvlab.TraceWriter(folder, header, inv_freq, factors, scale, rows, numbers)


def _outputs(arrays: Mapping[str, Any], layer: int, arithmetic: Any, row: dict[str, Any], checked: list[int]) -> Any:
    """Computes the attention outputs [checked, query_heads, head_size] of the queries at positions `checked`."""
    parts = {name: _floats(array[layer]) for name, array in arrays.items()}
    for name, values in parts.items():
        if not (finite := numpy.isfinite(values)).all():
            raise ValueError(f"{name}: layer {layer} contains {values[~finite][0]}; all numbers must be finite")
    dtype = _dtype(arrays["q"])
    return _kvlab.attention_outputs(parts["q"], parts["k"], parts["v"], *arithmetic, dtype, checked, row)


class _Config:
    """The checked `config` argument of from_arrays."""

    _KNOWN = (
        "rope_theta", "inv_freq", "rope_factor", "softmax_scale", "name", "rows", "layer_numbers", "rope_scaling",
        "rope_parameters",
    )  # fmt: skip

    def __init__(self, config: Any) -> None:
        self._config = {} if config is None else config
        if isinstance(self._config, Mapping):
            # The JSON of a transformers config has many other keys, which are ignored.
            foreign = [key for key in self._config if key not in self._KNOWN]
            if foreign and not {"model_type", "architectures"} & set(self._config):
                raise ValueError(f"config: {_arguments.shown(foreign[0])} is not among {', '.join(self._KNOWN)}")
        elif not any(hasattr(self._config, key) for key in self._KNOWN):
            raise _arguments.refuse("config", config, f"a mapping, or an object, with some of {', '.join(self._KNOWN)}")

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self._config, Mapping):
            return self._config.get(name, default)
        return getattr(self._config, name, default)

    def inv_freq(self, head_size: int) -> list[list[float]]:
        """RoPE frequencies [tables][rotated / 2]."""
        given = self.get("inv_freq")
        if given is not None:
            return self._tables(given)
        scaling = self.get("rope_scaling") or self.get("rope_parameters")
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else scaling
        if kind not in (None, "default"):
            shown = kind if isinstance(kind, str) else _arguments.shown(kind)
            raise ValueError(f"config: rope_scaling {shown} is not supported; give inv_freq and rope_factor instead")
        theta = self.get("rope_theta")
        if theta is None and isinstance(scaling, Mapping):
            theta = scaling.get("rope_theta")
        base = _arguments.real("config: rope_theta", 10000.0 if theta is None else theta, 1e-30, 1e30)
        return [[float(base ** (-2.0 * i / head_size)) for i in range(head_size // 2)]]

    @staticmethod
    def _tables(given: Any) -> list[list[float]]:
        right = "a table of numbers, or one such table for each rope"
        try:
            tables = numpy.atleast_2d(numpy.asarray(given))
        except (TypeError, ValueError, OverflowError):
            raise _arguments.refuse("config: inv_freq", given, right) from None
        if tables.dtype.kind not in "iuf":
            raise _arguments.refuse("config: inv_freq", given, right)
        if tables.ndim != 2 or tables.size == 0:
            raise _arguments.refuse("config: inv_freq", given, right + ", and not empty; to rotate nothing, give [0.0]")
        return [[float(x) for x in table] for table in tables]

    def factors(self) -> list[float]:
        given = self.get("rope_factor", 1.0)
        if isinstance(given, Iterable) and not isinstance(given, str) and numpy.ndim(given) > 0:
            return _arguments.numbers("config: rope_factor", given)
        return [_arguments.real("config: rope_factor", given)]

    def scale(self, head_size: int) -> float:
        given = self.get("softmax_scale")
        return 1 / math.sqrt(head_size) if given is None else _arguments.real("config: softmax_scale", given)

    def rows(self, layers: int) -> list[dict[str, Any]]:
        """A dict with Python numbers for each layer, in the form that the extension takes."""
        given = self.get("rows")
        rows = [{}] * layers if given is None else _arguments.items("config: rows", given, "a list of mappings")
        return [_row(f"config: rows[{i}]", row) for i, row in enumerate(rows)]

    def numbers(self, layers: int) -> list[int]:
        given = self.get("layer_numbers")
        if given is None:
            return list(range(layers))
        listed = _arguments.items("config: layer_numbers", given, "a list of whole numbers")
        return [_arguments.whole("config: layer_numbers", one, 0, _MAX_SIZE - 1) for one in listed]


def _row(name: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise _arguments.refuse(name, row, "a mapping of span, softcap, rope, scale and sink")
    said: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("span", "rope"):
            said[key] = _arguments.whole(f"{name}: {key}", value, 0, _MAX_TOKENS)
        elif key in ("softcap", "scale"):
            said[key] = _arguments.real(f"{name}: {key}", value)
        elif key == "sink":
            said[key] = None if value is None else _arguments.numbers(f"{name}: sink", value)
        else:
            raise ValueError(f"rows: {json.dumps(key) if isinstance(key, str) else _arguments.shown(key)} "
                             "is not a known key; known are span, softcap, rope, scale and sink")  # fmt: skip
    return said


def _check_sizes(**sizes: int) -> None:
    """Refuses sizes that are out of range. Called before arrays of these sizes are allocated."""
    for name, size in sizes.items():
        max_value = _MAX_TOKENS if name == "tokens" else _MAX_SIZE
        if not 1 <= size <= max_value:
            raise ValueError(f"q, k, v: {name}: {size} should be between 1 and {max_value}")


def _exported(array: Any, name: str) -> Any:
    """The array [layers, heads, tokens, head_size] as a PyTorch tensor on the CPU, or else as a numpy array."""
    if isinstance(array, (list, tuple)):
        try:
            array = numpy.asarray(array)
        except ValueError:
            shape = "[layers, heads, tokens, head_size]"
            raise ValueError(f"{name}: its lists have different lengths; give an array of shape {shape}") from None
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    elif not isinstance(array, numpy.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise ValueError(
                f"{name}: has type {type(array).__name__}; give a numpy array, or an array that supports "
                "DLPack"
            )
        array = numpy.asarray(array) if hasattr(array, "__array__") else numpy.from_dlpack(array)
    if _dtype(array) not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"{name}: has dtype {_dtype(array)}; convert it to float32, float16 or bfloat16")
    if array.ndim != 4:
        raise ValueError(f"{name}: has {array.ndim} dimensions; its shape must be [layers, heads, tokens, head_size]")
    return array


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _floats(array: Any) -> numpy.typing.NDArray[numpy.float32]:
    return numpy.ascontiguousarray(array.float().numpy() if hasattr(array, "detach") else array, dtype=numpy.float32)


def _check_alike(name: str, array: Any, other: str, like: Any, heads_differ: bool) -> None:
    def alike(one: Any) -> list[Any]:
        return [_dtype(one), one.shape[0], *one.shape[1 + heads_differ :]]

    if alike(array) != alike(like):
        same = f"dtype, layers, {'' if heads_differ else 'heads, '}tokens and head size must be equal"
        raise ValueError(f"{name}: {list(array.shape)} does not match {other} {list(like.shape)}; {same}")


def _ids(ids: Any, tokens: int) -> list[int]:
    try:
        array = numpy.asarray(ids).reshape(-1)
    except (TypeError, ValueError):
        raise _arguments.refuse("ids", ids, "a list of whole numbers") from None
    if not numpy.issubdtype(array.dtype, numpy.integer):
        raise ValueError(f"ids: has dtype {array.dtype}; give whole numbers")
    if len(array) and (array.min() < 0 or array.max() > 0x7FFFFFFF):
        raise ValueError("ids: an id is negative or above 2**31 - 1; give the ids of the model's vocabulary")
    if len(array) != tokens:
        raise ValueError(f"ids: has {len(array)} ids for {tokens} tokens; give one id for each token")
    return [int(i) for i in array]
