"""Loads transformers models and refuses unsupported ones by name. Shared by captures and sensitivities."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from typing import Any, NoReturn

import numpy
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.hub import cached_file

from kvlab import _kvlab
from kvlab.hf.refused import Refused, one_line, refusing

TRANSFORMERS = tuple(int(number) for number in transformers.__version__.split(".")[:2])

FAMILIES = {family: architecture for architecture, family in _kvlab.supported_architectures()}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------
# The model


@dataclasses.dataclass
class Rope:
    inv_freq: torch.Tensor  # [head_size / 2] float32, on the CPU
    factor: float  # factor on cos and sin
    softmax_scale: float

    @functools.cached_property
    def key(self) -> bytes:
        """A dictionary key: two equal rotations have equal keys."""
        return numpy.append(self.inv_freq.numpy(), numpy.float32(self.factor)).tobytes()

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin [n, head_size / 2] of positions [n]: angles are computed in float64, and cos and sin are
        rounded to float32, as elsewhere in kvlab.
        """
        angle = torch.outer(positions.double(), self.inv_freq.to(positions.device).double())
        return torch.cos(angle).float() * self.factor, torch.sin(angle).float() * self.factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [n, heads, head_size] by cos and sin [n, head_size / 2]. Computes in float32 and rounds the result
    once, to x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@dataclasses.dataclass
class Shape:
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int


def load_config(name: str) -> Any:
    """Loads the config of a folder or of a name on the hub. Only for commands, because it also silences the messages of
    transformers and of the hub."""
    words: Any = transformers.utils.logging
    words.set_verbosity_error()
    words.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # transformers may raise any exception
        if pathlib.Path(name).is_dir():
            raise Refused(f"--model {name}: {one_line(error)}") from None
        raise Refused(
            f"--model {name}: is not a directory here, and the hub did not provide it; give the directory of"
            f" a checkpoint (on a machine with a network: `hf download`): {one_line(error, 120)}"
        ) from None


def rope_parameters(config: Any) -> dict[str, Any]:
    """Returns the RoPE parameters under the names of transformers 5. There they are in rope_parameters; in transformers
    4 they are in rope_theta and rope_scaling."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters = {key: value for key, value in dict(found).items() if value is not None}
    older = parameters.pop("type", "default")
    parameters.setdefault("rope_type", older)
    if getattr(config, "rope_theta", None) is not None:
        parameters.setdefault("rope_theta", config.rope_theta)
    return parameters


def rope_types(config: Any) -> set[str]:
    """The RoPE types of all layers. Some configs have parameters for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in found.values() if isinstance(part, dict)] or [found]
    return {part.get("rope_type") or part.get("type") or "default" for part in parts}


def text_config(config: Any) -> Any:
    """The config of the text decoder, which may be inside another model."""
    return config.get_text_config(decoder=True)


def context_of(config: Any) -> int:
    """The model's context length in tokens."""
    max_tokens = getattr(text_config(config), "max_position_embeddings", None)
    if not (isinstance(max_tokens, int) and max_tokens > 0):
        what = f"{type(config).__name__} has no max_position_embeddings"
        raise Refused(f"kvlab.hf: {what}; give length=, the maximum number of tokens")
    return max_tokens


def refuse_no_decoder(name: str, config: Any) -> None:
    """Raises Refused for a model that is not a text decoder, or that this version of transformers would load as a
    different model."""

    def refuse(what: str, right: str) -> NoReturn:
        raise Refused(f"--model {name}: model_type {config.model_type!r}: {what}; {right}")

    architectures = config.architectures or ["ForCausalLM"]
    if config.is_encoder_decoder:
        refuse("it has an encoder and a decoder", "give a model that has only a decoder of text")
    if not any(word in architectures[0] for word in ("CausalLM", "LMHead", "ConditionalGeneration")):
        refuse(f"architecture {architectures[0]} is not supported", "give a decoder with a language-model head")
    if not isinstance(getattr(text_config(config), "vocab_size", None), int):
        refuse("its config has no vocab_size", "give a text decoder such as Llama")
    if TRANSFORMERS < (5, 0) and getattr(config, "rope_parameters", None):
        refuse(f"transformers {transformers.__version__} ignores rope_parameters", "install transformers 5")


def refuse_unsupported(name: str, config: Any) -> None:
    """Raises Refused for settings that change attention in a way that caches cannot represent."""
    family = config.model_type

    def refuse(what: str, right: str) -> NoReturn:
        raise Refused(f"--model {name}: {what}; {right}")

    if family not in FAMILIES:
        refuse(f"model_type {family!r} is not supported", f"supported are {', '.join(FAMILIES)}")
    if FAMILIES[family] not in (config.architectures or [FAMILIES[family]]):
        refuse(f"architecture {config.architectures[0]} is not supported", f"give a {FAMILIES[family]}")

    window = getattr(config, "sliding_window", None)
    right = "caches support full attention only, not sliding windows"
    if getattr(config, "use_sliding_window", False):
        refuse("use_sliding_window is true", right)
    if family == "mistral" and window is not None:
        refuse(f"sliding_window is {window}", right)
    if unknown := sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"}):
        refuse(f"layer_types names {', '.join(unknown)}", "only full_attention in every layer is supported")

    if TRANSFORMERS < (5, 0) and getattr(config, "rope_parameters", None):
        refuse(f"transformers {transformers.__version__} ignores rope_parameters", "install transformers 5")
    parameters = rope_parameters(config)
    if parameters["rope_type"] not in ROPE_TYPES:
        refuse(
            f"rope_type {parameters['rope_type']!r} is not supported",
            f"supported are {', '.join(ROPE_TYPES)}",
        )
    for partial in (parameters.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None)):
        if partial not in (None, 1):
            refuse(f"partial_rotary_factor is {partial}", "only heads that are rotated whole (1.0) are supported")
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        refuse(f"pretraining_tp is {config.pretraining_tp}", "only 1 is supported")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(name: str, dtype: str, attention: str | None, device: str) -> Any:
    """Loads a model. `attention`: transformers' attn_implementation; None: its default."""
    argument = "dtype" if TRANSFORMERS >= (4, 56) else "torch_dtype"
    options: dict[str, Any] = {argument: DTYPES.get(dtype, "auto"), "output_loading_info": True}
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        is_text_model = type(transformers.AutoConfig.from_pretrained(name)) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = transformers.AutoModelForCausalLM if is_text_model else transformers.AutoModelForImageTextToText
        loaded: Any = auto.from_pretrained(name, **options)
        model, loading = loaded
        model = model.to(device).eval()
    except Exception as error:
        raise Refused(f"--model {name}: {one_line(error)}") from None
    # transformers would fill such tensors with random numbers.
    for problem in ("missing_keys", "mismatched_keys"):
        if loading.get(problem):
            tensor = sorted(map(str, loading[problem]))[0]
            raise Refused(f"--model {name}: the weights have no tensor {tensor}, or one of another shape")
    if model.dtype not in DTYPES.values():
        raise Refused(f"--model {name}: dtype {name_of(model.dtype)} is not supported; use {', '.join(DTYPES)}")
    return model


def base_of(model: Any) -> Any:
    """The transformers model inside a PEFT model, with the adapters in its modules; otherwise the model itself."""
    for name, settings in getattr(model, "peft_config", {}).items():
        kind = getattr(settings.peft_type, "value", settings.peft_type)
        if settings.is_prompt_learning or kind == "ADAPTION_PROMPT":
            raise Refused(
                f"--model: the adapter {name} has PEFT's type {kind}, which adds keys and values; use an adapter that"
                " changes weights, such as LORA"
            )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_projection(module: Any, model: Any) -> torch.Tensor:
    """The weight [hidden, inputs] of an output projection. If the module has adapters or quantized weights, the weight
    is computed by applying the module to the unit vectors."""
    weight = getattr(module, "weight", None)
    if type(module) is torch.nn.Linear and type(weight) is torch.nn.Parameter and weight.is_floating_point():
        return weight
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), model.dtype)
    device = next((p.device for p in module.parameters()), model.device)
    units = torch.eye(getattr(module, "in_features", None) or len(module.weight), dtype=dtype, device=device)
    made: torch.Tensor = module(units) - module(torch.zeros_like(units[:1]))
    return made.T


def shape_of(config: Any) -> Shape:
    """The shape of a model that refuse_unsupported() accepts."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(config.num_hidden_layers, heads, config.num_key_value_heads, size)


# ---------------------------------------------------------------------------------------------
# The model's files


def file_of(model: str, name: str) -> pathlib.Path | None:
    """A file of the checkpoint, or None. `model`: a folder or a name on the hub."""
    try:
        found = cached_file(model, name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return pathlib.Path(found) if found else None


def weights_xxh3(model: str) -> str:
    """XXH3-64 of the weights file. If there are several files: the checksum of the files' checksums, in the order of
    the file names. Empty if there is no weights file."""
    file = file_of(model, "model.safetensors") or file_of(model, "model.safetensors.index.json")
    with refusing(f"--model {model}: "):
        return _kvlab.weights_xxh3(str(file.parent)) if file else ""
