"""Captures a trace from a loaded transformers model: queries, keys and values of one sequence."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import numpy.typing
import torch
import transformers

from kvlab import _arguments, _kvlab
from kvlab._arrays import writer_of
from kvlab._old_names import renamed
from kvlab._progress import shown
from kvlab._trace import MAX_TOKENS, Trace
from kvlab.hf.attended_model import refuse_within_block
from kvlab.hf.attention import Call, attending, attention, check_mask
from kvlab.hf.calls import cache_among, cache_word
from kvlab.hf.layers import (
    Given,
    Layer,
    decoder_of,
    layer_arguments,
    layer_count,
    layers_of,
    recording_arguments,
    refuse_beyond_format,
    rotation_of,
    running,
)
from kvlab.hf.models import (
    ROPE_TYPES,
    Shape,
    base_of,
    file_of,
    name_of,
    output_projection,
    refuse_no_decoder,
    rope_parameters,
    rotate,
    text_config,
    weights_xxh3,
)
from kvlab.hf.refused import Refused, one_line, refusing

Progress = Callable[[int], object]
Feature = Callable[[Any, Any, Any, int], Any]


# ---------------------------------------------------------------------------------------------
# Feeding


def floats(values: torch.Tensor) -> numpy.typing.NDArray[numpy.float32]:
    made: numpy.typing.NDArray[numpy.float32] = values.detach().float().contiguous().cpu().numpy()
    return made


class Listener:
    """Feeds a decoder and writes the queries, keys and values of its attention to a trace writer.

    It computes the attention itself, in the same way as readers of the trace: it takes q and k before RoPE, as the
    trace stores them, rotates them in float32, and rounds the result once. The model's own rotation is less exact: it
    computes angles in float32 (with an error of 0.004 at position 100,000) and rounds cos, sin and both products to its
    dtype.
    """

    def __init__(self, plan: Plan, writer: _kvlab.TraceWriter) -> None:
        self.plan, self.writer = plan, writer
        self.layers = {layer.index: layer for layer in plan.layers}
        self.cache: Any = None  # the model's cache
        self.first, self.count = 0, 0  # position of the first token being fed, and number of tokens being fed
        self.keys: dict[int, torch.Tensor] = {}  # by layer: [kv_heads, tokens, key_size], after RoPE
        self.given: dict[int, Given] = {}  # by layer: the arguments of its module
        self.seen: set[tuple[int, str]] = set()  # (layer, part) pairs that were recorded for the tokens being fed
        # Both dicts are for the tokens being fed. `checked`: masks that were checked, by address, length and window.
        # `rotations`: cos and sin, by device and RoPE table.
        self.checked: dict[tuple[int, int, int], Any] = {}
        self.rotations: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def recording_arguments(self) -> Iterator[None]:
        hooks = []
        for layer in self.plan.layers if self.plan.has_residual else ():

            def keep(_: Any, inputs: Any, words: Any, index: int = layer.index) -> None:
                self.keep_residual(index, next(iter((*inputs, *words.values()))))

            hooks.append(layer.residual.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            with attending(self.plan.decoder, self.attend), recording_arguments(self.plan.layers, self.given):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def rotation_of_fed(self, layer: Layer, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the tokens that are being fed, computed once for each device and table."""
        key = (device, layer.rope.key)
        if key not in self.rotations:
            positions = torch.arange(self.first, self.first + self.count, device=device)
            self.rotations[key] = layer.rope.cos_sin(positions)
        return self.rotations[key]

    def attend(self, call: Call) -> torch.Tensor:
        layer = self.layers.get(call.layer)
        if layer is None or (layer.index, "out") in self.seen or call.q.shape[1] != self.count:
            raise Refused(
                f"--model: layer {call.layer} did not attend once to all fed tokens, as it did in the first "
                "call"
            )
        self.seen.add((layer.index, "out"))
        if not layer.fits(call):
            what = "the attention's scale, window or shape differs from the first call"
            raise Refused(f"--model: layer {layer.index}: {what}")
        mask = (0 if call.mask is None else call.mask.data_ptr(), call.k.shape[1], call.window)
        if mask not in self.checked:
            check_mask(call, self.first + self.count)
            self.checked[mask] = call.mask
        rotation = rotation_of(layer, self.given[layer.index], self.count, self.first)
        q, k = layer.stored(call.q, rotation), layer.stored(call.k[:, -self.count :], rotation)
        now = self.rotation_of_fed(layer, q.device)
        new = rotate(k, *now).transpose(0, 1)
        old = self.keys.get(layer.index, new[:, :0])
        self.keys[layer.index] = torch.cat((old, new), dim=1)[:, -call.k.shape[1] :]
        out = attention(dataclasses.replace(call, q=rotate(q, *now).transpose(0, 1), k=self.keys[layer.index]))
        v = call.v[:, -self.count :].transpose(0, 1)
        self.writer.layer(self.plan.layer_indices[layer.index], q=floats(q), k=floats(k), v=floats(v), out=floats(out))
        return out

    def keep_residual(self, layer: int, values: torch.Tensor) -> None:
        self.seen.add((layer, "residual"))
        norms = values.view(self.count, -1).float().square().sum(-1)
        self.writer.residual(self.plan.layer_indices[layer], floats(norms))

    def feed(self, ids: Sequence[int], kind: str, chunk: int, progress: Progress) -> torch.Tensor:
        """Feeds tokens in chunks. Returns the last hidden state [1, hidden] of the last token."""
        while ids:
            part = ids[: min(chunk, _kvlab.shard_tokens - self.writer.tokens % _kvlab.shard_tokens)]
            ids = ids[len(part) :]
            hidden = self.feed_chunk(part, kind)
            progress(self.writer.tokens)
        return hidden

    def feed_chunk(self, ids: Sequence[int], kind: str) -> torch.Tensor:
        self.first, self.count = self.writer.tokens, len(ids)
        decoder = self.plan.decoder
        if self.first and self.cache is None:
            raise Refused(
                f"--model: {type(decoder).__name__} returns no cache, which kvlab needs to feed a text in "
                "chunks"
            )
        self.writer.begin(ids, kind == "prompt")
        self.seen.clear()
        self.checked.clear()
        self.rotations.clear()
        words = {} if self.cache is None else {cache_word(decoder): self.cache}
        with running(decoder):
            result = decoder(torch.tensor([ids], device=decoder.device), **words, use_cache=True, return_dict=True)
        self.cache = cache_among(result.values())
        if len(self.seen) != (2 if self.plan.has_residual else 1) * len(self.layers):
            raise Refused("--model: a captured layer computed no attention for some tokens; a trace needs it for all")
        with refusing():
            self.writer.end()
        last: torch.Tensor = result.last_hidden_state[:, -1]
        return last


# ---------------------------------------------------------------------------------------------
# The capture


@dataclasses.dataclass(frozen=True)
class Fed:
    """The tokens that the model is fed. If `prompt_tokens` is None, all ids are the prompt, and the model then
    generates up to `max_new_tokens` tokens, always the most likely one."""

    ids: list[int]
    prompt_tokens: int | None
    max_new_tokens: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to capture from a model: the layers that attend, and their shape."""

    model: Any
    decoder: Any
    layers: list[Layer]
    shape: Shape
    count: int  # layers of the model, those without attention included
    tokens: int  # maximum number of tokens that will be fed

    @property
    def has_residual(self) -> bool:
        return all(layer.residual is not None for layer in self.layers)

    @functools.cached_property
    def layer_indices(self) -> dict[int, int]:
        """Returns {the model's number of a layer: its index in the trace}."""
        return {layer.index: index for index, layer in enumerate(self.layers)}

    def writer(self, out: str, header: str) -> _kvlab.TraceWriter:
        inv_freq, factors, rows = layer_arguments(self.layers)
        # If no layer's window hides any of the tokens, the trace stores no windows.
        if min(layer.window for layer in self.layers) >= self.tokens:
            rows = [row | {"span": 0} for row in rows]
        scale = self.layers[0].rope.softmax_scale
        return writer_of(out, header, inv_freq, factors, scale, rows, list(self.layer_indices), self.count)

    def most_likely(self, hidden: torch.Tensor) -> int:
        return int(self.model.get_output_embeddings()(hidden).argmax())


def plan_of(model: Any, fed: Fed) -> Plan:
    """Raises Refused if a trace cannot represent what the model computes."""
    decoder = decoder_of(model)
    tokens = len(fed.ids) + (max(0, fed.max_new_tokens - 1) if fed.prompt_tokens is None else 0)
    layers = layers_of(decoder, fed.ids, tokens)
    refuse_beyond_format(layers)
    first = layers[0]
    shape = Shape(len(layers), first.query_heads, first.kv_heads, first.key_size)
    return Plan(model, decoder, layers, shape, layer_count(decoder, layers), tokens)


def description(
    model: Any, shape: Shape, name: str, checkpoint: str | None, forced: bool, passages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The header that the manifest and every shard contain."""
    dtype, rope = name_of(model.dtype), rope_parameters(text_config(model.config))
    tokenizer = file_of(checkpoint, "tokenizer.json") if checkpoint else None
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    return {
        "model": _kvlab.without_controls(name),
        "config": dataclasses.asdict(shape)
        | {"dtype": dtype, "rope": rope if rope["rope_type"] in ROPE_TYPES else {"rope_type": "default"}},
        "rounding": "none" if dtype == "float32" else "model_dtype",
        "weights_xxh3": weights_xxh3(checkpoint) if checkpoint else "",
        "tokenizer_xxh3": _kvlab.tokenizer_xxh3(str(tokenizer.parent)) if tokenizer else "",
        "spans": [dict(passage, name=_kvlab.without_controls(str(passage["name"]))) for passage in passages],
        "capture": {
            "engine": "transformers",
            "version": transformers.__version__,
            "device": device,
            "options": {
                "torch": torch.__version__,
                "attention": "in float32, under transformers' AttentionInterface",
                "rope": "rotated in float32, rounded once",
                "teacher_forced": forced,
            },
        },
    }


def feed(listener: Listener, fed: Fed, progress: Progress) -> None:
    plan = listener.plan
    if fed.prompt_tokens is not None:
        listener.feed(fed.ids[: fed.prompt_tokens], "prompt", fed.chunk, progress)
        if len(fed.ids) > fed.prompt_tokens:
            listener.feed(fed.ids[fed.prompt_tokens :], "decode", fed.chunk, progress)
        return
    ends = getattr(text_config(plan.model.config), "eos_token_id", None)
    hidden = listener.feed(fed.ids, "prompt", fed.chunk, progress)
    for _ in range(fed.max_new_tokens - 1):  # the last generated token is not fed
        token = plan.most_likely(hidden)
        if token in (ends if isinstance(ends, list) else [ends]):
            return
        hidden = listener.feed([token], "decode", 1, progress)


def add_features(out: str, features: Mapping[str, Feature]) -> None:
    """Adds features to a finished trace. Calls each function (q, k, v, layer) with the tensors of all tokens before
    RoPE. The function returns [kv_heads, tokens]."""
    trace = Trace(out, verify=False)
    tensors = trace.to_dict("torch")
    for name, function in features.items():
        layers = []
        try:
            for layer in trace.layer_numbers:
                q, k, v = (torch.cat(tensors[f"layers.{layer}.{part}"], dim=1) for part in "qkv")
                layers.append(floats(torch.as_tensor(function(q, k, v, layer))))
            with refusing():
                _kvlab.add_feature(trace._held, name, layers)
        except Exception as error:
            what = one_line(error if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
            raise Refused(f"--feature {name}: {what}: --out {out} is finished without this feature") from None


def unfinished(out: str) -> str:
    """Returns text for the end of an error message. If at least one shard is complete, the text says how to keep what
    was written; otherwise it is empty."""
    whole = os.path.exists(os.path.join(out, "shard-00000.safetensors"))
    how = f"`kvlab trace seal {out}` makes a trace of its complete shards"
    return f": --out {out} is unfinished; {how}" if whole else ""


def write_capture(
    plan: Plan,
    fed: Fed,
    out: str,
    name: str,
    checkpoint: str | None,
    passages: Sequence[Mapping[str, Any]],
    features: Mapping[str, Feature],
    progress: Progress,
) -> int:
    """Runs a capture. Returns the number of tokens that were fed."""
    header = json.dumps(description(plan.model, plan.shape, name, checkpoint, fed.prompt_tokens is not None, passages))
    with refusing("--out "):
        writer = plan.writer(out, header)
    listener = Listener(plan, writer)
    try:
        with refusing():
            if plan.has_residual:
                writer.sketch(floats(output_projection(layer.output, plan.model)) for layer in plan.layers)
        with listener.recording_arguments():
            feed(listener, fed, progress)
        with refusing():
            writer.finish()
        tokens = writer.tokens
    except (Refused, OSError, torch.cuda.OutOfMemoryError, KeyboardInterrupt) as error:
        writer.close()
        interrupted = isinstance(error, KeyboardInterrupt)
        what = "interrupted" if interrupted else one_line(error)
        raise (KeyboardInterrupt if interrupted else Refused)(what + unfinished(out)) from None
    finally:
        writer.close()
    add_features(out, features)
    return tokens


@renamed(columns="features", spans="passages")
def capture(
    model: Any,
    input_ids: Any,
    *,
    prompt_tokens: int | None = None,
    max_new_tokens: int = 0,
    out: str | os.PathLike[str] | None = None,
    passages: Sequence[Mapping[str, Any]] = (),
    features: Mapping[str, Feature] | None = None,
    chunk: int = 1024,
    checkpoint: str | None = None,
    progress: bool | Progress = True,
) -> Trace:
    """Captures a trace from a loaded transformers model, as `python -m kvlab.hf capture` does.

    >>> trace = kvlab.hf.capture(model, input_ids, prompt_tokens=512, out="book.trace")

    `model`: a transformers model, or a PEFT model, which is captured with its adapters. The call does not change it.

    `input_ids`: the token ids of one sequence. With `prompt_tokens`, the tokens after the prompt are decoded as they
    are given (teacher-forced). Without it, the whole sequence is the prompt, and the model then generates up to
    `max_new_tokens` tokens, always the most likely one.

    `out`: a new folder for the trace. Without it the trace is in a temporary folder, which is removed together with the
    returned object.

    `passages`: named parts of the sequence, each {"name": text, "start": position, "tokens": count}. `features`: {name:
    function} of token features to add to the trace. A function (q, k, v, layer) gets tensors [heads, tokens, head_size]
    before RoPE and returns [kv_heads, tokens].

    `chunk`: tokens that are fed at once. `checkpoint`: the folder of the weights; the trace then stores their hash.

    `progress`: True shows a bar of tqdm in notebooks and on terminals; a function gets the number of tokens fed.

    Raises Refused for bad input, or if a trace cannot represent what the model computes.
    """
    if not hasattr(model, "config"):
        raise Refused(f"model: has type {type(model).__name__}; give a loaded transformers model")
    base = base_of(model)
    name = _kvlab.without_controls(
        pathlib.Path(str(getattr(base.config, "_name_or_path", "") or type(base).__name__)).name
    )
    refuse_no_decoder(name, base.config)
    refuse_within_block(base)
    ids = _one_sequence(input_ids, int(text_config(base.config).vocab_size))
    if prompt_tokens is not None:
        prompt_tokens = _arguments.whole("prompt_tokens", prompt_tokens, 1, len(ids))
    max_new_tokens = _arguments.whole("max_new_tokens", max_new_tokens, 0, MAX_TOKENS)
    chunk = _arguments.whole("chunk", chunk, 1, MAX_TOKENS)
    checkpoint = None if checkpoint is None else _arguments.path("checkpoint", checkpoint)
    passages, features = _passages(passages), _features(features)
    folder = tempfile.TemporaryDirectory(prefix="kvlab-") if out is None else None
    path = os.path.join(folder.name, name) if folder else _arguments.path("out", out)
    fed = Fed(ids, prompt_tokens, max_new_tokens, chunk)
    training = base.training
    base.eval()
    try:
        with torch.inference_mode(), shown(progress is True, "capture") as bar:
            total = len(ids) + (max_new_tokens if prompt_tokens is None else 0)
            report = progress if callable(progress) else lambda tokens: bar(tokens / total) if bar else None
            write_capture(plan_of(base, fed), fed, path, name, checkpoint, passages, features, report)
    finally:
        base.train(training)
    trace = Trace(path)
    trace._folder = folder
    if unsafe := trace._held.key_quantization_warning:
        warnings.warn(unsafe, stacklevel=3)
    return trace


def _passages(passages: Any) -> list[dict[str, Any]]:
    right = 'a list of {"name": text, "start": position, "tokens": count}'
    made = []
    for one in _arguments.items("passages", passages, right):
        if not isinstance(one, Mapping) or set(one) != {"name", "start", "tokens"}:
            raise _arguments.refuse("passages", passages, right)
        numbers = {key: _arguments.whole(f"passages: {key}", one[key], 0, MAX_TOKENS) for key in ("start", "tokens")}
        made.append({"name": _arguments.text("passages: name", one["name"])} | numbers)
    return made


def _features(features: Any) -> dict[str, Feature]:
    if features is None:
        return {}
    if not isinstance(features, Mapping) or not all(isinstance(k, str) and callable(f) for k, f in features.items()):
        raise _arguments.refuse("features", features, "{name: function (q, k, v, layer)}")
    return dict(features)


def _one_sequence(input_ids: Any, vocabulary: int) -> list[int]:
    try:
        tensor = torch.as_tensor(input_ids)
    except Exception:  # a text, rows of several lengths, or a tokenizer's whole output
        right = 'give one sequence of whole numbers, such as tokenizer(text)["input_ids"]'
        raise Refused(f"input_ids: has type {type(input_ids).__name__}; {right}") from None
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1 or tensor.numel() == 0 or tensor.is_floating_point():
        raise Refused(f"input_ids: has shape {list(tensor.shape)}; give one sequence of whole numbers")
    ids = [int(i) for i in tensor]
    if min(ids) < 0 or max(ids) >= vocabulary:
        found = f"ids are from {min(ids)} to {max(ids)}"
        raise Refused(f"input_ids: {found}, but the model's vocabulary has {vocabulary} ids")
    return ids
