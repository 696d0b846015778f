"""Tests tools/scripts/gguf_to_checkpoint.py: gguf_test.py KVLAB. Prints `skipped: …` without the gguf package."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

try:
    import gguf
    import numpy as np
except ImportError as missing:
    print(
        f"skipped: {sys.executable} cannot import {missing.name}; KVLAB_HF_PYTHON may name a Python that can"
    )
    sys.exit(0)

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "scripts" / "gguf_to_checkpoint.py"
KVLAB = sys.argv[1]
WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
SIZE = WIDTH // HEADS


def byte_letters():
    """The characters with which GPT-2's vocabulary writes the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(byte if byte in plain else next(other)) for byte in range(256)]


TOKENS = ["<|end|>", *byte_letters(), "th", "the"]


def shapes():
    layer = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (KV_HEADS * SIZE, WIDTH),
        "attn_v": (KV_HEADS * SIZE, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    found = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for number in range(LAYERS):
        found |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found


def fields():
    """The metadata: {key: (value, type)}."""
    kind = gguf.GGUFValueType
    sizes = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    found = {f"llama.{key}": (value, kind.UINT32) for key, value in sizes.items()}
    return found | {
        "general.name": ("mini", kind.STRING),
        "llama.attention.layer_norm_rms_epsilon": (1e-5, kind.FLOAT32),
        "llama.rope.freq_base": (10000.0, kind.FLOAT32),
        "tokenizer.ggml.model": ("gpt2", kind.STRING),
        "tokenizer.ggml.pre": ("gpt-2", kind.STRING),
        "tokenizer.ggml.tokens": (TOKENS, kind.ARRAY),
        "tokenizer.ggml.token_type": ([3] + [1] * (len(TOKENS) - 1), kind.ARRAY),
        "tokenizer.ggml.merges": (["t h", "th e"], kind.ARRAY),
        "tokenizer.ggml.bos_token_id": (0, kind.UINT32),
        "tokenizer.ggml.eos_token_id": (0, kind.UINT32),
    }


def tensors():
    draw = np.random.default_rng(1)
    found = {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes().items()}
    return {name: np.abs(values) if "norm" in name else values for name, values in found.items()}


def write_gguf(path, fields, tensors, architecture="llama", raw={}, order=gguf.GGUFEndian.LITTLE):
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    for key, (value, kind) in fields.items():
        writer.add_key_value(key, value, kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=raw.get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def min_limits():
    """Limits memory and processor time, so that a file cannot make the script allocate huge sizes."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


NORM_NAMES = {  # norms of Gemma 3: names in GGUF and in the checkpoint
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma3():
    """The fields and tensors of a Gemma 3 of seven layers. Its tokens 7 to 262 are bytes."""
    kind = gguf.GGUFValueType
    pieces = {"▁": -9.0, "t": -7.0, "h": -6.0, "e": -5.0, "th": -1.0, "he": -0.0, "the": -2.0, "▁the": -3.0}
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "  ", "   ", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    found = {key.replace("llama", "gemma3"): value for key, value in fields().items()}
    del found["tokenizer.ggml.merges"], found["tokenizer.ggml.pre"]
    found |= {
        "gemma3.block_count": (7, kind.UINT32),
        "gemma3.attention.key_length": (16, kind.UINT32),
        "gemma3.attention.sliding_window": (32, kind.UINT32),
        "tokenizer.ggml.model": ("llama", kind.STRING),
        "tokenizer.ggml.tokens": (tokens, kind.ARRAY),
        "tokenizer.ggml.token_type": ([3] * 3 + [2] + [4] * 3 + [6] * 256 + [1] * len(pieces), kind.ARRAY),
        "tokenizer.ggml.scores": ([-1000.0] * 7 + [0.0] * 256 + [*pieces.values()], kind.ARRAY),
        "tokenizer.ggml.add_space_prefix": (False, kind.BOOL),
        "tokenizer.ggml.add_bos_token": (True, kind.BOOL),
    }
    for number, name in enumerate(("padding", "eos", "bos", "unknown")):
        found[f"tokenizer.ggml.{name}_token_id"] = (number, kind.UINT32)
    draw = np.random.default_rng(2)
    shapes = {name: (16 if name in ("attn_q_norm", "attn_k_norm") else WIDTH,) for name in NORM_NAMES}
    shapes |= {"attn_q": (HEADS * 16, WIDTH), "attn_k": (32, WIDTH), "attn_v": (32, WIDTH), "ffn_gate": (INNER, WIDTH)}
    shapes |= {"attn_output": (WIDTH, HEADS * 16), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    shapes = {f"blk.{number}.{name}.weight": shape for number in range(7) for name, shape in shapes.items()}
    shapes |= {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    return found, {name: draw.normal(1, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def qwen2():
    """The fields and tensors of a Qwen2 whose output matrix is not the embedding, with two unused tokens."""
    kind = gguf.GGUFValueType
    tokens = ["<|end|>", "<tool_call>", *TOKENS[1:], "[PAD260]", "[PAD261]"]
    found = {key.replace("llama", "qwen2"): value for key, value in fields().items()}
    found |= {
        "qwen2.rope.freq_base": (1000000.0, kind.FLOAT32),
        "qwen2.attention.layer_norm_rms_epsilon": (1e-6, kind.FLOAT32),
        "tokenizer.ggml.pre": ("qwen2", kind.STRING),
        "tokenizer.ggml.tokens": (tokens, kind.ARRAY),
        "tokenizer.ggml.token_type": ([3, 4] + [1] * (len(tokens) - 4) + [5, 5], kind.ARRAY),
        "tokenizer.ggml.add_bos_token": (False, kind.BOOL),
    }
    draw = np.random.default_rng(3)
    weights = tensors() | {
        name: draw.normal(0, 0.2, (len(tokens), WIDTH)).astype(np.float32)
        for name in ("token_embd.weight", "output.weight")
    }
    for number in range(LAYERS):
        for name, size in (("q", WIDTH), ("k", KV_HEADS * SIZE), ("v", KV_HEADS * SIZE)):
            weights[f"blk.{number}.attn_{name}.bias"] = draw.normal(0, 50, size).astype(np.float32)
    return found, weights


def random_blocks(kind, rows, blocks, seed):
    """Rows of quantized blocks with random bytes. The bytes of scales are set so that scales are finite."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind.name, (0,))  # offsets in bytes
    draw = np.random.default_rng(seed)
    packed = draw.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in scales:
        values = draw.normal(0, 0.01, (rows, blocks, 1)).astype(np.float16)
        packed[:, :, at : at + 2] = values.view(np.uint8)
    return packed.reshape(rows, -1)


def read_tensor(folder, name):
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    words = np.frombuffer(data[8 + length + begin : 8 + length + end], "<u2").astype(np.uint32)
    return (words << 16).view(np.float32)


class GgufTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.at = pathlib.Path(folder.name)
        self.source, self.out = self.at / "model.gguf", self.at / "out"

    def convert(self):
        command = [sys.executable, SCRIPT, self.source, self.out]
        return subprocess.run(command, capture_output=True, text=True, preexec_fn=min_limits)

    def check_refused(self, words):
        done = self.convert()
        with self.subTest(words):
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertTrue(done.stderr[:-1].isprintable(), done.stderr)
            self.assertIn(words, done.stderr)
            self.assertIn(str(self.source), done.stderr)
            self.assertEqual([path.name for path in self.at.iterdir()], ["model.gguf"])

    def test_a_complete_file_becomes_a_checkpoint_that_runs(self):
        weights = tensors()
        write_gguf(self.source, fields(), weights)
        done = self.convert()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        config = json.loads((self.out / "config.json").read_text())
        self.assertEqual((config["head_dim"], config["num_key_value_heads"]), (SIZE, KV_HEADS))
        self.assertEqual((config["rms_norm_eps"], config["tie_word_embeddings"]), (1e-5, True))
        settings = json.loads((self.out / "tokenizer_config.json").read_text())
        self.assertEqual(settings["tokenizer_class"], "PreTrainedTokenizerFast")
        self.assertEqual((settings["bos_token"], settings["eos_token"]), ("<|end|>", "<|end|>"))

        found = read_tensor(self.out, "model.layers.1.self_attn.q_proj.weight")
        # GGUF stores the two elements of a rotated pair next to each other. In a checkpoint, they are half a head
        # apart.
        wanted = weights["blk.1.attn_q.weight"].reshape(HEADS, SIZE // 2, 2, WIDTH)
        wanted = np.concatenate((wanted[:, :, 0], wanted[:, :, 1]), axis=1).reshape(-1)
        np.testing.assert_allclose(found, wanted, rtol=2**-8)

        generate = [
            "generate",
            "--device",
            "cpu",
            "--model",
            self.out,
            "--prompt",
            "the then",
            "--max-new-tokens",
            "3",
        ]
        done = subprocess.run([KVLAB, *generate], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_gemma_3_becomes_the_checkpoint_of_transformers(self):
        keys, weights = gemma3()
        write_gguf(self.source, keys, weights, "gemma3")
        done = self.convert()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        config = json.loads((self.out / "config.json").read_text())
        self.assertEqual(config["layer_types"], [*["sliding_attention"] * 5, "full_attention", "sliding_attention"])
        found = [config[key] for key in ("model_type", "sliding_window", "head_dim", "query_pre_attn_scalar")]
        self.assertEqual(found, ["gemma3_text", 32, 16, 16])
        self.assertEqual((config["rope_theta"], config["rope_local_base_freq"]), (10000, 10000))
        for name, theirs in (NORM_NAMES | {"attn_q": "self_attn.q_proj", "ffn_down": "mlp.down_proj"}).items():
            # GGUF stores 1 + w for the weights w of norms. The rows of q have the same order in both.
            wanted = weights[f"blk.3.{name}.weight"].reshape(-1) - ("norm" in name)
            found = read_tensor(self.out, f"model.layers.3.{theirs}.weight")
            np.testing.assert_allclose(found, wanted, rtol=2**-8, err_msg=name)

        tokenizer = json.loads((self.out / "tokenizer.json").read_text())
        marks = ["▁▁", "▁"], ["▁", "▁▁"], ["▁", "▁"]
        merges = [*marks, ["h", "e"], ["t", "h"], ["th", "e"], ["t", "he"], ["▁", "the"]]
        self.assertEqual(tokenizer["model"]["merges"], merges)
        added = [(token["content"], token["special"]) for token in tokenizer["added_tokens"]]
        special = [(token, True) for token in ("<pad>", "<eos>", "<bos>", "<unk>")]
        self.assertEqual(added, special + [("\n", False), ("▁▁", False), ("▁▁▁", False)])
        self.assertEqual(tokenizer["post_processor"]["special_tokens"]["<bos>"]["ids"], [2])

    def test_a_qwen2_becomes_the_checkpoint_of_transformers(self):
        keys, weights = qwen2()
        write_gguf(self.source, keys, weights, "qwen2")
        done = self.convert()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        config = json.loads((self.out / "config.json").read_text())
        self.assertEqual((config["architectures"], config["model_type"]), (["Qwen2ForCausalLM"], "qwen2"))
        self.assertEqual((config["rope_theta"], config["rms_norm_eps"]), (1000000, 1e-6))
        self.assertEqual((config["tie_word_embeddings"], config["vocab_size"]), (False, len(TOKENS) + 3))
        self.assertNotIn("attention_bias", config)
        # The rows of q and k, and their biases, have the same order as in the checkpoint.
        parts = [(part, of) for part in "qkv" for of in ("weight", "bias")]
        names = {f"blk.1.attn_{part}.{of}": f"model.layers.1.self_attn.{part}_proj.{of}" for part, of in parts}
        names |= {"output.weight": "lm_head.weight", "token_embd.weight": "model.embed_tokens.weight"}
        for name, theirs in names.items():
            found = read_tensor(self.out, theirs)
            np.testing.assert_allclose(found, weights[name].reshape(-1), rtol=2**-8, err_msg=name)

        tokenizer = json.loads((self.out / "tokenizer.json").read_text())
        self.assertEqual(tokenizer["normalizer"], {"type": "NFC"})
        self.assertIn(r"|\p{N}|", tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"])
        self.assertEqual(len(tokenizer["model"]["vocab"]), len(TOKENS) + 1)
        added = [(token["content"], token["special"]) for token in tokenizer["added_tokens"]]
        self.assertEqual(added, [("<|end|>", True), ("<tool_call>", False)])
        self.assertIsNone(tokenizer["post_processor"])

        command = [KVLAB, "generate", "--device", "cpu", "--model", self.out, "--prompt", "the 12 then"]
        done = subprocess.run([*command, "--max-new-tokens", "3"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_qwen2_of_another_kind_is_refused(self):
        kind = gguf.GGUFValueType
        keys, weights = qwen2()
        bias, short = "blk.0.attn_k.bias", np.zeros(8, np.float32)
        for words, changed_keys, changed_weights in (
            (f"has no tensor {bias}", {}, {bias: None}),
            (f"tensor {bias} is [8]; it should be [16]", {}, {bias: short}),
            ("attn_output.bias is not part of a plain qwen2", {}, {"blk.0.attn_output.bias": short}),
            ("rope.scaling.type is not supported", {"qwen2.rope.scaling.type": ("yarn", kind.STRING)}, {}),
            ("eos_token_id is 260, a token that", {"tokenizer.ggml.eos_token_id": (260, kind.UINT32)}, {}),
        ):
            changed = {name: values for name, values in (weights | changed_weights).items() if values is not None}
            write_gguf(self.source, keys | changed_keys, changed, "qwen2")
            self.check_refused(words)

    def test_a_file_without_add_bos_token_gets_the_default_of_llama_cpp(self):
        kind = gguf.GGUFValueType
        llama3 = fields() | {"tokenizer.ggml.pre": ("llama-bpe", kind.STRING)}
        no_bos = llama3 | {"tokenizer.ggml.add_bos_token": (False, kind.BOOL)}
        keys, weights = gemma3()
        del keys["tokenizer.ggml.add_bos_token"]
        for case, adds, arguments in (
            ("Llama 3", True, (llama3, tensors())),
            ("Llama 3 without BOS", False, (no_bos, tensors())),
            ("GPT-2", False, (fields(), tensors())),
            ("SentencePiece", True, (keys, weights, "gemma3")),
        ):
            write_gguf(self.source, *arguments)
            done = self.convert()
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            tokenizer = json.loads((self.out / "tokenizer.json").read_text())
            self.assertEqual(tokenizer["post_processor"] is not None, adds, case)
            shutil.rmtree(self.out)

    def test_a_file_that_means_something_else_is_refused(self):
        kind = gguf.GGUFValueType
        scaled = fields() | {"llama.rope.scale_linear": (4.0, kind.FLOAT32)}
        write_gguf(self.source, scaled, tensors())
        self.check_refused("llama.rope.scale_linear is not supported")
        unsplit = fields()
        del unsplit["tokenizer.ggml.pre"]
        write_gguf(self.source, unsplit, tensors())
        self.check_refused("has no tokenizer.ggml.pre")
        write_gguf(self.source, fields(), tensors(), order=gguf.GGUFEndian.BIG)
        self.check_refused("has the other byte order")

    def test_quantized_tensors_equal_those_of_the_gguf_package(self):
        """Tests each type that occurs in files of the kind Q4_K_M. The script rounds values to bf16."""
        width = 256  # the K types have blocks of 256
        sizes = {"embedding_length": width, "feed_forward_length": width, "attention.head_count_kv": HEADS}
        keys = fields() | {f"llama.{key}": (value, gguf.GGUFValueType.UINT32) for key, value in sizes.items()}
        layer = {name: (width,) if "norm" in name else (width, width) for name in shapes()}
        layer["token_embd.weight"] = (len(TOKENS), width)
        weights = {name: np.ones(shape, np.float32) for name, shape in layer.items()}
        raw = {}
        tensors_of_mlp = [f"blk.{layer}.ffn_{part}.weight" for part in ("up", "gate", "down") for layer in (0, 1)]
        for number, name in enumerate(("Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_0", "Q8_0")):
            tensor, kind = tensors_of_mlp[number], gguf.GGMLQuantizationType[name]
            raw[tensor] = kind
            weights[tensor] = random_blocks(kind, width, width // gguf.GGML_QUANT_SIZES[kind][0], number)
        write_gguf(self.source, keys, weights, raw=raw)
        done = self.convert()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for tensor, kind in raw.items():
            wanted = gguf.quants.dequantize(weights[tensor], kind).astype(np.float64)
            block, part, _ = tensor.split(".", 1)[1].split(".")
            found = read_tensor(self.out, f"model.layers.{block}.mlp.{part[4:]}_proj.weight").reshape(width, width)
            with self.subTest(kind.name):
                self.assertGreater(np.abs(wanted).max(), 0)
                # bf16 has 8 significant bits, so rounding changes a value below 2^e by at most 2^(e - 9).
                _, exponent = np.frexp(wanted)
                self.assertTrue((np.abs(found - wanted) <= np.ldexp(1.0, exponent - 9)).all())

    def test_a_gemma_3_of_another_kind_is_refused(self):
        kind = gguf.GGUFValueType
        keys, weights = gemma3()
        scores, tokens = "tokenizer.ggml.scores", "tokenizer.ggml.tokens"
        for words, key, value, kind in (
            ("rope.scaling.type is not supported; a gemma3 ", "gemma3.rope.scaling.type", "linear", kind.STRING),
            ("softcapping is not supported", "gemma3.final_logit_softcapping", 30.0, kind.FLOAT32),
            ("sliding_window is 0", "gemma3.attention.sliding_window", 0, kind.UINT32),
            ("pattern is 0", "gemma3.attention.sliding_window_pattern", 0, kind.UINT32),
            ("a tokenizer that puts a space before", "tokenizer.ggml.add_space_prefix", True, kind.BOOL),
            ("a number for each", scores, keys[scores][0][1:], kind.ARRAY),
            ("a number for each", scores, keys[scores][0][1:] + [float("nan")], kind.ARRAY),
            ("a token of more than 1024", tokens, ["a" * 1025, *keys[tokens][0][1:]], kind.ARRAY),
            ("unknown_token_id is 4000", "tokenizer.ggml.unknown_token_id", 4000, kind.UINT32),
        ):
            write_gguf(self.source, keys | {key: (value, kind)}, weights, "gemma3")
            self.check_refused(words)

    def test_a_truncated_file_is_refused(self):
        write_gguf(self.source, fields(), tensors())
        whole = self.source.read_bytes()
        data = len(whole) - sum(values.nbytes for values in tensors().values())
        cuts = {0, 3, 4, 8, 23, 24, 40, len(whole) - 1, data, data + 100, *range(60, data, data // 12)}
        for size in sorted(cuts):
            self.source.write_bytes(whole[:size])
            self.check_refused("give a complete GGUF file")

    def test_impossible_counts_are_refused_at_once(self):
        write_gguf(self.source, fields(), tensors())
        whole = self.source.read_bytes()
        huge = struct.pack("<Q", 1 << 60)
        kinds = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32, len(TOKENS))
        array_offset = whole.index(kinds) + 8
        # Offsets of the counts of tensors and of keys, of the length of the first key, and of the length of an array.
        for at in (8, 16, 24, array_offset):
            self.source.write_bytes(whole[:at] + huge + whole[at + 8 :])
            self.check_refused("give a complete GGUF file")
        name = b"blk.0.attn_q.weight"
        dims = whole.index(name) + len(name) + 4
        for wide in ((1 << 60, 1 << 60), (1 << 32, 1 << 32), (0, 0)):
            self.source.write_bytes(whole[:dims] + struct.pack("<QQ", *wide) + whole[dims + 16 :])
            self.check_refused("")
        offset = dims + 16 + 4
        self.source.write_bytes(whole[:offset] + struct.pack("<Q", (1 << 64) - 32) + whole[offset + 8 :])
        self.check_refused("give a complete GGUF file")

    def test_unknown_types_are_refused(self):
        write_gguf(self.source, fields(), tensors())
        whole = self.source.read_bytes()
        name = b"blk.0.attn_q.weight"
        at = whole.index(name) + len(name) + 4 + 16
        for number, words in (
            (9999, "9999"),
            (int(gguf.GGMLQuantizationType.I32), "type I32 cannot be read"),
        ):
            self.source.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])
            self.check_refused(words)
        self.source.write_bytes(b"GGUF" + struct.pack("<I", 99) + whole[8:])
        self.check_refused("version 99")
        self.source.write_bytes(b"GGML" + whole[4:])
        self.check_refused("magic")

    def test_files_with_changed_bytes_are_refused_in_one_line_or_converted(self):
        """KVLAB_GGUF_MUTANTS in the environment sets the number of files (default: 200)."""
        spec = importlib.util.spec_from_file_location("gguf_to_checkpoint", SCRIPT)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        wholes = []
        for keys, weights, architecture in ((fields(), tensors(), "llama"), (*gemma3(), "gemma3"), (*qwen2(), "qwen2")):
            write_gguf(self.source, keys, weights, architecture)
            whole = self.source.read_bytes()
            wholes.append((whole, len(whole) - sum(values.nbytes for values in weights.values())))
        for seed in range(int(os.environ.get("KVLAB_GGUF_MUTANTS", "200"))):
            whole, header = wholes[seed % len(wholes)]
            mutant = bytearray(whole)
            draw = random.Random(seed)
            for _ in range(draw.choice((1, 1, 2, 5))):
                at, size = draw.randrange(header), draw.choice((1, 1, 4, 8))
                number = draw.choice((draw.getrandbits(8 * size), 0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1))
                mutant[at : at + size] = number.to_bytes(size, "little")
            self.source.write_bytes(mutant)
            said = io.StringIO()
            with (
                self.subTest(seed),
                unittest.mock.patch.object(sys, "argv", ["", str(self.source), str(self.out)]),
                contextlib.redirect_stderr(said),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                code = script.main()
                self.assertIn((code, said.getvalue().count("\n")), ((0, 0), (2, 1)), said.getvalue())
                self.assertEqual({path.name for path in self.at.iterdir()} - {"out"}, {"model.gguf"})
                self.assertEqual(self.out.exists(), code == 0)
            shutil.rmtree(self.out, ignore_errors=True)

    def test_other_architectures_are_refused_by_name(self):
        write_gguf(self.source, fields(), tensors(), "gemma")
        self.check_refused("general.architecture is 'gemma'; it should be llama, qwen2 or gemma3")

    def check_field(self, words, key, value, kind):
        changed = fields() | {key: (value, kind)}
        if kind is None:
            del changed[key]
        write_gguf(self.source, changed, tensors())
        self.check_refused(words)

    def test_impossible_metadata_is_refused_by_key(self):
        kind = gguf.GGUFValueType
        epsilon, base = "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"
        tokens, merges, types = (f"tokenizer.ggml.{key}" for key in ("tokens", "merges", "token_type"))
        for words, key, value, kind in (
            ("has no llama.block_count", "llama.block_count", None, None),
            ("block_count is 0", "llama.block_count", 0, kind.UINT32),
            ("block_count is 16000000", "llama.block_count", 16000000, kind.UINT32),
            ("has no tensor blk.2", "llama.block_count", 3, kind.UINT32),
            ("its type should be int", "llama.block_count", "two", kind.STRING),
            ("its type should be int", "llama.block_count", True, kind.BOOL),
            ("its type should be int", "llama.attention.head_count", [4, 4], kind.ARRAY),
            ("is 18446744073709551615", "llama.embedding_length", (1 << 64) - 1, kind.UINT64),
            ("cannot share 3 KV heads", "llama.attention.head_count_kv", 3, kind.UINT32),
            ("rope.dimension_count is 4", "llama.rope.dimension_count", 4, kind.UINT32),
            ("rope.scaling.type is not supported", "llama.rope.scaling.type", "yarn", kind.STRING),
            ("expert_count is not supported", "llama.expert_count", 8, kind.UINT32),
            ("should be positive", epsilon, float("nan"), kind.FLOAT32),
            ("should be positive", epsilon, -1.0, kind.FLOAT32),
            ("should be positive", base, float("inf"), kind.FLOAT32),
            ("its type should be float", base, "much", kind.STRING),
            ("model is 'bert'; it should be gpt2 or llama", "tokenizer.ggml.model", "bert", kind.STRING),
            ("pre is 'dbrx'", "tokenizer.ggml.pre", "dbrx", kind.STRING),
            ("list of texts", tokens, list(range(len(TOKENS))), kind.ARRAY),
            ("should be different", tokens, ["a"] * len(TOKENS), kind.ARRAY),
            ("token_type[0] is 7", types, [7] * len(TOKENS), kind.ARRAY),
            ("token_type", types, [1], kind.ARRAY),
            ("merges[1] should be two", merges, ["t h", "the"], kind.ARRAY),
            ("list of texts", merges, [1, 2], kind.ARRAY),
            ("bos_token_id is 4000", "tokenizer.ggml.bos_token_id", 4000, kind.UINT32),
            ("eos_token_id is -1", "tokenizer.ggml.eos_token_id", -1, kind.INT32),
            ("its type should be str", "general.name", 5, kind.UINT32),
        ):
            self.check_field(words, key, value, kind)

    def test_names_with_control_characters_are_escaped(self):
        write_gguf(self.source, fields(), tensors() | {"\x1b[2Jboo\nexit 0": np.zeros(32, np.float32)})
        self.check_refused("boo")
        write_gguf(
            self.source,
            fields() | {"general.name": ("\x1b[2Jmini\nlicence", gguf.GGUFValueType.STRING)},
            tensors(),
        )
        done = self.convert()
        self.assertEqual((done.returncode, done.stdout.count("\n")), (0, 1))
        self.assertTrue(done.stdout[:-1].isprintable(), done.stdout)

    def test_tensors_that_do_not_fit_are_refused_by_name(self):
        name = "blk.1.ffn_up.weight"
        broken = np.ones((INNER, WIDTH), np.float32)
        broken[3, 4] = np.inf
        for words, change in (
            (f"tensor {name} is [64, 16]; it should be [64, 32]", {name: np.zeros((INNER, 16), np.float32)}),
            (f"tensor {name} is [2048]; it should be [64, 32]", {name: np.zeros(INNER * WIDTH, np.float32)}),
            (f"tensor {name} holds a value that is not finite", {name: broken}),
            (f"has no tensor {name}", {name: None}),
            (
                "tensor blk.1.attn_q.bias is not part of a plain llama",
                {"blk.1.attn_q.bias": np.zeros(32, np.float32)},
            ),
        ):
            changed = {key: values for key, values in (tensors() | change).items() if values is not None}
            write_gguf(self.source, fields(), changed)
            self.check_refused(words)

    def test_an_infinite_scale_gives_a_one_line_error(self):
        weights = tensors()
        name = "blk.0.attn_q.weight"
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(weights[name], kind)
        packed.reshape(-1)[:2] = [0x00, 0x7C]  # the scale of the first block is infinite in float16
        packed.reshape(-1)[2] = 0
        write_gguf(self.source, fields(), weights | {name: packed}, raw={name: kind})
        self.check_refused(f"tensor {name} holds a value that is not finite")

    def test_an_existing_folder_is_not_changed(self):
        write_gguf(self.source, fields(), tensors())
        self.out.mkdir()
        (self.out / "mine").write_text("1")
        done = self.convert()
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("exists", done.stderr)
        self.assertEqual([path.name for path in self.out.iterdir()], ["mine"])

    def test_a_missing_file_is_refused(self):
        done = self.convert()
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
        self.assertIn("no such file", done.stderr)
        self.assertEqual(list(self.at.iterdir()), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
