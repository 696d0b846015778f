"""Miniatures of transformers' families, with random weights. Their configs keep all keys of the original configs that
define the structure of the model."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

LAYERS = 4
SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "ffn_dim": 64, "n_inner": 64,
    "shared_expert_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "n_embd": 64, "n_head": 4, "n_layer": LAYERS, "d_model": 64, "num_layers": LAYERS, "num_hidden_layers": LAYERS,
    "num_heads": 4, "decoder_layers": LAYERS, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "max_position_embeddings": 2048,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "qk_head_dim": 16,
    "global_head_dim": 16, "num_global_key_value_heads": 2,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_n_groups": 1,
    "ssm_state_size": 16, "n_groups": 1, "mamba_d_ssm": 128, "mamba_chunk_size": 32, "chunk_size": 32, "mamba_ngroups": 1,
    "n_mamba_heads": 8, "mamba_headdim": 16, "use_mamba_kernels": False, "mamba_expand": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "lru_width": 64, "embedding_size": 64, "word_embed_proj_dim": 64, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0, "mlp_hidden_size": 64, "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32, "is_decoder": True, "rotary_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1, "num_heads": 2,
    "out_hidden_size": 64,
}  # fmt: skip


def covering(kinds: list[str]) -> list[str]:
    """Returns the kinds of the layers of a miniature. Every kind of layer that the model has occurs among them."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct + kinds)[:LAYERS] if len(distinct) > 1 else kinds[:LAYERS]


def small_words(config: Any) -> dict[str, Any]:
    words = {name: value for name, value in SMALL.items() if name in vars(config)}
    if "qk_rope_head_dim" in words and "head_dim" in words:
        words["head_dim"] = words["qk_rope_head_dim"]  # because RoPE uses head_dim
    if "kv_lora_rank" in words and "num_key_value_heads" in words:
        words["num_key_value_heads"] = words["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers"):
        kinds = vars(config).get(name)
        if isinstance(kinds, (list, tuple)) and kinds:
            words[name] = covering(list(kinds))
    return words


def config_of(family: str, **words: Any) -> Any:
    made = CONFIG_MAPPING[family]
    plain = made()
    text = plain.get_text_config()
    if text is plain:
        return made(**small_words(plain) | words)
    name = next(name for name in ("text_config", "llm_config", "language_config") if getattr(plain, name, None) is text)
    parts = {name: small_words(text) | {"model_type": text.model_type} | words}
    if vision := getattr(plain, "vision_config", None):
        small = {name: value for name, value in VISION.items() if name in vars(vision)}
        parts["vision_config"] = small | {"model_type": vision.model_type}
    return made(**parts)


def model_of(family: str, **words: Any) -> Any:
    torch.manual_seed(3)
    config = config_of(family, **words)
    is_text_model = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if is_text_model else transformers.AutoModelForImageTextToText
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(3)  # so that the attention of different queries differs
            if "sink" in name:
                parameter.uniform_(-1, 1)
            elif parameter.ndim == 1 and "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return model.float()


def families() -> list[str]:
    """All families except blt, parts of which are large with any config."""
    found = [family for family, config in CONFIG_MAPPING.items() if config in MODEL_FOR_CAUSAL_LM_MAPPING]
    return [family for family in found if family != "blt"]


def miniatures(counts: collections.Counter[str], run: Callable[[Any], object] = id) -> Iterator[tuple[str, Any]]:
    """Yields each family with its miniature, without warnings. If a miniature cannot be made, or `run(model)` raises
    an error, the family is counted in `counts`, printed and left out."""
    for family in families():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = model_of(family)
                run(model)
            except Exception as error:  # the config of this family may require other numbers
                counts["no miniature"] += 1
                print(f"{family}: no miniature: {' '.join(str(error).split())[:100]}")
                continue
            yield family, model
