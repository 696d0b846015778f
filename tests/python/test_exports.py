"""Passes the options that `kvlab export` prints to the engines' own parsers.

The package xllamacpp contains llama.cpp's argument parser, but no Python interface for it, so a child process calls the
C++ function. For transformers, the test constructs the cache. vLLM and TensorRT-LLM cannot be installed without a GPU's
packages, so their options are compared with the published names and values.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

Export = Callable[..., str]


@pytest.fixture
def export(command: Any, tmp_path: pathlib.Path) -> Export:
    """The options of an engine for a plan of four layers, without the line end."""

    def options(tiers: str, engine: str, **more: Any) -> str:
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps({"format": 1, "tiers": tiers, "layers": [0, 1, 2, 3], **more}))
        result = command("export", plan, "--for", engine)
        assert result.returncode == 0, result.stderr
        return result.stdout.rstrip("\n")

    return options


# A program that reads lines of JSON, each a list of arguments, and writes what llama.cpp parses from each list. The
# function common_params_parse fills the C++ object inside a Python object CommonParams. The C++ object begins after
# Python's object header; its first numbers are n_predict, n_ctx and n_batch. The value of LLAMA_EXAMPLE_SERVER is found
# by trying an option that only the server has.
LLAMA_PARSER = """
import ctypes, json, sys, xllamacpp

extension = ctypes.CDLL(sys.modules["xllamacpp.xllamacpp"].__file__)
parse = extension._Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E
parse.restype = ctypes.c_bool
parse.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]


def parsed(words, example):
    params = xllamacpp.CommonParams()
    params.n_predict, params.n_ctx, params.n_batch = 11, 22, 33
    begin = id(params) + object.__basicsize__
    assert list((ctypes.c_int32 * 3).from_address(begin)) == [11, 22, 33], "the layout of CommonParams has changed"
    words = [word.encode() for word in ("llama-server", "--model", "x.gguf", *words)]
    if not parse(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None), begin, example, None):
        return None
    return [params.cache_type_k.name, params.cache_type_v.name, params.flash_attn_type.name]


server = next(example for example in range(20) if parsed(["--slots"], example))
for line in sys.stdin:
    print("parsed", json.dumps(parsed(json.loads(line), server)), flush=True)
"""


def parsed_by_llama(arguments: list[list[str]]) -> list[list[str] | None]:
    """The types of keys and values, and the use of flash attention, for each list of arguments; None if refused."""
    given = "".join(json.dumps(words) + "\n" for words in arguments)
    child = subprocess.run([sys.executable, "-c", LLAMA_PARSER], input=given, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [
        json.loads(line.removeprefix("parsed ")) for line in child.stdout.splitlines() if line.startswith("parsed ")
    ]


def test_llama_cpp_parses_every_pair_of_formats(export: Export) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    kinds = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
    types_of = {"16": "GGML_TYPE_F16"} | {kind + end: f"GGML_TYPE_{kind.upper()}" for kind in kinds for end in ("", "_rot")}
    assert {one.name for one in xllamacpp.ggml_type} >= set(types_of.values())
    for end in ("_rot", ""):
        pairs = list(itertools.product(["16", *(kind + end for kind in kinds)], repeat=2))
        texts = [export("/".join(pair) if pair[0] != pair[1] else pair[0], "llama.cpp") for pair in pairs]
        lines = [text.splitlines() for text in texts]
        # llama.cpp rotates quantized keys and values unless this environment variable forbids it.
        environment = ["# environment: LLAMA_ATTN_ROT_DISABLE=1"]
        assert [one[:-1] for one in lines] == [[] if end or pair == ("16", "16") else environment for pair in pairs]
        parsed = parsed_by_llama([one[-1].split() for one in lines])
        assert parsed == [[types_of[key], types_of[value], "LLAMA_FLASH_ATTN_TYPE_ENABLED"] for key, value in pairs]
    # The parser refuses types and options that it does not know.
    wrong = [texts[0].replace("f16", "q9_0"), texts[0].replace("cache-type-k", "cache-type-q")]
    assert parsed_by_llama([text.split() for text in wrong]) == [None, None]


@pytest.mark.parametrize("bits", [4, 2])
def test_transformers_constructs_the_cache(export: Export, bits: int) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("optimum.quanto")
    if not hasattr(transformers, "QuantizedCache"):
        pytest.skip(f"transformers {transformers.__version__} has no QuantizedCache")
    config = transformers.LlamaConfig(num_hidden_layers=4, num_attention_heads=2, hidden_size=128)
    names = {"QuantizedCache": transformers.QuantizedCache, "DynamicCache": transformers.DynamicCache,
             "model": types.SimpleNamespace(config=config)}  # fmt: skip
    cache = eval(export(f"int{bits}_g64", "transformers"), names)
    assert isinstance(cache, transformers.QuantizedCache) and len(cache.layers) == 4
    for layer in cache.layers:
        assert (layer.nbits, layer.axis_key, layer.axis_value, layer.q_group_size) == (bits, 0, 0, 64)
    exact = eval(export("16", "transformers"), names)
    assert type(exact) is transformers.DynamicCache and len(exact.layers) == 4


def vllm_parser() -> argparse.ArgumentParser:
    """The options of `vllm serve` for the cache's format, as vllm/config/cache.py published them in 2026."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"]
    )
    parser.add_argument("--kv-cache-dtype-skip-layers", nargs="*", default=[])
    return parser


def test_vllm_has_the_options(export: Export) -> None:
    def parsed(tiers: str, **more: Any) -> tuple[str, list[str]]:
        found = vllm_parser().parse_args(export(tiers, "vllm", **more).split())
        return found.kv_cache_dtype, found.kv_cache_dtype_skip_layers

    assert parsed("16") == ("auto", [])
    assert parsed("fp8_e4m3") == ("fp8_e4m3", [])
    assert parsed("nvfp4x3-16x1") == ("nvfp4", ["3"])
    assert parsed("16x1-fp8_e4m3x2-16x1", has_windows=True) == ("fp8_e4m3", ["0", "3", "sliding_window"])


def test_tensorrt_llm_has_the_keys(export: Export) -> None:
    yaml = pytest.importorskip("yaml")
    # KvCacheConfig of tensorrt_llm/llmapi/llm_args.py: `dtype` is a text, and other names of keys are refused.
    for tiers, dtype in (("16", "auto"), ("fp8_e4m3", "fp8"), ("nvfp4", "nvfp4")):
        assert yaml.safe_load(export(tiers, "tensorrt-llm")) == {"kv_cache_config": {"dtype": dtype}}
