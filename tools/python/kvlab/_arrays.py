"""Traces of tensors that are in memory: for models that no capture reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import numpy.typing

from kvlab import _kvlab


def write_arrays(
    folder: str, q: Any, k: Any, v: Any, ids: Any, config: Any, segments: Sequence[tuple[int, str]] | int | None
) -> None:
    """Writes the trace of Trace.from_arrays. The rows that a verifier looks at are computed here."""
    arrays = {name: _exported(array, name) for name, array in (("q", q), ("k", k), ("v", v))}
    q, k, v = arrays.values()
    _check_alike("k", k, "q", q, True)
    _check_alike("v", v, "k", k, False)
    layers, query_heads, tokens, head_size = q.shape
    fed = _ids(numpy.zeros(tokens, numpy.int64) if ids is None else ids, tokens)
    kinds = _kinds(segments, tokens)
    settings = _Config(config)
    factors = [float(factor) for factor in numpy.atleast_1d(settings.get("rope_factor", 1.0))]
    scale = float(settings.get("softmax_scale", 1 / math.sqrt(head_size)))
    arithmetic = (settings.inv_freq(head_size), factors, scale)
    rows = list(settings.get("rows") or [{}] * layers)
    if len(rows) != layers:
        raise ValueError(f"config: {len(rows)} rows; one for each of {layers} layers is expected")
    sizes = {"layers": layers, "query_heads": query_heads, "kv_heads": k.shape[1], "head_size": head_size}
    header = {
        "model": settings.get("name", "arrays"),
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
    numbers = list(settings.get("layer_numbers") or range(layers))
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


def _kinds(segments: Sequence[tuple[int, str]] | int | None, tokens: int) -> dict[int, bool]:
    """Where a segment begins, and whether it is a prompt's. A number: the tokens of one prompt, before decoded ones."""
    if isinstance(segments, int):
        if not 1 <= segments <= tokens:
            raise ValueError(f"prompt_tokens: {segments} should be between 1 and {tokens}")
        segments = [(segments, "prompt")] + [(tokens - segments, "decode")] * (segments < tokens)
    if not segments:
        raise ValueError("prompt_tokens or segments is missing; one of them is expected")
    kinds, begin = {}, 0
    for count, kind in segments:
        if kind not in ("prompt", "decode") or count < 1 or (begin == 0 and kind == "decode"):
            what = f"segments: {(count, kind)} at token {begin}"
            raise ValueError(f"{what}; (tokens, 'prompt' or 'decode') is expected, and a prompt first")
        kinds[begin] = kind == "prompt"
        begin += count
    if begin != tokens:
        raise ValueError(f"segments: they come to {begin} tokens; {tokens} are expected")
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
    """Of a model of so many layers: where all attend alike and plainly, as older readers take it."""
    if all(row == rows[0] and not any(map(row.get, ("span", "softcap", "sink"))) for row in rows) and numbers == list(
        range(layers)
    ):
        return _kvlab.TraceWriter(folder, header, inv_freq[0], factors[0], rows[0].get("scale", scale))
    return _kvlab.TraceWriter(folder, header, inv_freq, factors, scale, rows, numbers)


def _outputs(arrays: Mapping[str, Any], layer: int, arithmetic: Any, row: dict[str, Any], checked: list[int]) -> Any:
    """[checked, query_heads, head_size]: what attention puts out there."""
    parts = {name: _floats(array[layer]) for name, array in arrays.items()}
    for name, values in parts.items():
        if not (finite := numpy.isfinite(values)).all():
            raise ValueError(f"{name}: layer {layer} holds {values[~finite][0]}; finite numbers are expected")
    dtype = _dtype(arrays["q"])
    return _kvlab.attention_outputs(parts["q"], parts["k"], parts["v"], *arithmetic, dtype, checked, row)


class _Config:
    """What from_arrays needs to know of a model."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self._config, Mapping):
            return self._config.get(name, default)
        return getattr(self._config, name, default)

    def inv_freq(self, head_size: int) -> list[list[float]]:
        """By table."""
        given = self.get("inv_freq")
        if given is not None:
            return [[float(x) for x in table] for table in numpy.atleast_2d(given)]
        scaling = self.get("rope_scaling")
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
        if kind not in (None, "default"):
            raise ValueError(f"config: rope_scaling {kind} is not computed here; give inv_freq and rope_factor")
        theta = float(self.get("rope_theta") or (scaling or {}).get("rope_theta") or 10000.0)
        return [[float(theta ** (-2.0 * i / head_size)) for i in range(head_size // 2)]]


def _exported(array: Any, name: str) -> Any:
    """A tensor of PyTorch's, or else numpy's array: of [layers, heads, tokens, head_size]."""
    if isinstance(array, (list, tuple)):
        array = numpy.asarray(array)
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    elif not isinstance(array, numpy.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name}: a {type(array).__name__}; an array of numpy or of DLPack is expected")
        array = numpy.asarray(array) if hasattr(array, "__array__") else numpy.from_dlpack(array)
    if _dtype(array) not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"{name}: {_dtype(array)}; float32, float16 or bfloat16 is expected, so convert it first")
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
        raise ValueError(f"{name}: {list(array.shape)} does not go with {other} {list(like.shape)}; {same}")


def _ids(ids: Any, tokens: int) -> list[int]:
    array = numpy.asarray(ids).reshape(-1)
    if not numpy.issubdtype(array.dtype, numpy.integer):
        raise ValueError(f"ids: {array.dtype}; whole numbers are expected")
    if len(array) and (array.min() < 0 or array.max() > 0x7FFFFFFF):
        raise ValueError("ids: one is negative or beyond 31 bits")
    if len(array) != tokens:
        raise ValueError(f"ids: {len(array)} for {tokens} tokens; one for each is expected")
    return [int(i) for i in array]
