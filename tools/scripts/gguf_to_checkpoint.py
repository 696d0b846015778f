#!/usr/bin/env python3
"""Converts a GGUF file to a checkpoint: config.json, model.safetensors (bf16), tokenizer.json.

    python3 tools/scripts/gguf_to_checkpoint.py MODEL.gguf OUT

It supports the architectures llama, qwen2 and gemma3 (text only) with byte-level or SentencePiece BPE, in any
quantization that the gguf package can dequantize. It refuses other architectures and tokenizers and names them. For bad
input it prints one line, exits with 2, and leaves no files.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile

try:
    import gguf
    import numpy as np
except ImportError as missing:
    print(f"gguf_to_checkpoint.py: cannot import {missing.name}: pip install gguf numpy", file=sys.stderr)
    sys.exit(2)

# How a text is split before BPE. PRE_TOKENIZERS has llama.cpp's names.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit alone


def split(pattern):
    """A pre-tokenizer that splits a text by a regular expression, as OpenAI's tokenizers do."""
    matches = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [matches, {**BYTE_LEVEL, "use_regex": False}]}


PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "llama-bpe": split(LLAMA3_SPLIT),
    "qwen2": split(QWEN2_SPLIT),
}
# A GGUF file does not contain the tokenizer's normalizer. Hugging Face's tokenizers of all Qwen2 models have this one.
NORMALIZERS = {"qwen2": {"type": "NFC"}}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens
MAX_CHARACTERS = 1024  # of a SentencePiece token; limited because every split of a token into two is tried
SPACE = "\u2581"  # SentencePiece's character for a space
# Keys of an architecture that change what the model computes. A file that has one is refused.
# `rope.scale_linear` is the name that files from before `rope.scaling` use.
UNSUPPORTED = (
    "rope.scaling",
    "rope.scale_linear",
    "expert",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


class Refused(Exception):
    """Bad input. The message is one line: what is wrong, where, and what would be right."""


def one_line(error, max_length=300):
    """The error as printable text on one line, because names in a file may contain anything."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return text if len(text) <= max_length else text[:max_length] + "..."


def reason_of(error):
    """Says why a file cannot be read. If the gguf package found the fault, this is the error's message. If numpy found
    it, it is another text, because numpy's message is about arrays and not about the file."""
    where = error.__traceback__
    while where.tb_next:
        where = where.tb_next
    # `enum` raises for a tensor type that the package does not know, and names it.
    found_by = where.tb_frame.f_globals["__name__"].partition(".")[0]
    known = isinstance(error, (ValueError, KeyError)) and found_by in ("gguf", "enum", __name__)
    if known and not any(word in str(error) for word in ("dtype", "array", "buffer", "shape")):
        return f"cannot be read: {one_line(error, 150)}"
    return "cannot be read: its header or its tensors are damaged"


class Reader(gguf.GGUFReader):
    """A reader that refuses a file whose data would lie beyond its end. The gguf package's own reader treats such data
    as empty."""

    def _get(self, offset, dtype, count=1, override_order=None):
        values = super()._get(offset, dtype, count, override_order)
        if len(values) != int(count):
            raise ValueError(f"it is truncated: it ends at byte {len(self.data)}, but its header describes more data")
        return values


class Metadata:
    """The file's keys. Each is read with the type that it must have."""

    def __init__(self, reader):
        self.fields = reader.fields

    def get(self, key, kind, default=None):
        if key not in self.fields:
            if default is None:
                raise Refused(f"has no {key}")
            return default
        value = self.fields[key].contents()
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise Refused(f"{key} is {one_line(repr(value), 40)}; its type should be {kind.__name__}")
        return value

    def size(self, key, default=None):
        value = self.get(key, int, default)
        if not 0 < value < 1 << 24:
            raise Refused(f"{key} is {value}; it should be from 1 to 2^24")
        return value

    def positive(self, key, default=None):
        """Returns a positive float32 as the float with the shortest notation: 0.1 and not 0.10000000149."""
        value = self.get(key, float, default)
        if not 0 < value < float("inf"):
            raise Refused(f"{key} is {value}; it should be positive and finite")
        return float(np.format_float_positional(np.float32(value), unique=True))

    def texts(self, key):
        values = self.get(key, list)
        if not values or not all(isinstance(value, str) for value in values):
            raise Refused(f"{key} should be a list of texts")
        return values

    def token(self, key):
        value, count = self.get(key, int), len(self.texts("tokenizer.ggml.tokens"))
        if not 0 <= value < count:
            raise Refused(f"{key} is {value}, outside the vocabulary of {count}")
        return value


def llama_config(meta, config):
    return {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def qwen2_config(meta, config):
    return {"hidden_act": "silu", "use_sliding_window": False}


def gemma3_config(meta, config):
    """Adds settings that the file omits because all Gemma 3 models without scaled rotation share them."""
    period = meta.size("gemma3.attention.sliding_window_pattern", 6)
    full = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": meta.size("gemma3.attention.sliding_window"),
        "layer_types": full,
        "rope_local_base_freq": meta.positive("gemma3.rope.freq_base_swa", 10000.0),
        "rope_scaling": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "pad_token_id": meta.token("tokenizer.ggml.padding_token_id"),
    }


@dataclasses.dataclass(frozen=True)
class Architecture:
    model_class: str
    model_type: str
    config: object  # function (metadata, config so far) that returns the keys of this architecture only
    norms: dict  # norms of a layer, by GGUF's name
    interleaved: bool  # whether GGUF interleaves the two halves of a rotation in rows of q and k
    norm_offset: int  # constant that GGUF adds to the weights of norms
    qkv_bias: bool = False  # whether q, k and v have biases


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        llama_config,
        {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        interleaved=True,
        norm_offset=0,
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        qwen2_config,
        {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        interleaved=False,
        norm_offset=0,
        qkv_bias=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        gemma3_config,
        {
            "attn_norm": "input_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        interleaved=False,
        norm_offset=1,
    ),
}


def one_of(names):
    *others, last = names
    return f"{', '.join(others)} or {last}"


def read_architecture(meta):
    name = meta.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise Refused(f"general.architecture is '{name}'; it should be {one_of(ARCHITECTURES)}")
    for key in meta.fields:
        if key.startswith(tuple(f"{name}.{part}" for part in UNSUPPORTED)):
            raise Refused(f"{key} is not supported; a {name} model without it can be converted")
    return name


def read_config(meta, name):
    architecture = ARCHITECTURES[name]
    heads, width = meta.size(f"{name}.attention.head_count"), meta.size(f"{name}.embedding_length")
    kv_heads = meta.size(f"{name}.attention.head_count_kv", heads)
    head_size = meta.size(f"{name}.attention.key_length", width // heads or 1)
    if heads % kv_heads or head_size % 2:
        raise Refused(
            f"{heads} heads ({name}.attention.head_count) of size {head_size} cannot share {kv_heads} KV heads"
            " (head_count_kv); heads should be a multiple of KV heads, and their size even"
        )
    rotated = meta.size(f"{name}.rope.dimension_count", head_size)
    if rotated != head_size:
        raise Refused(f"{name}.rope.dimension_count is {rotated}; it should be the head size, {head_size}")
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_size": width,
        "intermediate_size": meta.size(f"{name}.feed_forward_length"),
        "num_hidden_layers": meta.size(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": meta.size(f"{name}.context_length"),
        "rms_norm_eps": meta.positive(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.positive(f"{name}.rope.freq_base", 10000.0),
        "vocab_size": len(meta.texts("tokenizer.ggml.tokens")),
        "bos_token_id": meta.token("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.token("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    return config | architecture.config(meta, config)


def added_token(number, text, kind):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, **plain, "special": kind != USER_DEFINED}


def byte_level(meta, tokens, kinds):
    """The parts of a GPT-2 style tokenizer. The file contains the merges, and the name of the pre-tokenizer."""
    if "tokenizer.ggml.pre" not in meta.fields:  # written before April 2024
        raise Refused("has no tokenizer.ggml.pre, so how texts are split is not known; convert the model again")
    pre = meta.get("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise Refused(f"tokenizer.ggml.pre is '{pre}'; it should be one of {', '.join(PRE_TOKENIZERS)}")
    merges = [merge.split(" ") for merge in meta.texts("tokenizer.ggml.merges")]
    for number, merge in enumerate(merges):
        if len(merge) != 2:
            raise Refused(f"tokenizer.ggml.merges[{number}] should be two tokens with a space between them")
    return {
        "normalizer": NORMALIZERS.get(pre),
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "decoder": {**BYTE_LEVEL, "add_prefix_space": True},
        "model": {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre == "llama-bpe"},
        "merges": merges,
    }


def merges_of_scores(tokens, kinds, scores):
    """All merges of two pieces into a third. The third piece with the highest score comes first; of equal scores, the
    merge with the longest parts."""
    pieces = {text: score for text, kind, score in zip(tokens, kinds, scores) if kind == NORMAL}
    # User-defined tokens are matched before all others.
    pieces |= {text: float("inf") for text, kind in zip(tokens, kinds) if kind == USER_DEFINED}
    merges = []
    for text in pieces:
        halves = ([text[:at], text[at:]] for at in range(1, len(text)))
        merges += [(left, right) for left, right in halves if left in pieces and right in pieces]
    return sorted(merges, key=lambda halves: (-pieces["".join(halves)], *(-len(half) for half in halves)))


def sentencepiece(meta, tokens, kinds):
    """The parts of a SentencePiece tokenizer with byte fallback. The merges follow from the scores."""
    if meta.get("tokenizer.ggml.add_space_prefix", bool, True):
        raise Refused(
            "tokenizer.ggml.add_space_prefix is not false; a tokenizer that puts a space before texts is "
            "not supported"
        )
    scores = meta.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(isinstance(score, float) and score == score for score in scores):
        raise Refused("tokenizer.ggml.scores should be a number for each token")
    if max(map(len, tokens)) > MAX_CHARACTERS:
        raise Refused(f"tokenizer.ggml.tokens has a token of more than {MAX_CHARACTERS} characters")
    for number, kind in enumerate(kinds):
        if kind == USER_DEFINED:  # only user-defined tokens are written with spaces
            tokens[number] = tokens[number].replace(" ", SPACE)
    space, mark = {"String": " "}, {"String": SPACE}
    steps = [{"type": "Replace", "pattern": mark, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unk = tokens[meta.token("tokenizer.ggml.unknown_token_id")]
    return {
        "normalizer": {"type": "Replace", "pattern": space, "content": SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"unk_token": unk, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
        "merges": merges_of_scores(tokens, kinds, scores),
    }


TOKENIZERS = {  # with the kinds of tokens that they have
    "gpt2": (byte_level, (NORMAL, CONTROL, USER_DEFINED, UNUSED)),
    "llama": (sentencepiece, (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE)),
}


def first_token(number, text):
    """The post-processor that adds the BOS token before a text."""
    first, rest = {"id": text, "type_id": 0}, {"id": "A", "type_id": 0}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": first}, {"Sequence": rest}],
        "pair": [{"SpecialToken": first}, {"Sequence": rest}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }


def read_tokenizer(meta):
    model = meta.get("tokenizer.ggml.model", str)
    if model not in TOKENIZERS:
        raise Refused(f"tokenizer.ggml.model is '{model}'; it should be {' or '.join(TOKENIZERS)}")
    parts_of, allowed = TOKENIZERS[model]
    tokens = meta.texts("tokenizer.ggml.tokens")
    kinds = meta.get("tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise Refused("tokenizer.ggml.tokens should each have a token_type")
    for number, kind in enumerate(kinds):
        if kind not in allowed:
            raise Refused(f"tokenizer.ggml.token_type[{number}] is {kind}; it should be one of {allowed}")
    for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"):
        if kinds[meta.token(key)] == UNUSED:
            raise Refused(f"{key} is {meta.token(key)}, a token that tokenizer.ggml.token_type marks as unused")
    parts = parts_of(meta, tokens, kinds)
    if len(set(tokens)) != len(tokens):
        raise Refused("tokenizer.ggml.tokens has the same token twice; all should be different")
    # Without the key, llama.cpp adds the BOS token for SentencePiece and for Llama 3.
    adds_bos = model == "llama" or (model == "gpt2" and meta.get("tokenizer.ggml.pre", str) == "llama-bpe")
    bos = meta.get("tokenizer.ggml.add_bos_token", bool, adds_bos) and meta.token("tokenizer.ggml.bos_token_id")
    # Unused tokens only fill the rows of the embedding. Checkpoints leave them out of the vocabulary.
    used = [(i, text, kind) for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind != UNUSED]
    added = [token for token in used if token[2] not in (NORMAL, BYTE)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(*token) for token in added],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": None if bos is False else first_token(bos, tokens[bos]),
        "decoder": parts["decoder"],
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            **parts["model"],
            "vocab": {text: i for i, text, _ in used},
            "merges": parts["merges"],
        },
    }


def wanted_tensors(config, architecture):
    """Name in GGUF -> (Hugging Face's name, shape, heads whose rows are interleaved)."""
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    interleaved = (heads, kv_heads) if architecture.interleaved else (0, 0)
    norms = {
        name: (theirs, (size if theirs.startswith("self_attn") else width,), 0)
        for name, theirs in architecture.norms.items()
    }
    layer = {
        "attn_norm": norms["attn_norm"],
        "attn_q": ("self_attn.q_proj", (heads * size, width), interleaved[0]),
        "attn_k": ("self_attn.k_proj", (kv_heads * size, width), interleaved[1]),
        "attn_v": ("self_attn.v_proj", (kv_heads * size, width), 0),
        "attn_output": ("self_attn.o_proj", (width, heads * size), 0),
        "ffn_norm": norms["ffn_norm"],
        "ffn_gate": ("mlp.gate_proj", (inner, width), 0),
        "ffn_up": ("mlp.up_proj", (inner, width), 0),
        "ffn_down": ("mlp.down_proj", (width, inner), 0),
    } | norms
    wanted = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, width), 0),
        "output_norm.weight": ("model.norm.weight", (width,), 0),
    }
    if not config["tie_word_embeddings"]:
        wanted["output.weight"] = ("lm_head.weight", (vocab, width), 0)
    for number in range(config["num_hidden_layers"]):
        for name, (theirs, shape, interleaved) in layer.items():
            wanted[f"blk.{number}.{name}.weight"] = (f"model.layers.{number}.{theirs}.weight", shape, interleaved)
            if architecture.qkv_bias and name in ("attn_q", "attn_k", "attn_v"):
                wanted[f"blk.{number}.{name}.bias"] = (f"model.layers.{number}.{theirs}.bias", shape[:1], interleaved)
    return wanted


def as_bf16(values):
    """Rounds to bfloat16, to nearest, ties to even; returns the bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def converted(tensor, shape, interleaved, norm_offset):
    """The tensor's dequantized weights in `shape`."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        why = one_line(error) if isinstance(error, NotImplementedError) else "its size is not a whole number of blocks"
        raise Refused(f"tensor {tensor.name}: type {tensor.tensor_type.name} cannot be read: {why}")
    if values.shape != shape:
        raise Refused(f"tensor {tensor.name} is {list(values.shape)}; it should be {list(shape)}")
    if not np.isfinite(values).all():
        raise Refused(f"tensor {tensor.name} holds a value that is not finite")
    if interleaved:
        values = values.reshape(interleaved, shape[0] // interleaved // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
    return as_bf16(values - norm_offset if len(shape) == 1 else values)


def read_weights(reader, config, name):
    architecture = ARCHITECTURES[name]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if config["num_hidden_layers"] > len(tensors):
        raise Refused(
            f"{name}.block_count is {config['num_hidden_layers']}, but the file has only {len(tensors)} tensors, "
            "those of fewer layers"
        )
    wanted = wanted_tensors(config, architecture)
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise Refused(f"has no tensor {missing[0]}")
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise Refused(f"tensor {unknown[0]} is not part of a plain {name} model")
    weights = {}
    for ours, (theirs, shape, interleaved) in wanted.items():
        weights[theirs] = converted(tensors[ours], shape, interleaved, architecture.norm_offset)
    return weights


def write_safetensors(weights, path):
    """Writes a safetensors file: the length of the JSON header, the header, and the tensors one after another."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, values in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in weights.values():
            file.write(values.tobytes())


def convert(source, folder):
    try:
        reader = Reader(source)
        for tensor in reader.tensors:  # an offset may overflow
            if tensor.data_offset < reader.data_offset:
                raise ValueError(f"tensor {tensor.name} begins before the data")
    except FileNotFoundError:
        raise Refused("there is no such file")
    except Exception as error:  # the package defines no error for a broken file
        raise Refused(f"{reason_of(error)}; give a complete GGUF file")
    if reader.byte_order == "S":  # the gguf package dequantizes only the host's byte order
        raise Refused("has the other byte order than this computer; convert the model again without --bigendian")
    meta = Metadata(reader)
    architecture = read_architecture(meta)
    config, tokenizer = read_config(meta, architecture), read_tokenizer(meta)
    weights = read_weights(reader, config, architecture)
    template = meta.get("tokenizer.chat_template", str, "-")
    # With this class transformers uses tokenizer.json unchanged, without rules of the model's type.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if template == "-" else {"chat_template": template})
    for key in ("bos", "eos", "pad"):
        if f"{key}_token_id" in config:
            settings[f"{key}_token"] = meta.texts("tokenizer.ggml.tokens")[config[f"{key}_token_id"]]
    for name, value, indent in [
        ("config", config, 1),
        ("tokenizer", tokenizer, None),
        ("tokenizer_config", settings, 1),
    ]:
        text = json.dumps(value, ensure_ascii=False, indent=indent) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    write_safetensors(weights, folder / "model.safetensors")
    name, licence = meta.get("general.name", str, source.stem), meta.get("general.license", str, "not said")
    return one_line(name), one_line(licence)


def main():
    if len(sys.argv) != 3:
        print("usage: gguf_to_checkpoint.py MODEL.gguf OUT", file=sys.stderr)
        return 2
    source, out = (pathlib.Path(argument) for argument in sys.argv[1:])
    work = None
    try:
        if out.exists():
            raise Refused(f"{out} exists already; remove it, or give another directory")
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        with np.errstate(all="ignore"):  # results are checked below, and reported in one line
            name, licence = convert(source, work)
        os.chmod(work, 0o755)
        os.rename(work, out)
    except (Refused, OSError, ValueError, IndexError, KeyError) as error:
        print(f"gguf_to_checkpoint.py: {source}: {one_line(error)}", file=sys.stderr)
        return 2
    finally:
        if work and work.exists():
            shutil.rmtree(work, ignore_errors=True)
    print(f"{out}: {name}, licence {licence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
