"""Writes traces from arrays in memory, for models that no capture supports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab

_MAX_SIZE, _MAX_TOKENS = 65_536, 2**31 - 1  # the limits of traces/manifest.hpp


def write_arrays(
    folder: str, q: Any, k: Any, v: Any, ids: Any, config: Any, prompt_tokens: Any, segments: Any
) -> None:
    """Writes the trace of Trace.from_arrays(). Computes attention outputs only for the queries that the verification of
    a trace recomputes."""
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
        raise ValueError(f"config: rows has {len(rows)} entries; one for each of {layers} layers is expected")
    sizes = {"layers": layers, "query_heads": query_heads, "kv_heads": k.shape[1], "head_size": head_size}
    header = {
        "model": _arguments.text("config: name", settings.get("name", "arrays")),
        "config": sizes | {"dtype": _dtype(q), "rope": {"rope_type": "default"}},
        "rounding": "none" if _dtype(q) == "float32" else "model_dtype",
        "weights_xxh3": "",
        "tokenizer_xxh3": "",
        "capture": {"engine": "arrays", "version": _kvlab.version, "device": "cpu", "options": {}},
        "spans": [],
    }
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


def _kinds(segments: Any, tokens: int) -> dict[int, bool]:
    """First token of each segment -> whether the segment is a prompt."""
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
            raise ValueError(f"{what}; (tokens, 'prompt' or 'decode') is expected, and the first must be a prompt")
        kinds[begin] = kind == "prompt"
        begin += count
    if begin != tokens:
        raise ValueError(f"segments: they add up to {begin} tokens; {tokens} are expected")
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
    """A writer for a model of `layers` layers. If all layers are in the trace and attend in the same way, without
    window, softcap or sinks, it writes the older format, which older versions of kvlab can read."""
    if all(row == rows[0] and not any(map(row.get, ("span", "softcap", "sink"))) for row in rows) and numbers == list(
        range(layers)
    ):
        return _kvlab.TraceWriter(folder, header, inv_freq[0], factors[0], rows[0].get("scale", scale))
    return _kvlab.TraceWriter(folder, header, inv_freq, factors, scale, rows, numbers)


def _outputs(arrays: Mapping[str, Any], layer: int, arithmetic: Any, row: dict[str, Any], checked: list[int]) -> Any:
    """[checked, query_heads, head_size]: attention outputs of the queries at positions `checked`."""
    parts = {name: _floats(array[layer]) for name, array in arrays.items()}
    for name, values in parts.items():
        if not (finite := numpy.isfinite(values)).all():
            raise ValueError(f"{name}: layer {layer} holds {values[~finite][0]}; finite numbers are expected")
    dtype = _dtype(arrays["q"])
    return _kvlab.attention_outputs(parts["q"], parts["k"], parts["v"], *arithmetic, dtype, checked, row)


class _Config:
    """The `config` argument of from_arrays, checked."""

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
            raise _arguments.refuse("config: inv_freq", given, right + ", not empty; a frequency of 0 does not rotate")
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
        """A dict for each layer, with Python numbers, as the extension takes them."""
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
    """Refuses sizes out of range before anything of those sizes is allocated."""
    for name, size in sizes.items():
        most = _MAX_TOKENS if name == "tokens" else _MAX_SIZE
        if not 1 <= size <= most:
            raise ValueError(f"q, k, v: {name}: {size} should be between 1 and {most}")


def _exported(array: Any, name: str) -> Any:
    """The array [layers, heads, tokens, head_size] as a PyTorch tensor on the CPU, or else as a numpy array."""
    if isinstance(array, (list, tuple)):
        try:
            array = numpy.asarray(array)
        except ValueError:
            shape = "[layers, heads, tokens, head_size]"
            raise ValueError(f"{name}: its lists have different lengths; {shape} is expected") from None
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    elif not isinstance(array, numpy.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise ValueError(f"{name}: has type {type(array).__name__}; an array of numpy or DLPack is expected")
        array = numpy.asarray(array) if hasattr(array, "__array__") else numpy.from_dlpack(array)
    if _dtype(array) not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"{name}: has dtype {_dtype(array)}; convert it to float32, float16 or bfloat16")
    if array.ndim != 4:
        raise ValueError(f"{name}: has {array.ndim} dimensions; [layers, heads, tokens, head_size] is expected")
    return array


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _floats(array: Any) -> numpy.typing.NDArray[numpy.float32]:
    return numpy.ascontiguousarray(array.float().numpy() if hasattr(array, "detach") else array, dtype=numpy.float32)


def _check_alike(name: str, array: Any, other: str, like: Any, heads_differ: bool) -> None:
    def alike(one: Any) -> list[Any]:
        return [_dtype(one), one.shape[0], *one.shape[1 + heads_differ :]]

    if alike(array) != alike(like):
        same = f"one dtype, and the same layers, {'' if heads_differ else 'heads, '}tokens and head size are expected"
        raise ValueError(f"{name}: {list(array.shape)} does not match {other} {list(like.shape)}; {same}")


def _ids(ids: Any, tokens: int) -> list[int]:
    try:
        array = numpy.asarray(ids).reshape(-1)
    except (TypeError, ValueError):
        raise _arguments.refuse("ids", ids, "a list of whole numbers") from None
    if not numpy.issubdtype(array.dtype, numpy.integer):
        raise ValueError(f"ids: has dtype {array.dtype}; whole numbers are expected")
    if len(array) and (array.min() < 0 or array.max() > 0x7FFFFFFF):
        raise ValueError("ids: an id is negative or above 2**31 - 1")
    if len(array) != tokens:
        raise ValueError(f"ids: has {len(array)} ids for {tokens} tokens; one id for each token is expected")
    return [int(i) for i in array]
