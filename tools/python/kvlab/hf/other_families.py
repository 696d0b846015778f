"""Models of families that nobody listed: taken where their attention is measured to be what a trace can say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from kvlab.hf.models import FAMILIES, Rope, Shape, attention_modules, projections, rope_of, rotate, shape_of
from kvlab.hf.refused import Refused, one_line

# Settings that change attention where a short text may not show it.
SETTINGS = ("attn_logit_softcapping", "attention_chunk_size", "clip_qkv")
FAR = 5e-3  # float32 loses of large angles; a million positions: 1e-3


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
        layers = _plain_run(model, shape, ids, 0)
        last = max(0, config.max_position_embeddings - len(ids))
        far = _plain_run(model, shape, ids, last)  # what depends on the position shows there
        offs = [_off(where, runs, shape, rope) for where, runs in (("", layers), (f" at positions from {last} on", far))]
    except Exception as error:  # of modules that nobody knows
        what = one_line(error, 160).removeprefix("--model: ")
        raise refusal(model, what if isinstance(error, Refused) else f"its modules are others ({what})") from None
    for (off, index, where), most in zip(offs, (1e-3, FAR)):
        if not off <= (most if model.dtype == torch.float32 else 0.1):
            raise refusal(model, f"layer {index}'s differs by {off:.2g} from it{where}")
    sums = [(layer.parts["before"] + layer.parts["added"], layer.parts.get("after")) for layer in layers]
    return shape, rope, all(after is not None and _difference(after, made) <= 1e-2 for made, after in sums)


def _off(where: str, layers: list[LayerRun], shape: Shape, rope: Rope) -> tuple[float, int, str]:
    """How far the layer that differs most is from Llama's attention, and which."""
    offs = [_difference(layer.parts["out"], _attention(layer, shape, rope)) for layer in layers]
    return max(offs), offs.index(max(offs)), where


def _plain_run(model: Any, shape: Shape, ids: Sequence[int], first: int) -> list[LayerRun]:
    """`first`: the position of the first of them."""
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
        fed = torch.tensor([list(ids)], device=model.device)
        positions = first + torch.arange(len(ids), device=model.device)[None]
        model.model(input_ids=fed, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return runs


def _attention(layer: LayerRun, shape: Shape, rope: Rope) -> torch.Tensor:
    """[tokens, query_heads * head_size] from q, k and v before RoPE."""
    count = len(layer.parts["out"])
    if any(len(layer.parts[part]) != count or not layer.parts[part].is_contiguous() for part in "qk"):
        found = f"q_norm gives {list(layer.parts['q'].shape)}, and k_norm {list(layer.parts['k'].shape)}"
        raise TypeError(f"{found}; tokens before heads are expected, [{count}, heads, {shape.head_size}]")
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
    return float(((theirs - ours).norm() / theirs.norm().clamp_min(1e-30)).nan_to_num(torch.inf))
