"""Traces: queries, keys and values of one sequence."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab
from kvlab._accesses import accesses_of
from kvlab._arrays import write_arrays

Floats = numpy.typing.NDArray[numpy.float32]

MAX_THREADS, MAX_TOKENS = 1024, 2**31 - 1


def _index(name: str, value: Any) -> int:
    """Of a layer or a head; the extension says how many there are."""
    return _arguments.whole(name, value, 0, MAX_TOKENS)


class Trace:
    """A finished trace: a folder, mapped into memory and verified."""

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, threads: int | None = None) -> None:
        """Opens `path`. `verify=False` leaves out the checksums and the sampled rows."""
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
        """A trace of arrays before RoPE: q [layers, query_heads, tokens, head_size], k and v with KV heads.

        Arrays are numpy's or of anything that speaks DLPack (PyTorch's bfloat16 too), float32, float16 or bfloat16.
        `config`: a mapping, or an object with such attributes: `rope_theta` (10000), or `inv_freq` and `rope_factor`
        for any other RoPE; `softmax_scale` (head_size ** -0.5); `name`; where layers differ, `rows` as Trace.rows has
        them, with a table and a factor for each `rope`, and `layer_numbers`. `prompt_tokens`: of one prompt, behind
        which tokens are decoded one by one; or `segments`, (tokens, "prompt" or "decode") in order. `out` keeps the trace in a new folder;
        without it the trace lies in a temporary one, which goes with this handle.
        """
        folder = None
        if out is None:
            folder = tempfile.TemporaryDirectory(prefix="kvlab-")
            out = os.path.join(folder.name, "trace")
        out = _arguments.path("out", out)
        write_arrays(out, q, k, v, ids, config, prompt_tokens, segments)
        trace = cls(out)
        trace._folder = folder
        return trace

    def read(self, part: Literal["q", "k", "v"], layer: int, head: int) -> Floats:
        """[tokens, head_size] of one head before RoPE, widened to float32: a copy."""
        _arguments.one_of("part", part, "q", "k", "v")
        return self._held.read(part, _index("layer", layer), _index("head", head))

    def feature(self, name: str, layer: int, kv_head: int) -> Floats:
        """[tokens]: a feature that the trace brings."""
        return self._held.feature(_arguments.text("name", name), _index("layer", layer), _index("kv_head", kv_head))

    def add_feature(self, name: str, values: Any) -> None:
        """Adds a feature to the trace's folder, or replaces it: [layers, kv_heads, tokens], kept as float32."""
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

    def attention(self, layer: int, head: int, first: int = 0, count: int | None = None) -> Floats:
        """[count, tokens]: what query head `head` gives each token at queries `first` on, where nothing is evicted."""
        count = None if count is None else _arguments.whole("count", count, 1, MAX_TOKENS)
        first = _arguments.whole("first", first, 0, MAX_TOKENS)
        return self._held.attention(_index("layer", layer), _index("head", head), first, count)

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
        """Which tokens the queries ask for, as records of libCacheSim's oracleGeneral; `out`: also as that file.

        A query requests the earlier tokens that some query head of the KV head requests, or with `top_k` has among its
        so many most probable ones, the query's own token among them. Then its own token is written, which is an access
        too: a token's first. Without `layer` or `head`: of all of them, as one cache would see them.

        Records are sorted by time, then object. `time` is the query's position, `object` (layer * kv_heads + head) *
        2**32 + the token's position, `size` 1, so that caches are measured in tokens, `next` the number of the next
        access to the same, from 1 on, or -1. With queries="decode" the prompt's tokens are only written.
        """
        return accesses_of(self._held, out, layer, head, top_k, request_threshold, queries)

    def to_dict(self, framework: Literal["numpy", "torch"] = "numpy") -> dict[str, list[Any]]:
        """`layers.{l}.q`, `.k`, `.v` (before RoPE) and so on: for each name one array [heads, tokens, head_size] a shard.

        Nothing is copied: the arrays lie over the files, mapped privately, so that writing to them changes no file.
        A trace in bfloat16, which numpy has not, comes as torch's tensors.
        """
        _arguments.one_of("framework", framework, "numpy", "torch")
        if framework == "numpy" and self.dtype == "bfloat16":
            raise ValueError("to_dict: numpy has no bfloat16; ask for framework='torch', or read() widened heads")
        tensors: dict[str, list[Any]] = {}
        for file in self._held.shard_files:
            for name, array in mapped_tensors(file).items():
                tensors.setdefault(name, []).append(array if framework == "numpy" else _as_torch(array))
        return tensors

    @property
    def path(self) -> str:
        return self._held.path

    @property
    def name(self) -> str:
        return self._held.name

    @property
    def hash(self) -> str:
        """XXH3-64 of the manifest, which holds those of the files."""
        return self._held.hash

    @property
    def tokens(self) -> int:
        return self._held.tokens

    @property
    def prompt_tokens(self) -> int:
        return self._held.prompt_tokens

    @property
    def layers(self) -> int:
        return self._held.layers

    @property
    def query_heads(self) -> int:
        return self._held.query_heads

    @property
    def kv_heads(self) -> int:
        return self._held.kv_heads

    @property
    def head_size(self) -> int:
        return self._held.head_size

    @property
    def dtype(self) -> str:
        return self._held.dtype

    @property
    def ids(self) -> numpy.typing.NDArray[numpy.int32]:
        return self._held.ids

    @property
    def inv_freq(self) -> Floats:
        return self._held.inv_freq

    @property
    def layer_numbers(self) -> list[int]:
        """What the model calls its layers: those that have a KV cache."""
        return self._held.layer_numbers

    @property
    def rows(self) -> list[dict[str, Any]]:
        """How each layer's queries attend: `span` (0: all), `softcap` (0: none), `rope` (row of inv_freq), `scale`, `sink`."""
        return self._held.rows

    @property
    def segments(self) -> list[tuple[int, int, str]]:
        """(start, tokens, "prompt" or "decode") of each."""
        return self._held.segments

    @property
    def model(self) -> dict[str, Any]:
        """What is known of the model and of the capture."""
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
        raise ValueError(f"{path}: is another trace than the one that was pickled (hash {trace.hash}, not {expected})")
    return trace


_DTYPES: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}


def mapped_tensors(path: str) -> dict[str, Any]:
    """The tensors of a safetensors file by name, over the file's bytes. BF16 is (bits,), to be told apart."""
    data = numpy.memmap(path, numpy.uint8, mode="c")
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    tensors: dict[str, Any] = {}
    for name, entry in header.items():
        if entry.get("dtype") not in _DTYPES:  # __metadata__; of checkpoints: what is packed
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        array = numpy.asarray(data[begin:end]).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (array,) if entry["dtype"] == "BF16" else array
    return tensors


def _as_torch(array: Any) -> Any:
    import torch

    if isinstance(array, tuple):
        return torch.from_numpy(array[0].view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
