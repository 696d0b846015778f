"""Traces: the queries, keys and values of one sequence."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab
from kvlab._accesses import accesses_of
from kvlab._arrays import selected_layers, write_arrays, write_selections
from kvlab._old_names import renamed

Floats = numpy.typing.NDArray[numpy.float32]

MAX_THREADS, MAX_TOKENS = 1024, 2**31 - 1


def _index(name: str, value: Any) -> int:
    """Checks the number of a layer or a head. The extension checks the upper limit."""
    return _arguments.whole(name, value, 0, MAX_TOKENS)


class Trace:
    """A finished trace: the queries, keys and values of one sequence, mapped from its folder into memory."""

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, threads: int | None = None) -> None:
        """Opens the trace in the folder `path` and verifies it.

        Verification compares the checksums of all files, and recomputes a sample of the attention outputs.
        `verify=False` skips it. `threads`: number of CPU threads for it, by default one for each core. Raises
        RuntimeError if the folder is not a finished trace, or if the verification fails.
        """
        verify = _arguments.flag("verify", verify)
        threads = None if threads is None else _arguments.whole("threads", threads, 1, MAX_THREADS)
        self._held = _kvlab.Trace.open(_arguments.path("path", path), verify, threads)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        k: Any,
        v: Any,
        ids: Any = None,
        config: Mapping[str, Any] | Any = None,
        *,
        prompt_tokens: int | None = None,
        segments: Sequence[tuple[int, str]] | None = None,
        out: str | os.PathLike[str] | None = None,
    ) -> Trace:
        """Makes a trace from arrays.

        >>> trace = kvlab.Trace.from_arrays(q, k, v, config={"rope_theta": 10000.0}, prompt_tokens=100)

        `q` [layers, query_heads, tokens, head_size], `k` and `v` [layers, kv_heads, tokens, head_size], before RoPE.
        Their type is float32, float16 or bfloat16. They come from numpy, PyTorch or anything that supports DLPack, with
        any strides.

        `ids` [tokens]: token ids, zeros by default.

        `config`: a mapping or an object with some of these entries: `rope_theta` (default 10000), or `inv_freq` and
        `rope_factor` for another RoPE; `softmax_scale` (default head_size ** -0.5); `name`. If layers attend in
        different ways, also `rows`, a list in the form of `Trace.rows`; `inv_freq` and `rope_factor` then have an entry
        for each value of `rope`. If only some layers of the model are given, also `layer_numbers`. A config of
        transformers works if its RoPE is the default one.

        `prompt_tokens`: length of the prompt in tokens; the other tokens are decoded one by one. For several turns give
        `segments` instead: a list of (number of tokens, "prompt" or "decode") in order, a prompt first.

        `out`: a new folder for the trace. Without it the trace is in a temporary folder, which is removed together with
        the returned object.

        Raises ValueError if arrays do not fit together or are not finite.
        """
        return cls._written(out, lambda path: write_arrays(path, q, k, v, ids, config, prompt_tokens, segments))

    @classmethod
    def from_selections(
        cls,
        selected: Any,
        *,
        head_size: int,
        prompt_tokens: int | None = None,
        segments: Sequence[tuple[int, str]] | None = None,
        queries: Literal["decode", "all"] = "decode",
        ids: Any = None,
        name: str = "selections",
        layer_numbers: Sequence[int] | None = None,
        out: str | os.PathLike[str] | None = None,
    ) -> Trace:
        """Makes a trace that has only selections: the tokens that an engine with sparse attention selected.

        >>> trace = kvlab.Trace.from_selections(selected, head_size=128, prompt_tokens=4096)
        >>> run = kvlab.replay(trace, ["lru", "sieve"], [4096, 8192], refetch="logged")

        `selected` [layers, kv_heads, queries, K]: the positions in the text of the tokens that each query selected, K
        at most. They may be in any order, from 0 up to the position of the query itself; -1 fills unused entries. The
        array has integers and comes from numpy or PyTorch. It has only the layers in which the engine selects; layers
        with a sliding window cannot be given. An engine with one latent cache for all heads (MLA) has one KV head.

        `head_size`: elements of a key, and of a value. The metric `fetch_bytes` counts both in 16 bit.

        `queries`: the queries for which `selected` has entries: those of decoded tokens, or all. `prompt_tokens` and
        `segments`: as in from_arrays. `ids` [tokens]: token ids, by default random numbers that depend on `selected`,
        because traces with the same ids count as one text. `name`: the model's name. `layer_numbers`: the model's
        numbers of the layers, 0, 1, 2, ... by default. `out`: as in from_arrays.

        Raises ValueError if the arrays do not fit together, or if a query selects a token twice or a token after
        itself.
        """
        _arguments.one_of("queries", queries, "decode", "all")
        return cls._written(
            out,
            lambda path: write_selections(
                path, selected, head_size, prompt_tokens, segments, queries, ids, name, layer_numbers
            ),
        )

    @classmethod
    def _written(cls, out: str | os.PathLike[str] | None, write: Callable[[str], None]) -> Trace:
        """Opens the trace that `write` writes to `out`, or else to a temporary folder."""
        folder = None
        if out is None:
            folder = tempfile.TemporaryDirectory(prefix="kvlab-")
            out = os.path.join(folder.name, "trace")
        out = _arguments.path("out", out)
        write(out)
        trace = cls(out)
        trace._folder = folder
        return trace

    def read(self, part: Literal["q", "k", "v"], layer: int, head: int) -> Floats:
        """Copies one head's queries, keys or values before RoPE: float32 [tokens, head_size].

        `layer`: the model's number of the layer. `head`: a query head if `part` is "q", otherwise a KV head. Raises
        ValueError if the trace has no such head.
        """
        _arguments.one_of("part", part, "q", "k", "v")
        return self._held.read(part, _index("layer", layer), _index("head", head))

    def feature(self, name: str, layer: int, kv_head: int) -> Floats:
        """Copies a token feature that is stored beside the trace: float32 [tokens] of one KV head.

        Raises ValueError if the trace has no such feature or head.
        """
        return self._held.feature(_arguments.text("name", name), _index("layer", layer), _index("kv_head", kv_head))

    def add_feature(self, name: str, values: Any) -> None:
        """Stores a token feature in the trace's folder, so that policies can read the feature.

        >>> trace.add_feature("my_score", scores)   # then: kvlab.replay(trace, "feature:name=my_score", 128)

        `values` [layers, kv_heads, tokens], stored as float32. Replaces a feature of the same name. Raises ValueError
        if the shape does not fit.
        """
        name = _arguments.text("name", name)
        try:
            layers = [numpy.ascontiguousarray(layer, numpy.float32) for layer in values]
        except (TypeError, ValueError, OverflowError):
            raise _arguments.refuse("values", values, "numbers, [kv_heads, tokens] for each layer") from None
        try:
            _kvlab.add_feature(self._held, name, layers)
        except ValueError as error:
            raise ValueError(f"{self.path}: feature {_arguments.brief(name)}: {error}") from None
        self._held = _kvlab.Trace.open(self.path, False, None)

    def selected(self, layer: int, kv_head: int) -> numpy.typing.NDArray[numpy.int32]:
        """Copies the selections of a KV head: int32 [queries, K], each row ascending and filled with -1.

        Raises ValueError if the trace has no selections, or no such head.
        """
        return self._held.selected(_index("layer", layer), _index("kv_head", kv_head))

    def add_selections(self, selected: Any, *, queries: Literal["decode", "all"] = "decode") -> None:
        """Stores the tokens that an engine selected in the trace's folder, for replays with `refetch="logged"`.

        >>> trace.add_selections(selected)

        `selected` [layers without a sliding window, kv_heads, queries, K], and `queries`: as in from_selections.
        Replaces the selections that the trace already has. Raises ValueError if `selected` does not fit the trace.
        """
        _arguments.one_of("queries", queries, "decode", "all")
        try:
            _kvlab.add_selections(self._held, queries, selected_layers(selected))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        self._held = _kvlab.Trace.open(self.path, False, None)

    def attention(self, layer: int, head: int, first: int = 0, count: int | None = None) -> Floats:
        """Computes a query head's attention probabilities in the full cache: float32 [count, tokens].

        Row i has the probabilities of the query at position `first + i`. If `count` is None, the last row is that of
        the last query. Raises ValueError if the trace has no such queries.
        """
        count = None if count is None else _arguments.whole("count", count, 1, MAX_TOKENS)
        first = _arguments.whole("first", first, 0, MAX_TOKENS)
        return self._held.attention(_index("layer", layer), _index("head", head), first, count)

    @renamed(span="queries")
    def accesses(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        top_k: int | None = None,
        request_threshold: float = 0.01,
        queries: Literal["decode", "all"] = "decode",
    ) -> numpy.typing.NDArray[Any]:
        """Lists which tokens the queries request, as records of libCacheSim's format oracleGeneral.

        >>> requests = trace.accesses("requests.bin", layer=1, head=1)

        A query requests an earlier token if a query head of the KV head gives the token at least `request_threshold`
        times the query's largest attention. With `top_k`, a query requests the `top_k` most probable tokens of each
        query head instead, of which one may be its own token. The record after a query's requests is the first access
        to the query's own token, which is written to the cache then.

        `out`: also write the records to this file. `layer`, `head` (a KV head): list only the requests of this layer or
        head. By default the records have those of all, as if one cache held the tokens of all KV heads. With
        `queries="decode"`, the prompt's tokens are accessed only when they are written, because their queries request
        nothing.

        Returns a structured array, sorted by `time`, then `object`. `time`: position of the query. `object`: (layer *
        kv_heads + head) * 2**32 + position of the token. `size`: 1, so that cache sizes are in tokens. `next`: number,
        from 1 on, of the next access to the same object; -1 if there is none.
        """
        return accesses_of(self._held, out, layer, head, top_k, request_threshold, queries)

    def to_dict(self, framework: Literal["numpy", "torch"] = "numpy") -> dict[str, list[Any]]:
        """Maps the tensors of the trace's files, without a copy.

        >>> parts = trace.to_dict()["layers.0.k"]

        Keys are `layers.{l}.q`, `.k`, `.v` (before RoPE) and so on. A value is a list with one array [heads, tokens,
        head_size] for each shard. Writing to an array changes no file, because the files are mapped privately. Raises
        ValueError for a bfloat16 trace unless `framework="torch"`, because numpy has no bfloat16.
        """
        _arguments.one_of("framework", framework, "numpy", "torch")
        if framework == "numpy" and self.dtype == "bfloat16":
            raise ValueError("to_dict: numpy has no bfloat16; give framework='torch', or read(), which returns float32")
        tensors: dict[str, list[Any]] = {}
        for file in self._held.shard_files:
            for name, array in mapped_tensors(file).items():
                tensors.setdefault(name, []).append(array if framework == "numpy" else _as_torch(array))
        return tensors

    @property
    def path(self) -> str:
        """The trace's folder."""
        return self._held.path

    @property
    def name(self) -> str:
        """The name that results use."""
        return self._held.name

    @property
    def hash(self) -> str:
        """XXH3-64 of the manifest, which contains the XXH3-64 of every file."""
        return self._held.hash

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self._held.tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._held.prompt_tokens

    @property
    def layers(self) -> int:
        """Number of layers in the trace."""
        return self._held.layers

    @property
    def query_heads(self) -> int:
        """Query heads of a layer."""
        return self._held.query_heads

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return self._held.kv_heads

    @property
    def head_size(self) -> int:
        """Elements of one query, key or value."""
        return self._held.head_size

    @property
    def dtype(self) -> str:
        """Element type: "float32", "float16" or "bfloat16"."""
        return self._held.dtype

    @property
    def ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """[tokens]: token ids."""
        return self._held.ids

    @property
    def inv_freq(self) -> Floats:
        """RoPE frequencies: [rotated / 2], or [tables, rotated / 2] if layers differ."""
        return self._held.inv_freq

    @property
    def layer_numbers(self) -> list[int]:
        """The model's numbers of the layers in the trace, which are those with a KV cache."""
        return self._held.layer_numbers

    @property
    def rows(self) -> list[dict[str, Any]]:
        """How each layer attends, a dict for each layer.

        `span`: length of the sliding window in tokens, 0 for none. `softcap`: 0 for none. `rope`: row of `inv_freq`.
        `scale`: softmax scale. `sink`: a list with a sink logit for each query head, or None.
        """
        return self._held.rows

    @property
    def segments(self) -> list[tuple[int, int, str]]:
        """The segments in order: (start, tokens, "prompt" or "decode")."""
        return self._held.segments

    @property
    def model(self) -> dict[str, Any]:
        """The manifest's description of the model and of the capture."""
        known: dict[str, Any] = json.loads(self._held.model_json)
        return known

    def __repr__(self) -> str:
        return (
            f"<kvlab.Trace {self.path}: {self.tokens} tokens ({self.prompt_tokens} of the prompt), {self.layers} layers "
            f"of {self.query_heads} query and {self.kv_heads} KV heads of {self.head_size}, {self.dtype}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self._folder is not None:
            raise TypeError("a trace in a temporary folder cannot be pickled; give from_arrays(…, out=FOLDER)")
        return (_reopened, (os.path.abspath(self.path), self.hash))


def _reopened(path: str, expected: str) -> Trace:
    trace = Trace(path, verify=False)
    if trace.hash != expected:
        raise ValueError(f"{path}: is not the trace that was pickled (its hash is {trace.hash}, not {expected})")
    return trace


_DTYPES: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}


def mapped_tensors(path: str) -> dict[str, Any]:
    """Maps the tensors of a safetensors file, by name. A BF16 tensor is a tuple (bits as uint16,)."""
    data = numpy.memmap(path, numpy.uint8, mode="c")
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    tensors: dict[str, Any] = {}
    for name, entry in header.items():
        if entry.get("dtype") not in _DTYPES:  # __metadata__, and packed tensors of checkpoints
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        array = numpy.asarray(data[begin:end]).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (array,) if entry["dtype"] == "BF16" else array
    return tensors


def rope_factor(path: str, table: int) -> float:
    """The factor on cos and sin of a trace's RoPE table."""
    return float(mapped_tensors(os.path.join(path, "tokens.safetensors"))["rope_factor"][table])


def _as_torch(array: Any) -> Any:
    import torch

    if isinstance(array, tuple):
        return torch.from_numpy(array[0].view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
