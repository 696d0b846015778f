"""Captures a trace from a loaded transformers model: what attention computes of one sequence."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import numpy.typing
import torch
import transformers

from kvlab import _kvlab
from kvlab._progress import shown
from kvlab._trace import Trace
from kvlab.hf.calls import cache_word
from kvlab.hf.models import (
    FAMILIES,
    Rope,
    Shape,
    attention_modules,
    base_of,
    file_of,
    name_of,
    output_weights,
    projections,
    refuse_unsupported,
    rope_of,
    rope_parameters,
    rotary_modules,
    rotate,
    shape_of,
    weights_xxh3,
)
from kvlab.hf.other_families import measure
from kvlab.hf.refused import Refused, one_line, refusing

PLAIN_TOKENS = 64  # that are also fed to the model as it is

Progress = Callable[[int], object]
Column = Callable[[Any, Any, Any, int], Any]


# ---------------------------------------------------------------------------------------------
# The hooks


def floats(values: torch.Tensor) -> numpy.typing.NDArray[numpy.float32]:
    made: numpy.typing.NDArray[numpy.float32] = values.detach().float().contiguous().cpu().numpy()
    return made


def turn_by_nothing(module: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


def plain_outputs(model: Any, shape: Shape, ids: Sequence[int]) -> torch.Tensor:
    """What layer 0's attention puts out [n, query_heads, head_size] in the model as it is."""
    outputs: list[torch.Tensor] = []
    attention = attention_modules(model)[0]
    hook = attention.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    try:
        model.model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        hook.remove()
    return outputs[0].view(len(ids), shape.query_heads, shape.head_size)


class HookedModel:
    """Feeds a model; what its attention computes goes to a trace writer. close() leaves the model as it was.

    Hooks sit on the projections and norms, which have had the same names and places in every
    version of transformers; attention itself is left alone. The hooks also rotate q and k, and the
    model's own rotation then turns by nothing: it would round cos, sin and both products to the
    model's dtype and take angles in float32 (off by 0.004 at position 100,000), which no trace can
    say.
    """

    def __init__(
        self, model: Any, shape: Shape, rope: Rope, writer: _kvlab.TraceWriter, plain: torch.Tensor, residual: bool
    ) -> None:
        """`plain`: plain_outputs of the first tokens. `residual`: whether the residual stream can be had."""
        self.residual = residual
        self.model, self.shape, self.rope, self.writer, self.plain = model, shape, rope, writer, plain
        self.cache, self.cache_word = transformers.DynamicCache(), cache_word(model.model)
        self.first, self.count = 0, 0  # tokens being fed
        self.seen: set[tuple[int, str]] = set()  # (layer, part)s that came of them
        self.parts: dict[str, Any] = {}  # q, k and v of the layer that runs
        self.turns_on: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # device: their cos and sin
        self.hooks: list[Any] = []
        for index, module in enumerate(attention_modules(model)):
            self.hook_layer(index, module)
        for module in rotary_modules(model):
            self.hooks.append(module.register_forward_hook(turn_by_nothing))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def hook_layer(self, index: int, module: Any) -> None:
        for part, source, heads in projections(module, self.shape):

            def keep(_: Any, inputs: Any, output: torch.Tensor, part: str = part, heads: int = heads) -> torch.Tensor:
                return self.keep(index, part, heads, output)

            self.hooks.append(source.register_forward_hook(keep))
        self.hooks.append(module.o_proj.register_forward_pre_hook(lambda _, inputs: self.keep_output(index, inputs[0])))
        if self.residual:
            after = self.model.model.layers[index].post_attention_layernorm  # whose input is the residual stream
            self.hooks.append(after.register_forward_pre_hook(lambda _, inputs: self.keep_residual(index, inputs[0])))

    def rows(self, layer: int, part: str, heads: int, values: torch.Tensor) -> torch.Tensor:
        """To [n, heads, head_size], from [1, n, heads * head_size], or [1, n, heads, head_size]
        after a norm of heads."""
        count, size = self.count, self.shape.head_size
        right = tuple(values.shape) in ((1, count, heads * size), (1, count, heads, size))
        if not right or values.dtype != self.model.dtype:
            raise Refused(
                f"--model: layer {layer}: {part} is {name_of(values.dtype)} {list(values.shape)};"
                f" {name_of(self.model.dtype)} [1, {count}, {heads * size}] is expected"
            )
        self.seen.add((layer, part))
        return values.view(count, heads, size)

    def keep(self, layer: int, part: str, heads: int, values: torch.Tensor) -> torch.Tensor:
        """Returns what the model goes on with."""
        rows = self.rows(layer, part, heads, values)
        self.parts[part] = floats(rows)
        return values if part == "v" else rotate(rows, *self.turns(rows.device)).view(values.shape)

    def turns(self, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the tokens being fed: once for each device, not for each layer."""
        if device not in self.turns_on:
            positions = torch.arange(self.first, self.first + self.count, device=device)
            self.turns_on[device] = self.rope.cos_sin(positions)
        return self.turns_on[device]

    def keep_output(self, layer: int, values: torch.Tensor) -> None:
        rows = self.rows(layer, "out", self.shape.query_heads, values)
        if all((layer, part) in self.seen for part in "qkv"):  # otherwise feed_chunk() refuses
            self.writer.layer(layer, **self.parts, out=floats(rows))
        if layer == 0 and self.first == 0:
            self.compare(rows)

    def keep_residual(self, layer: int, values: torch.Tensor) -> None:
        self.seen.add((layer, "residual"))
        self.writer.residual(layer, floats(values.view(self.count, -1).float().square().sum(-1)))

    def compare(self, rows: torch.Tensor) -> None:
        """The first tokens' outputs of layer 0 against the plain model's: the rotation must be its."""
        count = min(len(rows), len(self.plain))
        plain, ours = self.plain[:count].float(), rows[:count].float()
        error = float((plain - ours).norm() / plain.norm())
        most = 1e-3 if self.model.dtype == torch.float32 else 0.1
        if not error <= most:
            raise Refused(
                f"--model: layer 0 differs by {error:.2g} from the plain model's; the RoPE of Llama is expected"
                " (--dtype float32 tells its rounding from another RoPE)"
            )

    def feed(self, ids: Sequence[int], kind: str, chunk: int, progress: Progress) -> torch.Tensor:
        """Returns the hidden state [1, hidden] behind the last token."""
        while ids:
            part = ids[: min(chunk, _kvlab.shard_tokens - self.writer.tokens % _kvlab.shard_tokens)]
            ids = ids[len(part) :]
            hidden = self.feed_chunk(part, kind)
            progress(self.writer.tokens)
        return hidden

    def feed_chunk(self, ids: Sequence[int], kind: str) -> torch.Tensor:
        self.first, self.count = self.writer.tokens, len(ids)
        self.writer.begin(ids, kind == "prompt")
        self.seen.clear()
        self.turns_on.clear()
        tokens = torch.tensor([ids], device=self.model.device)
        before = self.cache.get_seq_length()
        result = self.model.model(input_ids=tokens, **{self.cache_word: self.cache}, use_cache=True, return_dict=True)
        if self.cache.get_seq_length() != before + self.count:
            raise Refused(f"--model: transformers {transformers.__version__} has not counted the tokens of its cache")
        if len(self.seen) != (5 if self.residual else 4) * self.shape.layers:
            raise Refused("--model: some projections are not called as modules; their outputs cannot be had")
        with refusing():
            self.writer.end()
        last: torch.Tensor = result.last_hidden_state[:, -1]
        return last

    def most_likely(self, hidden: torch.Tensor) -> int:
        return int(self.model.get_output_embeddings()(hidden).argmax())


# ---------------------------------------------------------------------------------------------
# The capture


@dataclasses.dataclass(frozen=True)
class Fed:
    """What is fed: without `prompt_tokens` all ids are the prompt, and `max_new_tokens` follow, the most likely ones."""

    ids: list[int]
    prompt_tokens: int | None
    max_new_tokens: int
    chunk: int


def description(
    model: Any, shape: Shape, name: str, checkpoint: str | None, forced: bool, spans: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What the manifest and every shard say alike."""
    dtype = name_of(model.dtype)
    tokenizer = file_of(checkpoint, "tokenizer.json") if checkpoint else None
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    return {
        "model": _kvlab.without_controls(name),
        "config": dataclasses.asdict(shape) | {"dtype": dtype, "rope": rope_parameters(model.config)},
        "rounding": "none" if dtype == "float32" else "model_dtype",
        "weights_xxh3": weights_xxh3(checkpoint) if checkpoint else "",
        "tokenizer_xxh3": _kvlab.tokenizer_xxh3(str(tokenizer.parent)) if tokenizer else "",
        "spans": [dict(span, name=_kvlab.without_controls(str(span["name"]))) for span in spans],
        "capture": {
            "engine": "transformers",
            "version": transformers.__version__,
            "device": device,
            "options": {
                "torch": torch.__version__,
                "attention": str(getattr(model.config, "_attn_implementation", "")),
                "rope": "rotated in float32, rounded once",
                "teacher_forced": forced,
            },
        },
    }


def feed(hooked: HookedModel, fed: Fed, progress: Progress) -> None:
    config = hooked.model.config
    if fed.prompt_tokens is not None:
        hooked.feed(fed.ids[: fed.prompt_tokens], "prompt", fed.chunk, progress)
        if len(fed.ids) > fed.prompt_tokens:
            hooked.feed(fed.ids[fed.prompt_tokens :], "decode", fed.chunk, progress)
        return
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    hidden = hooked.feed(fed.ids, "prompt", fed.chunk, progress)
    for _ in range(fed.max_new_tokens - 1):  # the last token is chosen and not fed
        token = hooked.most_likely(hidden)
        if token in ends:
            return
        hidden = hooked.feed([token], "decode", 1, progress)


def add_columns(out: str, columns: Mapping[str, Column]) -> None:
    """To a finished trace. function(q, k, v, layer), of the whole trace before RoPE, gives [kv_heads, tokens]."""
    trace = Trace(out, verify=False)
    tensors = trace.to_dict("torch")
    for name, function in columns.items():
        layers = []
        try:
            for layer in trace.layer_numbers:
                q, k, v = (torch.cat(tensors[f"layers.{layer}.{part}"], dim=1) for part in "qkv")
                layers.append(floats(torch.as_tensor(function(q, k, v, layer))))
            with refusing():
                _kvlab.add_column(trace._held, name, layers)
        except Exception as error:
            what = one_line(error if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
            raise Refused(f"--column {name}: {what}: --out {out} is finished without it") from None


def unfinished(out: str) -> str:
    """What to say of a trace that an error ended."""
    whole = os.path.exists(os.path.join(out, "shard-00000.safetensors"))
    return f": --out {out} is unfinished; `kvlab trace seal {out}` keeps its whole shards" if whole else ""


def write_capture(
    model: Any,
    fed: Fed,
    out: str,
    name: str,
    checkpoint: str | None,
    spans: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Column],
    progress: Progress,
) -> int:
    """The whole of a capture. Returns the tokens that were fed."""
    first = fed.ids[:PLAIN_TOKENS]
    if model.config.model_type in FAMILIES:
        shape, residual = shape_of(model), True
        rope = rope_of(model, shape)
    else:
        shape, rope, residual = measure(model, first)
    plain = plain_outputs(model, shape, first)
    weights = output_weights(model) if residual else []
    header = json.dumps(description(model, shape, name, checkpoint, fed.prompt_tokens is not None, spans))
    with refusing("--out "):
        writer = _kvlab.TraceWriter(out, header, rope.inv_freq.tolist(), rope.factor, rope.softmax_scale)
    hooked = HookedModel(model, shape, rope, writer, plain, residual)
    try:
        with refusing():
            if residual:
                writer.sketch(map(floats, weights))
        feed(hooked, fed, progress)
        with refusing():
            writer.finish()
        tokens = writer.tokens
    except (Refused, OSError, torch.cuda.OutOfMemoryError, KeyboardInterrupt) as error:
        writer.close()
        interrupted = isinstance(error, KeyboardInterrupt)
        what = "interrupted" if interrupted else one_line(error)
        raise (KeyboardInterrupt if interrupted else Refused)(what + unfinished(out)) from None
    finally:
        hooked.close()
        writer.close()
    add_columns(out, columns)
    return tokens


def capture(
    model: Any,
    input_ids: Any,
    *,
    prompt_tokens: int | None = None,
    max_new_tokens: int = 0,
    out: str | os.PathLike[str] | None = None,
    spans: Sequence[Mapping[str, Any]] = (),
    columns: Mapping[str, Column] | None = None,
    chunk: int = 1024,
    checkpoint: str | None = None,
    progress: bool | Progress = True,
) -> Trace:
    """A trace of a loaded transformers model, as `python -m kvlab.hf capture` makes one; the model is left as it was.

    `input_ids` are one sequence. With `prompt_tokens` the rest of it is decoded, teacher-forced; otherwise all of it is
    the prompt, and the model goes on with `max_new_tokens` most likely ones. A model with PEFT's adapters is captured
    with them. `spans`: {"name", "start", "tokens"} each. `columns`: by name, functions (q, k, v, layer) -> [kv_heads,
    tokens]. `checkpoint`: the folder that the weights are of, whose hashes the trace then has. `out` keeps the trace in
    a new folder; without it, it lies in a temporary one and goes with the handle. `progress`: True shows a bar in
    notebooks and on terminals, where tqdm is there; a function gets the tokens fed.
    """
    base = base_of(model)
    name = _kvlab.without_controls(
        pathlib.Path(str(getattr(base.config, "_name_or_path", "") or type(base).__name__)).name
    )
    refuse_unsupported(name, base.config, others=True)
    ids = _one_sequence(input_ids, int(base.config.vocab_size))
    if prompt_tokens is not None and not 1 <= prompt_tokens <= len(ids):
        raise Refused(f"prompt_tokens: {prompt_tokens} should be between 1 and {len(ids)}")
    folder = tempfile.TemporaryDirectory(prefix="kvlab-") if out is None else None
    path = os.path.join(folder.name, name) if folder else os.fspath(out or "")
    fed = Fed(ids, prompt_tokens, max_new_tokens, chunk)
    training = base.training
    base.eval()
    try:
        with torch.inference_mode(), shown(progress is True, "capture") as bar:
            most = len(ids) + (max_new_tokens if prompt_tokens is None else 0)
            told = progress if callable(progress) else lambda tokens: bar(tokens / most) if bar else None
            write_capture(base, fed, path, name, checkpoint, spans, columns or {}, told)
    finally:
        base.train(training)
    trace = Trace(path)
    trace._folder = folder
    return trace


def _one_sequence(input_ids: Any, vocabulary: int) -> list[int]:
    try:
        tensor = torch.as_tensor(input_ids)
    except Exception:  # of text, of several lengths, of what a tokenizer returns, which is more than ids
        right = 'one sequence of whole numbers, such as tokenizer(text)["input_ids"], is expected'
        raise Refused(f"input_ids: a {type(input_ids).__name__}; {right}") from None
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1 or tensor.numel() == 0 or tensor.is_floating_point():
        raise Refused(f"input_ids: {list(tensor.shape)}; one sequence of whole numbers is expected")
    ids = [int(i) for i in tensor]
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise Refused(f"input_ids: from {min(ids)} to {max(ids)}; the model's vocabulary is {vocabulary}")
    return ids
