"""Tests of traces that are captured from loaded transformers models, which are small and have random weights."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import numpy
import pytest

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def config_of(family: str, **words: Any) -> Any:
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if family not in mapping:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return mapping[family](**words)


def model_of(family: str = "llama", attention: str = "eager", **words: Any) -> Any:
    torch.manual_seed(3)
    small = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    } | ({"sliding_window": None} if family == "mistral" else {})
    config = config_of(family, **small | words)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def ids_of(tokens: int) -> Any:
    return torch.randint(0, 97, (1, tokens), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_capturing_a_loaded_model_does_not_change_it(family: str) -> None:
    model, ids = model_of(family), ids_of(90)
    with torch.no_grad():
        before = model(ids).logits
    trace = kvlab.hf.capture(model, ids, prompt_tokens=60)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert trace.segments == [(0, 60, "prompt"), (60, 30, "decode")]
    assert trace.dtype == "float32" and trace.layers == 2 and trace.kv_heads == 2
    numpy.testing.assert_array_equal(trace.ids, ids[0].numpy())
    run = kvlab.replay(trace, ["h2o", "window"], [16])
    assert "residual_error" in run.csv()  # this metric needs the sketch of W_o


def test_a_warning_names_keys_that_4_bits_would_damage(tmp_path: pathlib.Path) -> None:
    model = model_of("qwen2", hidden_size=128)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[3] = 600
        model.model.layers[1].self_attn.q_proj.weight *= 20
    with pytest.warns(UserWarning, match=r"4-bit keys move attention scores by more than 1 nat in layers 1 \("):
        kvlab.hf.capture(model, ids_of(40), prompt_tokens=30)


def test_decoding_feeds_the_most_likely_token(tmp_path: pathlib.Path) -> None:
    model, ids = model_of(), ids_of(20)
    trace = kvlab.hf.capture(model, ids[0].tolist(), max_new_tokens=12, out=tmp_path / "trace")
    with torch.no_grad():
        text = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
    numpy.testing.assert_array_equal(trace.ids, text[:-1].numpy())
    assert kvlab.Trace(tmp_path / "trace").prompt_tokens == 20


def test_features_and_passages() -> None:
    def first(q: Any, k: Any, v: Any, layer: int) -> Any:
        return k[:, :, 0] + layer

    trace = kvlab.hf.capture(
        model_of(),
        ids_of(40),
        prompt_tokens=30,
        features={"first": first},
        passages=[{"name": "middle", "start": 4, "tokens": 3}],
    )
    expected = trace.read("k", 1, 1)[:, 0] + 1
    numpy.testing.assert_array_equal(trace.feature("first", 1, 1), expected)
    run = kvlab.replay(trace, "feature:name=first", 16)
    assert "passage_recall:middle" in run.csv()


# Control characters, among them those that change the direction of text, such as U+200E and U+202E.
CONTROLS = "\n\x00\x1f\x7f\x80\x85\x9f\u200e\u200f\u202a\u202e\u2066\u2069"


def test_names_have_a_space_for_each_control_character() -> None:
    model = model_of()
    model.config._name_or_path = f"a{CONTROLS}model"
    passage = {"name": f"the{CONTROLS}pass\u2065key", "start": 4, "tokens": 3}
    trace = kvlab.hf.capture(model, ids_of(40), prompt_tokens=30, passages=[passage])
    assert trace.model["model"] == "a" + " " * len(CONTROLS) + "model"
    run = kvlab.replay(trace, "window", 16)
    assert "passage_recall:the" + " " * len(CONTROLS) + "pass\u2065key" in run.csv()


def test_an_adapter_of_peft_is_captured_with_its_model() -> None:
    peft = pytest.importorskip("peft")
    model, ids = model_of(), ids_of(40)
    plain = kvlab.hf.capture(model, ids, prompt_tokens=30)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False, r=2)
    ).eval()
    trace = kvlab.hf.capture(adapted, ids, prompt_tokens=30)
    merged = kvlab.hf.capture(adapted.merge_and_unload(), ids, prompt_tokens=30)
    assert not numpy.allclose(trace.read("q", 0, 0), plain.read("q", 0, 0))
    for layer in range(2):
        numpy.testing.assert_allclose(trace.read("q", layer, 1), merged.read("q", layer, 1), atol=1e-5)


def _dynamic(model: Any, folder: pathlib.Path) -> Any:
    if int(torch.__version__.split(".")[0]) < 2:
        pytest.skip("torch 2 is needed")
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def _torchao(model: Any, folder: pathlib.Path) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def _quanto(model: Any, folder: pathlib.Path) -> Any:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def _bitsandbytes(model: Any, folder: pathlib.Path, **words: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    model.save_pretrained(folder)
    settings = transformers.BitsAndBytesConfig(**words)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, device_map="cpu")
    return found.eval()


def _bitsandbytes_8(model: Any, folder: pathlib.Path) -> Any:
    return _bitsandbytes(model, folder, load_in_8bit=True)


def _bitsandbytes_4(model: Any, folder: pathlib.Path) -> Any:
    return _bitsandbytes(model, folder, load_in_4bit=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantised", [_dynamic, _torchao, _quanto, _bitsandbytes_8, _bitsandbytes_4])
def test_quantized_weights_are_captured(quantised: Any, tmp_path: pathlib.Path) -> None:
    words = {"hidden_size": 128, "intermediate_size": 256}  # a multiple of the group size of 4-bit weights
    ids = ids_of(40)
    plain = kvlab.hf.capture(model_of(**words), ids, max_new_tokens=3)
    model = quantised(model_of(**words), tmp_path)
    trace = kvlab.hf.capture(model, ids, max_new_tokens=3)
    layer = model.model.layers[0]
    with torch.no_grad():
        keys = layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens(ids)))[0]
    mine = trace.read("k", 0, 1)[:40]
    numpy.testing.assert_allclose(mine, keys.view(40, 2, 32)[:, 1].float().numpy(), rtol=1e-5, atol=1e-6)
    assert not numpy.allclose(mine, plain.read("k", 0, 1)[:40], rtol=1e-4)
    assert "residual_error" in kvlab.replay(trace, "h2o", 16).csv()


def other_model(family: str, **words: Any) -> Any:
    """A small model of a family that kvlab does not know by name."""
    model = model_of(family, "sdpa", **{"num_hidden_layers": 4, "head_dim": 8, "pad_token_id": 0} | words)
    if not getattr(type(model), "_supports_attention_backend", False):
        pytest.skip(f"{family} of transformers {transformers.__version__} has no attention interface")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # so that the attention of different queries differs
    return model


@pytest.mark.parametrize(
    ("family", "words", "has_residual"),
    [
        ("granite", {"attention_multiplier": 0.2}, True),
        ("granite", {"residual_multiplier": 0.5}, False),
        ("olmo2", {}, False),  # has a norm after the attention
        ("gemma", {}, True),
        ("mixtral", {}, True),
        ("starcoder2", {"sliding_window": None}, True),
    ],
)
def test_families_like_llama_are_captured(family: str, words: dict[str, Any], has_residual: bool) -> None:
    model, ids = other_model(family, **words), ids_of(90)
    with torch.no_grad():
        before = model(ids).logits
    trace = kvlab.hf.capture(model, ids, prompt_tokens=60)  # verifies the trace, which recomputes the attention
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert trace.layers == 4 and trace.tokens == 90
    assert ("residual_error" in kvlab.replay(trace, "h2o", 16).csv()) == has_residual


@pytest.mark.parametrize("family", ["t5", "whisper", "vit"])
def test_multimodal_models_are_refused_by_name(family: str) -> None:
    """Their config is enough to refuse them, so no model is loaded."""
    model = types.SimpleNamespace(config=config_of(family), modules=list, parameters=list)
    for use in (lambda: kvlab.hf.evicting(model, "h2o", 16), lambda: kvlab.hf.capture(model, ids_of(4))):
        with pytest.raises(ValueError, match=f"model_type '{family}'") as refused:
            use()
        assert "\n" not in str(refused.value)


def test_adapters_that_add_keys_are_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    refused = "the adapter default has PEFT's type PREFIX_TUNING, which adds keys and values"
    with pytest.raises(ValueError, match=refused):
        kvlab.hf.capture(peft.get_peft_model(model_of(), settings), ids_of(40), prompt_tokens=30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [[1, 2], [3, 4]]}, r"input_ids: has shape \[2, 2\]; give one sequence of whole numbers"),
        ({"input_ids": [1.5]}, "one sequence of whole numbers"),
        ({"input_ids": transformers.BatchEncoding({"input_ids": [1]})}, r"has type BatchEncoding; .*tokenizer\(text\)"),
        ({"input_ids": "a text"}, "input_ids: has type str; give one sequence of whole numbers"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids: has type list; give one sequence of whole numbers"),
        ({"input_ids": [97]}, "input_ids: ids are from 97 to 97, but the model's vocabulary has 97 ids"),
        ({"prompt_tokens": 41}, "prompt_tokens: 41 should be a whole number from 1 to 40"),
        ({"features": {"odd": lambda q, k, v, layer: k}}, r"feature odd: layer 0 has shape \[2, 40, 8\]; it should be \[2, 40\]"),
        ({"model": "bloom"}, "attention of BloomModel does not go through transformers' AttentionInterface"),
    ],
)
def test_a_refused_capture_leaves_no_files(change: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    words: dict[str, Any] = {"input_ids": ids_of(40), "prompt_tokens": 30, "out": tmp_path / "trace"} | change
    model = model_of()
    if words.pop("model", None):
        model = transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=1, hidden_size=8, n_head=1, vocab_size=97))
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    with pytest.raises(ValueError, match=message):
        kvlab.hf.capture(model, **words)
    assert (tmp_path / "trace").exists() == ("features" in change)  # features are computed after the shards
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_output_projections_of_a_loaded_model_are_those_of_its_folder(sample: kvlab.Trace) -> None:
    folder = pathlib.Path(__file__).resolve().parents[2] / "engine" / "models" / "tiny"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded, read = (kvlab.replay(sample, "criticalkv", 64, model=one).csv() for one in (model, folder))
    assert loaded == read
    with pytest.raises(ValueError, match="was captured from another checkpoint"):
        kvlab.replay(sample, "criticalkv", 64, model=model_of())
