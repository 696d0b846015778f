"""Tests of model calls under kvlab.hf.evicting: with a budget for the whole text, supported calls give the text of the
plain model. Other calls are refused in one line."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if int(torch.__version__.split(".")[0]) < 2:
    pytest.skip("kvlab.hf.evicting needs torch 2", allow_module_level=True)
from test_hf import ids_of, model_of  # noqa: E402

from kvlab.hf.calls import cache_among, cache_word  # noqa: E402

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def sharp(model: Any) -> Any:
    """Scales the weights of a model so that attention differs between tokens, and the generated text does not repeat
    itself."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def rope(kind: str, **words: Any) -> dict[str, Any]:
    settings = {"rope_type": kind, "factor": 4.0} | words
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": settings | {"rope_theta": 10000.0}}
    return {"rope_scaling": settings}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
        ("llama", rope("linear")),
        ("llama", rope("llama3", **LLAMA3)),
        ("llama", rope("yarn", original_max_position_embeddings=16)),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_a_budget_for_the_whole_text_equals_the_plain_model(family: str, words: dict[str, Any]) -> None:
    if family == "qwen3" and not hasattr(transformers, "Qwen3Config"):
        pytest.skip(f"transformers {transformers.__version__} has no qwen3")
    model, ids = sharp(model_of(family, **words)), ids_of(30)
    with torch.no_grad():
        plain = model.generate(ids, **GREEDY)
        with kvlab.hf.evicting(model, "full") as caches:
            assert torch.equal(model.generate(ids, **GREEDY), plain)
    assert caches.tokens == 30 + 23 and caches.evictions == 0
    assert len(plain[0, 30:].unique()) >= 4, "the generated text should have several different tokens"


def test_a_chat_continues_with_the_previous_turns_cache() -> None:
    model = sharp(model_of())
    texts = []
    for policy in (None, "full"):
        block = kvlab.hf.evicting(model, policy) if policy else contextlib.nullcontext()
        with torch.no_grad(), block as caches:
            past, text = transformers.DynamicCache(), ids_of(20)
            for turn in range(3):
                answer = model.generate(text, **{cache_word(model): past}, **GREEDY)
                text = torch.cat([answer, ids_of(5 + turn)], 1)
            texts.append(answer)
    assert torch.equal(*texts)
    assert caches.tokens == texts[0].shape[1] - 1


def steps(model: Any, *lengths: int, **words: Any) -> None:
    """Calls the model with these numbers of tokens, one call after another."""
    words = {cache_word(model): transformers.DynamicCache()} | words
    for length in lengths:
        model(ids_of(length), **words)


def masked(model: Any, *masks: Any) -> None:
    """Calls the model with a prompt of six tokens and then with one token, each with its mask."""
    past = transformers.DynamicCache()
    for count, mask in zip((6, 1), masks):
        model(ids_of(count), attention_mask=mask and torch.tensor([mask]), **{cache_word(model): past})


def before(model: Any, tokens: int) -> Any:
    past = transformers.DynamicCache()
    model(ids_of(tokens), **{cache_word(model): past})
    return past


def call_config(model: Any, **words: Any) -> Any:
    model.config = copy.deepcopy(model.config)
    for name, value in words.items():
        setattr(model.config, name, value)
    model.model.config = model.config
    return model


CAUSAL = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(ids_of(6), use_cache=False), "the call has no cache, because use_cache is False"),
        (lambda m: m.generate(ids_of(6), use_cache=False, **GREEDY), "the call has no cache"),
        (lambda m: call_config(m, use_cache=False)(ids_of(6)), "the call has no cache"),
        (lambda m: m(ids_of(6), attention_mask=CAUSAL), r"attention_mask has shape \[1, 1, 6, 6\]; give no mask, or one of shape \[1, 6\]"),
        (lambda m: m(ids_of(6), attention_mask=torch.zeros(1, 1, 6, 6)), r"attention_mask has shape \[1, 1, 6, 6\]"),
        (lambda m: m(ids_of(6), attention_mask={"full_attention": CAUSAL}), "attention_mask is a dict"),
        (lambda m: steps(m, 6, 1, attention_mask=torch.ones(1, 6)), r"attention_mask has shape \[1, 6\]; give no mask, or one of shape \[1, 7\]"),
        (lambda m: m(ids_of(3), attention_mask=torch.tensor([[1, 0, 1]])), "attention_mask leaves tokens out"),
        (lambda m: m(ids_of(3), attention_mask=torch.tensor([[1, 1, 0]])), "attention_mask leaves tokens out"),
        (lambda m: masked(m, [1] * 6, [1] * 5 + [0, 1]), "attention_mask leaves tokens out"),
        (lambda m: masked(m, None, [1] * 5 + [0, 1]), "attention_mask leaves tokens out"),
        (lambda m: masked(m, [0] + [1] * 5, [1] * 7), "attention_mask leaves tokens out"),
        (lambda m: masked(m, [0] + [1] * 5, None), r"attention_mask is a NoneType; give no mask, or one of shape \[1, 7\] with padding"),
        (lambda m: m(ids_of(6), position_ids=torch.arange(6)[None] + 1), "position_ids has other numbers; give consecutive numbers from 0 to 5"),
        (lambda m: m(ids_of(6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])), "position_ids has other numbers; give consecutive numbers from 0 to 5"),
        (lambda m: steps(m, 6, 1, position_ids=torch.arange(6)[None]), r"position_ids has shape \[1, 6\]; give consecutive numbers from 6 to 6"),
        (lambda m: m(ids_of(6), cache_position=torch.arange(6) * 2), "cache_position"),
        (lambda m: m(ids_of(1)[:, :0], **{cache_word(m): m(ids_of(6)).past_key_values}), "no new tokens, because the cache has 6 and the text"),
        (lambda m: m(inputs_embeds=torch.ones(1, 6, 32), position_ids=torch.ones(1, 6).long()), "position_ids has other numbers"),
        (lambda m: m(ids_of(6), output_attentions=True), "the call has the argument output_attentions"),
        (lambda m: m(ids_of(1), **{cache_word(m): m(ids_of(6).view(2, 3)).past_key_values}), "a batch of 1, but .* had 2"),
        (lambda m: m.generate(ids_of(6), num_beams=2, **GREEDY), "reordered rows"),
        (lambda m: m.generate(ids_of(6), cache_implementation="static", **GREEDY), "StaticCache; pass a plain DynamicCache"),
        (
            lambda m: m.generate(ids_of(9).repeat(1, 3), prompt_lookup_num_tokens=3, **GREEDY | {"eos_token_id": 0}),
            "cropped to .*: policy h2o has counted the attention of the tokens that would be removed; copy",
        ),
    ],
)
def test_other_calls_are_refused(call: Any, message: str) -> None:
    model = model_of()
    with torch.no_grad(), pytest.raises(ValueError, match=message) as refused:
        with kvlab.hf.evicting(model, "h2o", 16):
            call(model)
    assert "\n" not in str(refused.value)
    with torch.no_grad():
        model.model(ids_of(6).view(2, 3))  # works again, because the model is restored


def test_a_foreign_cache_is_refused() -> None:
    model = model_of()
    with torch.no_grad():
        past = before(model, 6)
        with kvlab.hf.evicting(model, "h2o", 16), pytest.raises(ValueError, match="holds 6 tokens that were computed without kvlab"):
            model(ids_of(1), **{cache_word(model): past})


def test_unknown_attention_is_refused_at_entry() -> None:
    model = sharp(model_of())
    module = model.model.layers[1].self_attn
    own = module.forward

    def looking(*arguments: Any, **words: Any) -> Any:
        past = cache_among((*arguments, *words.values()))
        held = past.get_seq_length(1) if past is not None else 0
        out, *others = own(*arguments, **words)
        return out * (1 + held), *others

    module.forward = looking
    refused = r"LlamaFor\w+ is not supported: .* its logits differ by [\d.]+ from .* counted 9 of 9 tokens"
    with pytest.raises(ValueError, match=refused):
        with kvlab.hf.evicting(model, "h2o", 16):
            pass
    del module.forward
    with kvlab.hf.evicting(model, "h2o", 16):
        pass


def test_the_cache_may_have_another_keyword() -> None:
    """Any argument that holds keys and values is taken as the cache, because transformers may rename it."""
    model, ids = sharp(model_of()), ids_of(30)
    with torch.no_grad():
        plain = model.generate(ids, **GREEDY)
        for layer in model.model.layers:
            layer.self_attn.forward = _renaming(layer.self_attn)
        with kvlab.hf.evicting(model, "full") as caches:
            for layer in model.model.layers:
                layer.self_attn.forward = _renaming(layer.self_attn)
            assert torch.equal(model.generate(ids, **GREEDY), plain)
    assert caches.tokens == 53


def _renaming(module: Any) -> Any:
    inner = module.forward

    def forward(hidden_states: Any, **words: Any) -> Any:
        if not hasattr(inner, "__func__") or inner.__func__ is type(module).forward:
            return inner(hidden_states, **words)  # the function of transformers, which has the original argument name
        past = cache_among(words.values())
        others = {name: value for name, value in words.items() if value is not past}
        return inner(hidden_states, kept_states=past, **others)

    return forward
