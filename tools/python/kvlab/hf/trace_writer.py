"""Writes kvlab traces from PyTorch, as docs/trace.md says. The writing half of a capture."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import safetensors
import safetensors.torch
import torch

from kvlab._files import unfinished
from kvlab.hf.models import Rope
from kvlab.hf.trace_files import Refused, sync, write_by_rename, write_manifest, xxh3_of

SHARD_TOKENS = 1024
CHECK_ROWS = 16
CHECK_GRID = [round(i * (SHARD_TOKENS - 1) / (CHECK_ROWS - 1)) for i in range(CHECK_ROWS)]
SKETCH = "output.safetensors"
LATEST = CHECK_ROWS  # the slot of the newest row's output, which a short shard ends with


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> str:
    return write_by_rename(path, lambda part: safetensors.torch.save_file(dict(tensors), part, metadata))


class TensorFile:
    """A safetensors file of known shapes, whose tensors are written one by one, in any order.

    It has its name from seal() on; what is not sealed is NAME.XXXXXXXX.part, which discard() removes.
    """

    NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

    def __init__(self, path: pathlib.Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        """`tensors`: name: (dtype, shape), in the order of the file."""
        self.path, self.part = path, unfinished(path)
        self.tensors, self.offsets, at = tensors, {}, 0
        header = {}
        for name, (dtype, shape) in tensors.items():
            end = at + math.prod(shape) * torch.empty((), dtype=dtype).element_size()
            header[name] = {"dtype": self.NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            self.offsets[name], at = at, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.data = 8 + len(text)
        self.file = open(self.part, "r+b")
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.truncate(self.data + at)

    def write(self, name: str, values: torch.Tensor) -> None:
        dtype, shape = self.tensors[name]
        assert values.dtype == dtype and tuple(values.shape) == tuple(shape), (name, values.shape)
        self.file.seek(self.data + self.offsets[name])
        self.file.write(values.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)

    def read(self, name: str) -> torch.Tensor:
        dtype, shape = self.tensors[name]
        self.file.seek(self.data + self.offsets[name])
        count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        return torch.frombuffer(bytearray(self.file.read(count)), dtype=dtype).view(shape)

    def seal(self) -> str:
        """Returns the checksum."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        checksum = xxh3_of(self.part)
        os.replace(self.part, self.path)
        sync(self.path.parent, os.O_RDONLY)
        return checksum

    def discard(self) -> None:
        self.file.close()
        self.part.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# The trace


class Shard:
    """The rows of one shard of up to 1024 tokens, on the devices that computed them.

    The buffers are used again for the next shard.
    """

    def __init__(self, layers: int) -> None:
        self.layers: list[dict[str, torch.Tensor]] = [{} for _ in range(layers)]

    def put(self, layer: int, part: str, row: int, values: torch.Tensor) -> None:
        """values [n, heads, head_size] go to rows row … row + n of q, k or v."""
        count, heads, size = values.shape
        buffer = self.layers[layer].get(part)
        if buffer is None:
            buffer = values.new_empty(heads, SHARD_TOKENS, size)
            self.layers[layer][part] = buffer
        buffer[:, row : row + count] = values.transpose(0, 1)

    def put_output(self, layer: int, row: int, values: torch.Tensor) -> None:
        """Keeps those of the outputs [n, query_heads, head_size] that may become check rows."""
        count, heads, size = values.shape
        kept = self.layers[layer].get("out")
        if kept is None:
            kept = torch.zeros(heads, CHECK_ROWS + 1, size, device=values.device)
            self.layers[layer]["out"] = kept
        for slot, at in enumerate(CHECK_GRID):
            if row <= at < row + count:
                kept[:, slot] = values[at - row]
        kept[:, LATEST] = values[count - 1]

    def put_residual(self, layer: int, row: int, norm2: torch.Tensor) -> None:
        """norm2 [n]: the squared norms of the residual stream behind the layer's attention."""
        kept = self.layers[layer].setdefault("residual", torch.zeros(SHARD_TOKENS, device=norm2.device))
        kept[row : row + len(norm2)] = norm2

    def tensors(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """What the shard's file holds if it ends after `count` tokens."""
        inside = [slot for slot in range(CHECK_ROWS) if CHECK_GRID[slot] < count]
        slots = inside + [LATEST] * (CHECK_ROWS - len(inside))
        rows = [first + (CHECK_GRID[slot] if slot != LATEST else count - 1) for slot in slots]
        tensors = {"check_rows": torch.tensor(rows, dtype=torch.int32)}
        for index, layer in enumerate(self.layers):
            for part in ("q", "k", "v"):
                tensors[f"layers.{index}.{part}"] = layer[part][:, :count].contiguous().cpu()
            tensors[f"layers.{index}.check_out"] = layer["out"][:, slots].contiguous().cpu()
            if "residual" in layer:
                tensors[f"layers.{index}.residual_norm2"] = layer["residual"][:count].contiguous().cpu()
        return tensors


class TraceWriter:
    """Writes a trace as docs/trace.md says; each shard as soon as it is full."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        description: Mapping[str, Any],
        rope: Rope,
        sketch: Mapping[str, torch.Tensor],
        seed: int,
    ) -> None:
        """`sketch`: the tensors of output_sketch(), from `seed`; empty where the residual stream cannot be had."""
        self.directory = pathlib.Path(directory)
        self.description = dict(description)  # what the manifest and every shard say alike
        self.rope = rope
        self.ids: list[int] = []
        self.segments: list[dict[str, Any]] = []
        self.shards: list[dict[str, Any]] = []  # the sealed ones
        self.tokens_xxh3 = ""
        self.open = Shard(description["config"]["layers"])
        try:
            self.directory.mkdir()
        except FileExistsError:
            raise Refused(f"--out {directory}: exists already; a new folder is expected") from None
        self.extras: dict[str, Any] = {}
        if not sketch:
            return
        try:
            checksum = write_tensors(self.directory / SKETCH, sketch, {"seed": str(seed)})
        except BaseException:
            self.abandon()
            raise
        self.extras = {"residual_norm2": {}, "sketch": {"file": SKETCH, "xxh3": checksum, "seed": seed}}

    def first_open(self) -> int:
        """Position of the first token that is in no sealed shard."""
        return len(self.shards) * SHARD_TOKENS

    def row(self) -> int:
        """Row of the open shard that the next token takes."""
        return len(self.ids) - self.first_open()

    def room(self) -> int:
        return SHARD_TOKENS - self.row()

    def admit(self, ids: Sequence[int], kind: str) -> None:
        """The rows of these tokens have been put into the open shard."""
        if not self.segments or self.segments[-1]["kind"] != kind:
            self.segments.append({"start": len(self.ids), "tokens": 0, "kind": kind})
        self.segments[-1]["tokens"] += len(ids)
        self.ids += ids
        if self.room() == 0:
            self.seal()

    def seal(self) -> None:
        """The ids go first: whatever shards a kill leaves, their ids are there."""
        first, count = self.first_open(), self.row()
        tokens = {
            "ids": torch.tensor(self.ids, dtype=torch.int32),
            "inv_freq": self.rope.inv_freq,
            "rope_factor": torch.tensor([self.rope.factor], dtype=torch.float32),
            "softmax_scale": torch.tensor([self.rope.softmax_scale], dtype=torch.float32),
        }
        self.tokens_xxh3 = write_tensors(self.directory / "tokens.safetensors", tokens)
        metadata = self.description | {"first": first, "tokens": count, "segments": self.segments}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
        name = f"shard-{len(self.shards):05}.safetensors"
        checksum = write_tensors(self.directory / name, self.open.tensors(first, count), texts)
        self.shards.append({"file": name, "first": first, "tokens": count, "xxh3": checksum})

    def add_column(self, name: str, function: Callable[..., Any]) -> None:
        """After the last token. function(q, k, v, layer), of the whole trace before RoPE, gives [kv_heads, tokens]."""
        if self.row() > 0:
            self.seal()
        shape = (self.description["config"]["kv_heads"], len(self.ids))
        files: list[Any] = [safetensors.safe_open(self.directory / shard["file"], "pt") for shard in self.shards]
        tensors = {}
        for layer in range(self.description["config"]["layers"]):
            parts = [torch.cat([file.get_tensor(f"layers.{layer}.{part}") for file in files], dim=1) for part in "qkv"]
            values = torch.as_tensor(function(*parts, layer)).float()
            if tuple(values.shape) != shape:
                raise Refused(f"--column {name}: layer {layer} is {list(values.shape)}; {list(shape)} is expected")
            if not torch.isfinite(values).all():
                raise Refused(f"--column {name}: layer {layer}: a value is not finite")
            tensors[f"layers.{layer}.column.{name}"] = values.contiguous().cpu()
        file = f"column-{name}.safetensors"
        checksum = write_tensors(self.directory / file, tensors)
        self.extras.setdefault("columns", []).append({"name": name, "file": file, "xxh3": checksum})

    def finish(self) -> None:
        if self.row() > 0:
            self.seal()
        prompt = sum(segment["tokens"] for segment in self.segments if segment["kind"] == "prompt")
        manifest = self.description | {
            "tokens": len(self.ids),
            "prompt_tokens": prompt,
            "segments": self.segments,
            "shards": self.shards,
            "tokens_xxh3": self.tokens_xxh3,
            "extras": self.extras,
        }
        write_manifest(self.directory, manifest)

    def abandon(self) -> str:
        """After an error: the sealed shards stay, or nothing at all. Returns what to say of them."""
        if self.shards:
            kept = min(self.first_open(), len(self.ids))
            return f"; `kvlab trace seal {self.directory}` keeps its first {kept} tokens"
        for name in ("tokens.safetensors", SKETCH):
            (self.directory / name).unlink(missing_ok=True)
        self.directory.rmdir()
        return ""
