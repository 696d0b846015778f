"""Tests of kvlab.hf.Cache: each conversation continues from its own keys and values, even if the model gets other calls
in between."""

from __future__ import annotations

import collections
import copy
import gc
import json
import pathlib
import threading
import warnings
import weakref
from typing import Any

import numpy
import pytest

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if int(torch.__version__.split(".")[0]) < 2:
    pytest.skip("kvlab.hf.Cache needs torch 2", allow_module_level=True)
from test_calls import sharp  # noqa: E402
from test_evicting_families import made  # noqa: E402
from test_families import IDS, one_thread  # noqa: F401, E402
from test_hf import model_of  # noqa: E402

from kvlab.hf.calls import cache_word  # noqa: E402

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
BUDGET = 24
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {}),
    ("gemma2", {"sliding_window": 16, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4}),
    ("gemma3_text", {"sliding_window": 16}),
    ("gpt_oss", {"sliding_window": 16}),
    ("qwen3_next", {}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("olmo2", {}),
    ("cohere", {}),
]
ALL = pytest.mark.parametrize(("family", "words"), FAMILIES, ids=[family for family, _ in FAMILIES])


def ids_of(text: int, tokens: int) -> Any:
    """The ids of the text with the number `text`."""
    return IDS[:, text * 70 : text * 70 + tokens]


def call(model: Any, ids: Any, cache: Any) -> Any:
    with torch.no_grad():
        return model(ids, **{cache_word(model): cache}, use_cache=True).logits[0]


def cache_of(model: Any, policy: str = "h2o", budget: int | None = BUDGET, **words: Any) -> Any:
    return kvlab.hf.Cache(model, policy, budget, **words)


def policy_layers(cache: Any) -> list[int]:
    """The layers in which policies evict: all except those with a sliding window."""
    return list(cache._conversation.attended.layer_indices)


def kept_of(cache: Any) -> list[list[int]]:
    attended = cache._conversation.attended
    return [cache.kept(layer, head).tolist() for layer in attended.layers for head in range(attended.shape.kv_heads)]


def check_equal(one: Any, logits: Any, other: Any, expected: Any) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert kept_of(one) == kept_of(other)
    assert (one.tokens, one.evictions, one.get_seq_length()) == (other.tokens, other.evictions, other.get_seq_length())


@ALL
def test_two_conversations_of_equal_length_do_not_mix(family: str, words: dict[str, Any]) -> None:
    model = made(family, words)
    parts = [[ids_of(text, 50)[:, first:end] for first, end in ((0, 40), (40, 41), (41, 50))] for text in (0, 1)]
    alone = []
    for own in parts:
        cache = cache_of(model)
        alone.append((cache, [call(model, ids, cache) for ids in own]))
    caches = [cache_of(model), cache_of(model)]
    mixed = [[call(model, ids, cache) for ids, cache in zip(both, caches)] for both in zip(*parts)]
    assert not torch.allclose(mixed[-1][0], mixed[-1][1])
    for text, cache in enumerate(caches):
        for step, logits in enumerate(mixed):
            torch.testing.assert_close(logits[text], alone[text][1][step], rtol=1e-5, atol=1e-5)
        check_equal(cache, mixed[-1][text], alone[text][0], alone[text][1][-1])
        assert cache.evictions > 0


@ALL
def test_a_prefix_answers_ten_questions(family: str, words: dict[str, Any]) -> None:
    model = made(family, words)
    prefix = cache_of(model)
    call(model, ids_of(0, 60), prefix)
    before = kept_of(prefix)
    for question in range(10):
        own = copy.deepcopy(prefix)
        logits = call(model, ids_of(1, 60)[:, question * 5 : question * 5 + 6], own)
        assert kept_of(prefix) == before
        if question % 3:
            continue
        fresh = cache_of(model)
        call(model, ids_of(0, 60), fresh)
        check_equal(own, logits, fresh, call(model, ids_of(1, 60)[:, question * 5 : question * 5 + 6], fresh))


@ALL
def test_three_turns_and_a_copy_in_generate(family: str, words: dict[str, Any]) -> None:
    """Checks that the answers under `full` equal those of the plain model in each turn."""
    model = made(family, words)
    cache, text = cache_of(model, "full", None), ids_of(0, 20)
    for turn in range(3):
        own, plain = copy.deepcopy(cache), model.generate(text, **GREEDY)
        answers = [model.generate(text, **{cache_word(model): one}, **GREEDY) for one in (cache, own)]
        assert torch.equal(plain, answers[0]) and torch.equal(plain, answers[1])
        text = torch.cat([plain, ids_of(1, 5 + turn)], 1)
    assert cache.tokens == plain.shape[1] - 1 == cache.get_seq_length()  # the last generated token is not in the cache


def test_a_block_keeps_conversations_apart() -> None:
    """Checks that each cache of transformers becomes a separate cache of kvlab, and that begin_anew() between the calls
    does not change them."""
    model = sharp(model_of())
    texts, questions = [ids_of(text, 60) for text in (0, 1)], ids_of(2, 4)
    with torch.no_grad():
        plain = [model(torch.cat([text, questions], 1)).logits[0, -1] for text in texts]
        with kvlab.hf.evicting(model, "full", budget="all") as caches:
            a, b = transformers.DynamicCache(), transformers.DynamicCache()
            call(model, texts[0], a)
            caches.begin_anew()
            call(model, texts[1], b)
            c = copy.deepcopy(a)
            for cache, expected in ((a, plain[0]), (b, plain[1]), (c, plain[0])):
                torch.testing.assert_close(call(model, questions, cache)[-1], expected, rtol=1e-4, atol=1e-4)
        # After the block they remain caches of kvlab.
        more = ids_of(3, 3)
        expected = model(torch.cat([texts[1], questions, more], 1)).logits[0, -1]
        torch.testing.assert_close(call(model, more, b)[-1], expected, rtol=1e-4, atol=1e-4)


@ALL
@pytest.mark.parametrize("policy", ["full", "window", "sink"])
def test_a_crop_restores_the_earlier_state(policy: str, family: str, words: dict[str, Any]) -> None:
    if "sliding_window" in words:  # a sliding window so long that no token is dropped before the crop
        words = words | {"sliding_window": words["sliding_window"] and 64}
    model = made(family, words)
    budget = None if policy == "full" else 64
    cropped, fresh = cache_of(model, policy, budget), cache_of(model, policy, budget)
    call(model, ids_of(0, 40), cropped)
    call(model, ids_of(1, 7), cropped)
    if cropped._conversation.attended.has_others:
        with pytest.raises(kvlab.hf.Refused, match="the state of layers without attention cannot go back"):
            crop_to(cropped, 40)
        return
    crop_to(cropped, 40)
    call(model, ids_of(0, 40), fresh)
    for ids in (ids_of(2, 9), ids_of(2, 30)):  # the sliding window drops tokens only with the last ids
        check_equal(cropped, call(model, ids, cropped), fresh, call(model, ids, fresh))
    assert cropped.tokens == 79


@ALL
def test_a_crop_beyond_a_window_names_the_reason(family: str, words: dict[str, Any]) -> None:
    if not words.get("sliding_window"):
        pytest.skip("no layer has a sliding window")
    model = made(family, words)
    cache = cache_of(model, "full", None)
    call(model, ids_of(0, 40), cache)
    with pytest.raises(kvlab.hf.Refused, match="a layer's window of 16 tokens has dropped tokens; copy.deepcopy"):
        crop_to(cache, 30)
    assert cache.tokens == 40


def crop_to(cache: Any, tokens: int) -> None:
    by_number = transformers.DynamicCache.crop.__code__.co_varnames[1] == "tokens_to_remove"
    cache.crop(tokens - cache.get_seq_length() if by_number else tokens)


@pytest.mark.parametrize(
    ("policy", "words", "message"),
    [
        ("h2o", {}, "policy h2o has counted the attention of the tokens that would be removed; copy"),
        ("keydiff", {}, "policy keydiff has computed features"),
        ("window", {}, "tokens have been evicted since"),
    ],
)
def test_an_impossible_crop_names_the_reason(policy: str, words: dict[str, Any], message: str) -> None:
    model = model_of()
    cache = kvlab.hf.Cache(model, policy, BUDGET, **words)
    call(model, ids_of(0, 40), cache)
    kept = kept_of(cache)
    with pytest.raises(kvlab.hf.Refused, match=message):
        crop_to(cache, 30)
    assert kept_of(cache) == kept and cache.get_seq_length() == 40
    crop_to(cache, 40)


CHUNKED = [("tova", *one) for one in FAMILIES] + [(policy, "llama", {}) for policy in ("h2o", "snapkv:recent=8")]


@pytest.mark.parametrize(("policy", "family", "words"), CHUNKED)
def test_manual_chunks_equal_those_of_generate(policy: str, family: str, words: dict[str, Any]) -> None:
    model = made(family, words)
    text, by_hand, own = ids_of(0, 60), cache_of(model, policy), cache_of(model, policy)
    answer = model.generate(text, **{cache_word(model): own}, **GREEDY, prefill_chunk_size=20, disable_compile=True)
    old = int(transformers.__version__.split(".")[0]) < 5  # transformers 4 decodes the last token of the prompt
    for ids in text.split((20, 20, 19, 1) if old else 20, 1):
        logits = call(model, ids, by_hand)
    for token in answer[0, 60:-1]:
        assert int(logits[-1].argmax()) == token
        logits = call(model, token.view(1, 1), by_hand)
    assert kept_of(own) == kept_of(by_hand) and own.evictions == by_hand.evictions > 0


def test_shallow_copies_are_copies() -> None:
    model = model_of()
    cache = kvlab.hf.Cache(model, "h2o", BUDGET)
    call(model, ids_of(0, 40), cache)
    other = copy.copy(cache)
    call(model, ids_of(1, 9), other)
    assert (cache.tokens, other.tokens) == (40, 49)


@pytest.mark.parametrize("policy", ["h2o", "h2o:scope=layer", "random", "sink", "criticalkv", "lagkv", "a2sf"])
@pytest.mark.parametrize("budget", [BUDGET, f"ada({BUDGET})"])
def test_a_copy_continues_like_the_original(policy: str, budget: int | str) -> None:
    if policy == "h2o:scope=layer" and budget != BUDGET:
        pytest.skip("scope=layer and ada() cannot be combined")
    model = sharp(model_of())
    cache = kvlab.hf.Cache(model, policy, budget)
    call(model, ids_of(0, 40), cache)
    other = copy.deepcopy(cache)
    for ids in (*ids_of(1, 8).split(1, 1), ids_of(2, 20), *ids_of(3, 8).split(1, 1)):
        check_equal(cache, call(model, ids, cache), other, call(model, ids, other))


def test_memory_is_freed_with_the_caches() -> None:
    model = model_of()
    cache = kvlab.hf.Cache(model, "h2o", BUDGET)
    call(model, ids_of(0, 40), cache)
    other = copy.deepcopy(cache)
    assert other.allocated_bytes == cache.allocated_bytes
    gone = [weakref.ref(one._conversation) for one in (cache, other)]
    assert model._forward_pre_hooks
    del cache, other
    assert [ref() for ref in gone] == [None, None]
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks
    with kvlab.hf.evicting(model, "h2o", BUDGET) as caches, torch.no_grad():
        for text in range(4):
            model(ids_of(text, 30))
            ref = weakref.ref(caches._conversation)
        kept = [model(ids_of(text, 30)) for text in range(2)]
        assert kept[0] is not kept[1]
    del caches, kept
    assert ref() is None
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_a_changed_model_refuses_its_old_caches() -> None:
    model, other = model_of(), model_of(hidden_size=64)
    cache = kvlab.hf.Cache(model, "h2o", BUDGET)
    with pytest.raises(Exception, match="outside of a call of its model"):
        call(other, ids_of(0, 10), cache)
    numpy.testing.assert_array_equal(cache.kept(0, 0), [])


def changing(kind: str) -> Any:
    """A model whose RoPE frequencies change for texts of 65 tokens or more."""
    settings: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    words: dict[str, Any] = {"max_position_embeddings": 64}
    if kind == "longrope":
        settings |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 64}
        words = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    newer = int(transformers.__version__.split(".")[0]) >= 5
    words |= {"rope_parameters": settings | {"rope_theta": 1e4}} if newer else {"rope_scaling": settings}
    return sharp(model_of("llama", head_dim=16, **words))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("first", [64, 63, 20])
def test_a_changing_rope_is_refused_from_its_first_token_on(kind: str, first: int) -> None:
    with torch.no_grad():
        expected = changing(kind)(ids_of(0, 64)).logits[0]
    for block in (False, True):
        model = changing(kind)
        cache = transformers.DynamicCache() if block else kvlab.hf.Cache(model, "full", length=64)
        with kvlab.hf.evicting(model, "full", "all", length=64) if block else torch.no_grad():
            logits = call(model, ids_of(0, first), cache)
            if first < 64:
                logits = torch.cat([logits, call(model, ids_of(0, 64)[:, first:], cache)])
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
            with pytest.raises(kvlab.hf.Refused, match=rf"in a text of 65 tokens the model's RoPE \({kind}\) rotates"):
                call(model, ids_of(1, 1), cache)
            with pytest.raises(kvlab.hf.Refused, match="a call that fed 1 tokens after 64 did not finish"):
                call(model, ids_of(1, 1), cache)
        with pytest.raises(kvlab.hf.Refused, match="RoPE"):
            call(model, ids_of(0, 65), kvlab.hf.Cache(model, "full", length=64))


CALLS = [(40,), (20, 20), (25, 1, 1, 10, 1), (1, 30)]
TOVA = [("tova", calls, family, words) for family, words in FAMILIES for calls in CALLS]
RECORDED = TOVA + [(policy, calls, "llama", {}) for policy in ("h2o", "snapkv:recent=8") for calls in CALLS]


@pytest.mark.parametrize(("policy", "calls", "family", "words"), RECORDED)
def test_a_recorded_run_replays_to_the_same_tokens(
    policy: str, calls: tuple[int, ...], family: str, words: dict[str, Any]
) -> None:
    model, decoded = made(family, words), 6
    cache = cache_of(model, policy, record=True, length=sum(calls) + decoded)
    kept: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
    for ids in (*ids_of(0, sum(calls)).split(calls, 1), *ids_of(1, decoded).split(1, 1)):
        call(model, ids, cache)
        for layer in policy_layers(cache):
            for head in range(cache._conversation.attended.shape.kv_heads):
                kept[layer, head].append(cache.kept(layer, head).tolist())
    trace = copy.deepcopy(cache).trace()
    prompts = [tokens for _, tokens, kind in trace.segments if kind == "prompt"]
    assert prompts == [tokens for number, tokens in enumerate(calls) if tokens > 1 or number == 0]
    run = kvlab.replay(trace, policy, BUDGET, references=False)
    for (layer, head), own in kept.items():
        live = run.kept(layer, head, policy.split(":")[0]).live
        for query, positions in zip(live[-decoded:], own[-decoded:], strict=True):
            assert numpy.flatnonzero(query).tolist() == positions


def test_gradients_are_refused() -> None:
    model = model_of()
    with kvlab.hf.evicting(model, "full"):
        with pytest.raises(kvlab.hf.Refused, match="do not support gradients.*no_grad"):
            model(ids_of(0, 9), labels=ids_of(0, 9))
    cache, words = kvlab.hf.Cache(model, "full"), {}
    words[cache_word(model)] = cache
    with pytest.raises(kvlab.hf.Refused, match="do not support gradients"):
        model(ids_of(0, 9), **words)
    model.requires_grad_(False)
    embeddings = model.get_input_embeddings()(ids_of(0, 9)).clone()
    with pytest.raises(kvlab.hf.Refused, match="do not support gradients"):
        model(inputs_embeds=embeddings.requires_grad_(), **words)
    model(ids_of(0, 9), **words)
    model.requires_grad_(True)
    model(ids_of(0, 9), labels=ids_of(0, 9)).loss.backward()  # works without a cache of kvlab
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_share_reports_its_tokens_and_a_block_reports_no_eviction() -> None:
    model = model_of()
    with pytest.warns(UserWarning, match="h2o at 20%: the budget is a share of the model's context of 2048 tokens, so it is 409 tokens"):
        with pytest.warns(UserWarning, match="nothing was evicted, because the longest text had 30 tokens, .* is 409 tok"):
            with kvlab.hf.evicting(model, "h2o", "20%"), torch.no_grad():
                model(ids_of(0, 30))
    with pytest.warns(UserWarning, match="Cache: policy h2o at 20%: the budget is a share of the model's context of 2048 tokens, so it is 409 tok"):
        kvlab.hf.Cache(model, "h2o", "20%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kvlab.hf.Cache(model, "h2o", "20%", length=60)
        with kvlab.hf.evicting(model, "h2o", "20%", length=60), torch.no_grad():
            model(ids_of(0, 30))
            model(ids_of(0, 9))
        for policy, words in (("full", {}), ("h2o", {"budget": 24, "tiers": "16:100%"})):
            with kvlab.hf.evicting(model, policy, **words), torch.no_grad():
                model(ids_of(0, 9))


def biased_model() -> Any:
    """A model whose keys have a large bias in one channel, which RoPE hardly rotates."""
    model = model_of("qwen2", hidden_size=128)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(2, 32)[:, -1] = 1000
    return model


def test_centred_keys_save_a_model_with_biased_keys() -> None:
    model = biased_model()

    def decoded(**words: Any) -> tuple[Any, Any]:
        cache = cache_of(model, "full", None, **words)
        call(model, ids_of(0, 60), cache)
        return call(model, ids_of(0, 1), cache), cache

    exact, _ = decoded()
    plain, plain_cache = decoded(tiers="4")
    centred, cache = decoded(tiers="4", centre="prompt")
    assert (centred - exact).norm() * 2 < (plain - exact).norm()
    # The centres are one float32 vector for each of the two KV heads of two layers.
    assert cache.kv_bytes == plain_cache.kv_bytes + 4 * 32 * 4
    assert torch.equal(call(model, ids_of(1, 1), copy.deepcopy(cache)), call(model, ids_of(1, 1), cache))


def test_centred_keys_are_refused_where_they_would_change_attention() -> None:
    model = model_of("gemma2", head_dim=32, sliding_window=16)
    with pytest.raises(ValueError, match="a soft cap on attention scores"):
        cache_of(model, tiers="4", centre="prompt")
    with pytest.raises(ValueError, match="centre: 'mean' should be none, prompt or @FILE"):
        cache_of(model_of(), tiers="4", centre="mean")
    with pytest.raises(ValueError, match="keys are centred only in a tier plan"):
        cache_of(model_of(), centre="prompt")


def test_a_share_of_a_policy_file_reports_its_tokens(tmp_path: pathlib.Path) -> None:
    model, file = model_of(), tmp_path / "policy.json"
    said = {"format": 1, "policy": "h2o", "params": {}, "protected": {"sinks": 4, "recent": "25%"}, "prefill": "dense"}
    said |= {"positions": "original", "threshold": 0.01, "model": {"name": "tiny", "weights_xxh3": ""}}
    share = r"policy.json at ada\(20%\): the budget is a share of the model's context of 2048 tokens, so it is "
    file.write_text(json.dumps(said | {"budget": "ada(20%)"}))
    with pytest.warns(UserWarning, match="Cache: policy .*" + share):
        kvlab.hf.Cache(model, str(file))
    with pytest.warns(UserWarning, match="evicting: policy .*" + share):
        with kvlab.hf.evicting(model, str(file)), torch.no_grad():
            model(ids_of(0, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kvlab.hf.Cache(model, str(file), length=60)
        for budget in (64, "ada(64)", [[64, 64], [64, 64]]):
            file.write_text(json.dumps(said | {"budget": budget}))
            kvlab.hf.Cache(model, str(file))


def test_refusals_name_their_cause() -> None:
    model = model_of()
    with kvlab.hf.evicting(model, "h2o", 16), torch.no_grad():
        for use in (
            lambda: kvlab.hf.evicting(model, "h2o", 16).__enter__(),
            lambda: kvlab.hf.capture(model, ids_of(0, 9), progress=False),
            lambda: kvlab.hf.Cache(model, "h2o", 16),
        ):
            with pytest.raises(kvlab.hf.Refused, match=r"a block of evicting\(…\) uses this model already"):
                use()
        model(ids_of(0, 9))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(kvlab.hf.Refused, match="layer 1: keys of a few tokens are not finite"):
        kvlab.hf.Cache(model_of_nan(model), "h2o", 16)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(kvlab.hf.Refused, match="BloomConfig has no max_position_embeddings; give length="):
        kvlab.hf.evicting(bloom, "h2o", 16)
    with pytest.raises(kvlab.hf.Refused, match="AttentionInterface"):
        kvlab.hf.evicting(bloom, "h2o", 16, length=64)


def model_of_nan(model: Any) -> Any:
    other = model_of()
    other.load_state_dict(model.state_dict())
    return other


def test_an_interrupted_call_restores_the_model() -> None:
    model = sharp(model_of())
    cache = kvlab.hf.Cache(model, "h2o", BUDGET)
    call(model, ids_of(0, 30), cache)
    expected, mlp = call(model, ids_of(1, 20), None), model.model.layers[0].mlp

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    mlp.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        call(model, ids_of(1, 5), cache)
    del mlp.forward
    torch.testing.assert_close(call(model, ids_of(1, 20), None), expected)
    with pytest.raises(kvlab.hf.Refused, match="a call that fed 5 tokens after 30 did not finish"):
        call(model, ids_of(1, 5), cache)
    cache.reset()
    call(model, ids_of(0, 30), cache)
    assert cache.tokens == 30 == cache.get_seq_length()


def test_two_threads_in_one_model_are_refused() -> None:
    model = model_of()
    caches, ended, errors = [kvlab.hf.Cache(model, "h2o", BUDGET) for _ in range(2)], threading.Event(), []

    def call_the_other(*_: Any) -> None:
        def use() -> None:
            try:
                call(model, ids_of(1, 30), caches[1])
            except kvlab.hf.Refused as refused:
                errors.append(str(refused))
            ended.set()

        threading.Thread(target=use).start()
        assert ended.wait(60)

    hook = model.model.layers[0].mlp.register_forward_pre_hook(call_the_other)
    logits = call(model, ids_of(0, 30), caches[0])
    hook.remove()
    assert errors == ["kvlab.hf: two threads call one model at the same time; make one call after the other"]
    assert caches[0].tokens == 30 and caches[1].tokens == 0
    check_equal(caches[0], logits, caches[1], call(model, ids_of(0, 30), caches[1]))


@pytest.mark.parametrize("make", [kvlab.hf.Cache, kvlab.hf.evicting])
def test_bad_arguments_are_refused_by_name(make: Any) -> None:
    model = model_of()
    wrong: dict[str, list[Any]] = dict.fromkeys(["seed", "threads", "length"], [1.5, "5", True, [1], b"5", -1, 2**64, 1j])
    wrong["length"] = [*wrong["length"], 0, 2**24 + 1, 2**31 - 1]
    wrong |= dict.fromkeys(["tiers", "centre", "prefill", "positions"], [5, True, b"x", ["x"], "\ud800", 1j])
    wrong |= {"record": [1, "x", None], "request_threshold": ["x", True, 1j, float("nan")]}
    wrong |= {"budget": [True, [16], b"5", 0, 1j, "\ud800", object()]}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name}: ") as caught:
                make(model, "h2o", **({"budget": 16} | {name: value}))
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    make(model, "h2o", numpy.int64(16), seed=numpy.uint8(1), length=numpy.int32(64), threads=numpy.int64(1))


def test_bad_arguments_of_methods_are_refused_by_name() -> None:
    model = model_of()
    cache = cache_of(model, record=True)
    call(model, ids_of(0, 9), cache)
    uses: dict[str, Any] = {
        "layer": lambda value: cache.kept(value, 0),
        "head": lambda value: cache.kept(0, value),
        "row": lambda value: cache.trace(row=value),
        "count": cache.crop,
    }
    for name, use in uses.items():
        for value in (1.5, "x", True, [1], None, object(), 2**64):
            with pytest.raises(ValueError, match=rf"^{name}: "):
                use(value)
    assert cache.kept(numpy.int64(0), numpy.uint8(1)).tolist() == list(range(9))
    for layer, head, what in ((0, 2, "head 2 does not exist; the layer has 2 KV heads"), (9, 0, "layer 9 has no cache")):
        with pytest.raises(IndexError, match=f"^kept: {what}"):
            cache.kept(layer, head)
    words: dict[str, list[Any]] = dict.fromkeys(["prompt_tokens", "max_new_tokens", "chunk"], [1.5, "x", True, [1], -1, 2**64])
    words |= {"out": [5, "a\0b"], "checkpoint": [5, "\ud800"], "features": [5, [len], {5: len}, {"x": 5}]}
    words |= {"passages": [5, [5], [{}], [{"name": "x"}], [{"name": "x", "start": -1, "tokens": 1}], "x"]}
    for name, values in words.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name}: "):
                kvlab.hf.capture(model, ids_of(0, 9), progress=False, **{name: value})
    with pytest.raises(ValueError, match=r"^model: has type int"):
        kvlab.hf.capture(5, [1, 2])
