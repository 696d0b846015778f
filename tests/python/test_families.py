"""Tests captures of miniatures of transformers' families: attention computed from the trace equals that of the plain
model."""

from __future__ import annotations

import collections
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_miniatures import miniatures, model_of
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvlab.hf import capturing
from kvlab.hf.layers import decoder_of
from kvlab.hf.models import TRANSFORMERS

TOKENS = 400
IDS = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Runs tests on one thread, because miniatures are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_attention(model: Any) -> dict[int, Any]:
    """For each layer, the attention outputs [tokens, query_heads, value_size] of the `eager` function in the family's
    file."""
    outs: dict[int, Any] = {}

    def record(module: Any, *arguments: Any, **words: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        made = eager(module, *arguments, **words)
        outs[module.layer_idx] = made[0][0].double()
        return made

    AttentionInterface.register("recorded", record)
    AttentionMaskInterface.register("recorded", eager_mask)
    decoder, before = decoder_of(model), model.config._attn_implementation
    decoder.set_attn_implementation("recorded")
    with torch.no_grad():
        decoder(IDS, use_cache=False)
    decoder.set_attn_implementation(before)
    return outs


def rotated(x: Any, inv_freq: Any, factor: float) -> Any:
    """Applies RoPE to x [tokens, size], in float64."""
    a, b = torch.as_tensor(x).double().chunk(2, dim=-1)
    angles = torch.outer(torch.arange(len(a)).double(), torch.as_tensor(inv_freq).double())
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def said_attention(trace: kvlab.Trace, index: int, head: int) -> Any:
    """The attention outputs [tokens, size] of a query head, computed only from the trace."""
    layer, row, kv_head = trace.layer_numbers[index], trace.rows[index], head * trace.kv_heads // trace.query_heads
    table = numpy.atleast_2d(trace.inv_freq)[row["rope"]]
    parts = (trace.read("q", layer, head), trace.read("k", layer, kv_head))
    q, k = (rotated(x, table, trace.model["rope_factor"]) for x in parts)
    scores = q @ k.T * row["scale"]
    if row["softcap"]:
        scores = torch.tanh(scores / row["softcap"]) * row["softcap"]
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    if row["span"]:
        hidden |= torch.ones_like(hidden).tril(-row["span"])
    scores = scores.masked_fill(hidden, -torch.inf)
    if row["sink"] is not None:
        scores = torch.cat((scores, torch.full((len(q), 1), row["sink"][head], dtype=torch.float64)), dim=1)
    return scores.softmax(-1)[:, : len(q)] @ torch.as_tensor(trace.read("v", layer, kv_head)).double()


def check_says(trace: kvlab.Trace, model: Any) -> None:
    plain = plain_attention(model)
    assert sorted(plain) == trace.layer_numbers
    for index, layer in enumerate(trace.layer_numbers):
        said = torch.stack([said_attention(trace, index, head) for head in range(trace.query_heads)], 1)
        assert float((said - plain[layer]).norm() / plain[layer].norm()) <= 1e-5, layer


# Families that are supported only since transformers 5. Before, they lack the attention interface or a cache, or a text
# in chunks gives other results than the whole text at once.
NEW = ("gpt2", "deepseek_v2", "bert", "moshi", "llama4", "llama4_text", "gptj", "paligemma")


def made(family: str, words: dict[str, Any]) -> Any:
    if family not in CONFIG_MAPPING or (family in NEW and TRANSFORMERS < (5, 0)):
        pytest.skip(f"{family} of transformers {transformers.__version__} is not supported")
    return model_of(family, **words)


CAPTURED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 128}),
    ("phi3", {}),
    ("glm4", {}),  # RoPE rotates half of a head, in pairs of adjacent elements
    ("cohere", {}),
    ("olmo2", {}),
    ("granite", {"attention_multiplier": 0.3}),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    ("gemma2", {"sliding_window": 64}),
    ("gemma3_text", {"sliding_window": 64}),
    ("gemma3", {"sliding_window": 64}),  # a model inside a wrapper
    ("gpt_oss", {"sliding_window": 64}),
    ("qwen3_next", {}),
    ("qwen3_5_text", {}),
    ("llama4_text", {"attention_chunk_size": 400}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("apertus", {}),
    ("nanochat", {}),  # keys are rotated back
    ("hunyuan_v1_dense", {}),  # norms after RoPE
    ("ministral3", {"sliding_window": None}),
    ("deepseek_v2", {}),
    ("llava", {}),
    ("qwen3_vl", {}),
    ("llama4", {"attention_chunk_size": 400}),
]


@pytest.mark.parametrize(("family", "words"), CAPTURED, ids=[family for family, _ in CAPTURED])
def test_a_trace_equals_the_plain_models_tensors(
    family: str, words: dict[str, Any], tmp_path: pathlib.Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    model = made(family, words)
    with torch.no_grad():
        before = model(IDS).logits
    trace = kvlab.hf.capture(model, IDS, prompt_tokens=300, out=tmp_path / "trace", chunk=150)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    done = command("trace", "verify", tmp_path / "trace")
    assert done.returncode == 0, done.stderr
    check_says(trace, model)


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("llama4_text", {"attention_chunk_size": 399}, "layer 0: a query should see all tokens before it, but its mask"),
        ("mimo_v2_flash", {}, "layer 1: kv_heads is 4, but that of layer 0 is 2"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "layer 2 uses the keys of layer"),
        ("doge", {}, "layer 0: its mask changes scores"),
        ("gptj", {}, "layer 0: its RoPE argument has sines before cosines"),
        ("paligemma", {}, "GemmaAttention lets queries see later tokens"),
        ("bert", {"is_decoder": False}, "layer 0: a query should see all tokens before it, but its mask"),
        ("moshi", {}, "keys of one token differ by .* between positions, but no argument of the layer rotates them"),
        ("inkling_text", {}, "layer 0: its attention has the argument position_bias"),
    ],
)
def test_models_that_a_trace_cannot_describe_are_refused_before_any_token(
    family: str, words: dict[str, Any], message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing.Listener, "feed_chunk", lambda *_: pytest.fail("tokens are fed"))
    with pytest.raises(kvlab.hf.Refused, match=message) as refused:
        kvlab.hf.capture(made(family, words), IDS, prompt_tokens=300, out=tmp_path / "trace")
    assert "\n" not in str(refused.value) and not (tmp_path / "trace").exists()


@pytest.mark.skipif(not os.environ.get("KVLAB_EVERY"), reason="it takes minutes, and KVLAB_EVERY is not set")
def test_every_family_is_captured_or_refused_in_one_line() -> None:
    counts: collections.Counter[str] = collections.Counter()
    for family, model in miniatures(counts):
        try:
            check_says(kvlab.hf.capture(model, IDS, prompt_tokens=300, progress=False), model)
            counts["captured"] += 1
        except kvlab.hf.Refused as refused:
            assert "\n" not in str(refused)
            counts["refused"] += 1
            print(f"{family}: {refused}")
    print(dict(counts))
    assert counts["captured"] >= 95


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_first_token_of_zeros_does_not_hide_the_rotation(family: str, tmp_path: pathlib.Path) -> None:
    """A text may begin with a padding token, whose embedding is zero. Then the token's keys are also zero. They are the
    same at all positions, so they do not show how the model rotates."""
    model = made(family, {"sliding_window": 64})
    ids = IDS.clone()
    ids[0, 0] = 0
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    trace = kvlab.hf.capture(model, ids, prompt_tokens=300, out=tmp_path / "trace")
    assert trace.tokens == ids.shape[1]
