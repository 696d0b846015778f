"""The files from which hostile cases are made: the bundled model, a miniature with sliding windows, their traces, and
runs. These files are made once."""

import json
import pathlib
import random
import shutil
import struct
import subprocess

PROMPT = "Once upon a time there was a small fox who lived near the river and the fox said that it was late again. "


def safetensors(tensors):
    """The bytes of a safetensors file with the tensors {name: (dtype, shape, bytes)}."""
    header, rest = {}, b""
    for name, (dtype, shape, data) in sorted(tensors.items()):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(rest), len(rest) + len(data)]}
        rest += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + rest


def write_windows_model(folder, tokenizer):
    """Writes a miniature of Qwen 3. One of its two layers has a sliding window, so its traces have format 3."""
    draws = random.Random(7)
    hidden, heads, kv_heads, size, mlp, vocab = 32, 4, 2, 64, 48, 8192

    def tensor(*shape, one=False):
        count = 1
        for n in shape:
            count *= n
        # The bfloat16 numbers are the upper halves of the float32 numbers.
        floats = [1.0] * count if one else [draws.gauss(0, 0.08) for _ in range(count)]
        data = struct.pack(f"<{count}f", *floats)
        return "BF16", list(shape), b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))

    weights = {"model.embed_tokens.weight": tensor(vocab, hidden), "model.norm.weight": tensor(hidden, one=True)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": tensor(heads * size, hidden),
            at + "self_attn.k_proj.weight": tensor(kv_heads * size, hidden),
            at + "self_attn.v_proj.weight": tensor(kv_heads * size, hidden),
            at + "self_attn.o_proj.weight": tensor(hidden, heads * size),
            at + "self_attn.q_norm.weight": tensor(size, one=True),
            at + "self_attn.k_norm.weight": tensor(size, one=True),
            at + "mlp.gate_proj.weight": tensor(mlp, hidden),
            at + "mlp.up_proj.weight": tensor(mlp, hidden),
            at + "mlp.down_proj.weight": tensor(hidden, mlp),
            at + "input_layernorm.weight": tensor(hidden, one=True),
            at + "post_attention_layernorm.weight": tensor(hidden, one=True),
        }
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": True, "vocab_size": vocab, "torch_dtype": "bfloat16", "attention_bias": False,
        "sliding_window": 12, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"],
        "max_window_layers": 1,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(weights))
    shutil.copy(tokenizer, folder)


class Bases:
    def __init__(self, kvlab, source, folder):
        self.kvlab, self.folder = kvlab, pathlib.Path(folder)
        self.tiny = pathlib.Path(source, "engine/models/tiny")
        self.windows = self.folder / "windows"
        write_windows_model(self.windows, self.tiny / "tokenizer.json")
        (self.folder / "text").write_text(PROMPT * 6)
        self.trace2, self.trace3 = self.folder / "trace2", self.folder / "trace3"
        prompt = PROMPT * 2
        for model, out in ((self.windows, self.trace3), (self.tiny, self.trace2)):
            self._run("capture", "--model", model, "--prompt", prompt, "--max-new-tokens", "20", "--out", out)
        self._run("replay", "--trace", self.trace3, "--policy", "h2o,lru", "--budget", "8,16,24,32", "--out", self.folder / "run")
        common = ("--text", self.folder / "text", "--policy", "h2o", "--budget", "16", "--max-tokens", "60", "--prompt-tokens", "30")
        self._run("eval", "--model", self.windows, *common, "--out", self.folder / "eval")
        self._run("deploy", self.folder / "run", "--budget", "16", "--out", self.folder / "policy.json")
        for trace, formats in ((self.trace3, "kvlab"), (self.trace2, "transformers")):
            self._run("plan", "--trace", trace, "--budget", "6bits", "--formats", formats, "--out", self.folder / f"{formats}.json")
        self._run("plan", "--trace", self.trace2, "--centre-out", self.folder / "centre.safetensors")
        self._run("plan", self.folder / "run", "--by", "head", "--policy", "h2o", "--budget", "16", "--out", self.folder / "budgets.json")
        (self.folder / "link.json").write_text(json.dumps({
            "bench": "link", "format": 1, "device": "a GPU", "read_bytes_per_second": 4.5e12, "copy_bytes_per_second": 55e9,
            "launch_microseconds": 3.0, "fetches": [
                {"row_bytes": size, "rows": rows, "microseconds": 3 + size * rows / 5e4} for size in (128, 512) for rows in (64, 4096)],
        }))  # fmt: skip

    def _run(self, *words):
        done = subprocess.run([self.kvlab, *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"a base cannot be made: {' '.join(map(str, words))}: exit code {done.returncode}: {done.stderr}")
