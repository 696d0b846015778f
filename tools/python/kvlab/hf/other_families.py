"""Models of families that nobody listed: taken where their attention is measured to be what a trace can say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kvlab.hf.models import FAMILIES, Rope, Shape, attention_modules, projections, rope_of, rotate, shape_of
from kvlab.hf.trace_files import Refused

# Settings that change attention where a short text may not show it.
SETTINGS = ("attn_logit_softcapping", "attention_chunk_size", "clip_qkv")


@dataclasses.dataclass
class LayerRun:
    """What a layer of the plain model computes of some tokens, float32."""

    parts: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def keep(self, name: str, values: torch.Tensor) -> None:
        self.parts[name] = values.detach().float()[0]


def refusal(model: Any, why: str) -> Refused:
    return Refused(
        f"--model: model_type {model.config.model_type!r} is not supported; one of {', '.join(FAMILIES)} is expected, or"
        f" another with the attention of Llama: {why}"
    )


def measure(model: Any, ids: Sequence[int]) -> tuple[Shape, Rope, bool]:
    """Whether its attention is Llama's in every layer, on these tokens; otherwise refuses the model by name. Also
    whether the residual stream behind attention is what goes into post_attention_layernorm."""
    config = model.config
    if not getattr(type(model), "_supports_attention_backend", False):
        raise refusal(model, f"that of {type(model).__name__} does not go through transformers' AttentionInterface")
    for name in SETTINGS:
        if getattr(config, name, None) is not None:
            raise refusal(model, f"{name} is {getattr(config, name)}; null is expected")
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        raise refusal(model, f"sliding_window is {config.sliding_window}; null is expected")
    try:
        shape = shape_of(model)
        rope = rope_of(model, shape)
        layers = _plain_run(model, shape, ids)
    except (AttributeError, TypeError, KeyError, RuntimeError) as error:
        raise refusal(model, f"its modules are others ({error})") from None
    most = 1e-3 if model.dtype == torch.float32 else 0.1
    for index, layer in enumerate(layers):
        off = _difference(layer.parts["out"], _attention(layer, shape, rope))
        if not off <= most:
            raise refusal(model, f"layer {index}'s differs by {off:.2g} from it")
    sums = [(layer.parts["before"] + layer.parts["added"], layer.parts.get("after")) for layer in layers]
    return shape, rope, all(after is not None and _difference(after, made) <= 1e-2 for made, after in sums)


def _plain_run(model: Any, shape: Shape, ids: Sequence[int]) -> list[LayerRun]:
    runs, hooks = [LayerRun() for _ in range(shape.layers)], []
    for run, layer, attention in zip(runs, model.model.layers, attention_modules(model)):

        def output(_: Any, inputs: Any, made: Any, run: LayerRun = run) -> None:
            run.keep("added", made[0] if isinstance(made, tuple) else made)

        def before(_: Any, inputs: Any, words: Any, run: LayerRun = run) -> None:
            run.keep("before", inputs[0] if inputs else words["hidden_states"])

        def of_input(name: str, run: LayerRun = run) -> Any:
            return lambda _, inputs: run.keep(name, inputs[0])

        def of_output(name: str, run: LayerRun = run) -> Any:
            return lambda _, inputs, made: run.keep(name, made)

        hooks += [source.register_forward_hook(of_output(part)) for part, source, _ in projections(attention, shape)]
        hooks += [
            attention.register_forward_hook(output),
            attention.o_proj.register_forward_pre_hook(of_input("out")),
            layer.register_forward_pre_hook(before, with_kwargs=True),
        ]
        if hasattr(layer, "post_attention_layernorm"):
            hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(of_input("after")))
    try:
        model.model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return runs


def _attention(layer: LayerRun, shape: Shape, rope: Rope) -> torch.Tensor:
    """[tokens, query_heads * head_size] from q, k and v before RoPE."""
    count = len(layer.parts["out"])
    q, k, v = (layer.parts[part].view(count, -1, shape.head_size) for part in "qkv")
    turns = rope.cos_sin(torch.arange(count, device=q.device))
    q, k = rotate(q, *turns), rotate(k, *turns)
    k, v = (x.repeat_interleave(shape.query_heads // shape.kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * rope.softmax_scale
    scores.masked_fill_(torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)


def _difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    if theirs.shape != ours.shape:
        return float("inf")
    return float((theirs - ours).norm() / theirs.norm().clamp_min(1e-30))
