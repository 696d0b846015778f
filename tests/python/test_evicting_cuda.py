"""Tests that kvlab.hf.evicting keeps the same tokens, while transformers runs on CUDA, as a replay of the same queries
and keys."""

from __future__ import annotations

import copy
import gc
import pathlib
from typing import Any

import numpy
import pytest

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
try:
    from kvlab import _library

    HELD = _library.policies()
except RuntimeError as error:
    pytest.skip(f"no kernel library: {error}", allow_module_level=True)
from test_evicting import decode  # noqa: E402

from kvlab.hf.calls import cache_word  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
BROUGHT = ("lagkv", "expected_attention", "r_kv")  # policies whose features only the CPU computes


def model_of(family: str = "llama", dtype: Any = torch.float32, layers: int = 2, **words: Any) -> Any:
    torch.manual_seed(3)
    config = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
    }[family](
        vocab_size=97,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.1,  # so large that attention differs between tokens
        **({"sliding_window": None} if family == "mistral" else {}),
        **words,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to("cuda", dtype).eval()


def miniature(family: str) -> Any:
    import hf_miniatures

    return hf_miniatures.model_of(family, head_dim=64, sliding_window=16).cuda()


def ids_of(tokens: int, seed: int = 5) -> Any:
    return torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(seed)).cuda()


def compare(model: Any, ids: Any, steps: int, policy: str, budget: int | str, **words: Any) -> tuple[int, int, int]:
    """Decodes and compares the kept sets of all KV heads and queries with those of a replay. Returns the first query at
    which a set differs (`steps` if none does), the number of sets that differ, and the number of all sets."""
    with kvlab.hf.evicting(model, policy, budget, record=True, length=ids.shape[1] + steps, **words) as caches:
        kept = decode(model, ids, steps, caches)
    trace = caches.trace()
    assert trace.segments == [(0, ids.shape[1], "prompt"), (ids.shape[1], steps, "decode")]
    words |= {"model": model} if policy == "criticalkv" else {}
    run = kvlab.replay(trace, policy, () if policy == "full" else budget, references=False, **words)
    first, differ, sets = steps, 0, 0
    for at, own in enumerate(kept):
        live = run.kept(*divmod(at, trace.kv_heads), policy.split(":")[0]).live
        for query, (theirs, ours) in enumerate(zip(live, own, strict=True)):
            sets += 1
            if not numpy.array_equal(numpy.flatnonzero(theirs), ours):
                differ += 1
                first = min(first, query)
    return first, differ, sets


@pytest.mark.parametrize("policy", [name for name in HELD if name not in BROUGHT])
def test_every_policy_keeps_what_the_replay_keeps(policy: str) -> None:
    assert compare(model_of(), ids_of(100), 120, policy, 48)[1] == 0


@pytest.mark.parametrize(
    ("policy", "budget", "words"),
    [
        ("h2o:every=8", 40, {}),
        ("h2o:every=8:smooth=2:pool=max", 40, {}),
        ("h2o:scope=layer", 40, {}),
        ("h2o:group=max", 40, {}),
        ("h2o:once", 40, {}),
        ("h2o", 40, {"prefill": "chunk:17"}),
        ("knorm", 40, {"prefill": "stream"}),
        ("h2o", 40, {"positions": "cache"}),
        ("h2o", 40, {"prefill": "chunk:17", "positions": "cache"}),
        ("random", 40, {"seed": 2**63 + 7}),
        ("lru:sinks=4:recent=50%", "50%", {}),
        ("h2o", "pyramid(40)", {}),
        ("h2o:tiers=16@8t+4@100%", 24, {}),
        ("lru:every=4:tiers=8@50%+k4v2@50%", 24, {"prefill": "chunk:17"}),
        ("h2o:tiers=16x1-4x1", 24, {}),
    ],
)
def test_modes_keep_what_the_replay_keeps(policy: str, budget: int | str, words: dict[str, Any]) -> None:
    assert compare(model_of(), ids_of(60), 60, policy, budget, **words)[1] == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_families_keep_what_the_replay_keeps(family: str, dtype: Any) -> None:
    """Runs over 500 tokens, also in 2-byte types. Sets may differ only if two tokens have nearly equal ranks. Then the
    order in which probabilities are added decides which token is evicted."""
    first, differ, sets = compare(model_of(family, dtype), ids_of(100), 400, "h2o", 64)
    print(f"{differ} of {sets} sets differ")  # pytest -rP shows this line
    assert differ <= sets // 100, f"{differ} of {sets} sets differ, from query {first} on"


WORDS = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("graph", [False, True])
def test_a_budget_for_the_whole_text_equals_transformers(graph: bool) -> None:
    model, ids = model_of(), ids_of(30)
    with torch.no_grad():
        plain = model.generate(ids, **WORDS)
        for policy, budget in (("full", None), ("h2o", 90)):
            with kvlab.hf.evicting(model, policy, budget, length=90, graph=graph) as caches:
                for _ in range(2):  # the captured graph stays valid for the second text
                    caches.begin_anew()
                    assert torch.equal(model.generate(ids, **WORDS), plain)
            assert caches.tokens == 89 and caches.evictions == 0
        assert torch.equal(model.generate(ids, **WORDS), plain)  # equal, because the model is restored


@pytest.mark.parametrize("policy", ["h2o", "knorm", "criticalkv", "h2o:every=8", "streaming_h2o", "lru:tiers=4"])
def test_a_graph_keeps_what_steps_keep(policy: str) -> None:
    model, kept = model_of(), []
    for graph in (False, True):
        with torch.no_grad(), kvlab.hf.evicting(model, policy, 24, graph=graph) as caches:
            text = model.generate(ids_of(40), **WORDS)
        kept.append([text.tolist(), *(caches.kept(layer, head).tolist() for layer in (0, 1) for head in (0, 1))])
        assert caches.evictions > 0
    assert kept[0] == kept[1]


def test_a_capture_that_fails_counts_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise MemoryError

    model = model_of()
    with torch.no_grad(), kvlab.hf.evicting(model, "h2o", 24, graph=True) as caches:
        past = model(input_ids=ids_of(40), use_cache=True).past_key_values

        def step() -> None:
            model(input_ids=ids_of(1), past_key_values=past, use_cache=True)

        step()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "graph", fails)
            with pytest.raises(MemoryError):
                step()
        assert caches.tokens == past.get_seq_length() == 41
        step()
        assert caches.tokens == past.get_seq_length() == 42


@pytest.mark.parametrize("graph", [False, True])
def test_two_conversations_of_equal_length_do_not_mix(graph: bool) -> None:
    model, texts = model_of(), []
    for mixed in (False, True):
        with torch.no_grad(), kvlab.hf.evicting(model, "h2o", 24, graph=graph):
            pasts, logits = [], {}
            for text in (0, 1):
                pasts.append({cache_word(model): transformers.DynamicCache(), "use_cache": True})
                model(input_ids=ids_of(40, seed=text), **pasts[text])
            order = [(step, text) for step in range(5) for text in (0, 1)]
            for step, text in order if mixed else sorted(order, key=lambda one: one[1]):
                ids = ids_of(1, seed=10 * text + step)
                logits[step, text] = model(input_ids=ids, **pasts[text]).logits[0, -1]
            texts.append(torch.stack([logits[one] for one in order]))
    assert torch.equal(*texts) and not torch.equal(texts[0][-2], texts[0][-1])


def test_a_cache_works_without_a_block_and_names_what_cuda_lacks() -> None:
    model, caches = model_of(), []
    for block in (False, True):
        cache = transformers.DynamicCache() if block else kvlab.hf.Cache(model, "h2o", 24)
        with kvlab.hf.evicting(model, "h2o", 24) if block else torch.no_grad(), torch.no_grad():
            for count in (40, 1, 7, 1):
                model(ids_of(count, seed=count), **{cache_word(model): cache}, use_cache=True)
        caches.append(cache)
    assert caches[0].kept(1, 1).tolist() == caches[1].kept(1, 1).tolist() and caches[0].evictions > 0
    with pytest.raises(kvlab.hf.Refused, match="a cache on CUDA cannot be copied"):
        copy.deepcopy(caches[0])
    with pytest.raises(kvlab.hf.Refused, match="a cache on CUDA cannot be cropped"):
        caches[0].crop(-1)


def test_a_changing_rope_is_refused_from_its_first_token_on() -> None:
    newer = int(transformers.__version__.split(".")[0]) >= 5
    settings: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0}
    words = {"rope_parameters": settings | {"rope_theta": 1e4}} if newer else {"rope_scaling": settings}
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, head_dim=64,
        max_position_embeddings=64, **words,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).cuda().eval()
    cache = kvlab.hf.Cache(model, "full", length=64)
    with torch.no_grad():
        model(ids_of(64), **{cache_word(model): cache})
        with pytest.raises(kvlab.hf.Refused, match="in a text of 65 tokens the model's RoPE"):
            model(ids_of(1), **{cache_word(model): cache})


@pytest.mark.parametrize("graph", [False, True])
def test_a_text_ends_when_the_slots_are_full(graph: bool) -> None:
    model = model_of()
    with torch.no_grad(), kvlab.hf.evicting(model, "full", length=50, graph=graph) as caches:
        with pytest.raises(ValueError, match="51 tokens, but the cache has slots for at most 50; use another length="):
            model.generate(ids_of(40), **WORDS)
        assert caches.tokens == 50


def test_a_batch_is_its_rows_one_by_one() -> None:
    """Uses a policy without attention statistics. In a batch, the last bits of the statistics differ from those of
    single sequences, so near ties could be decided differently."""
    model, lengths = model_of(), (40, 31)
    ids = ids_of(80).view(2, 40)
    mask = torch.stack([(torch.arange(40) >= 40 - length).long() for length in lengths]).cuda()
    with torch.no_grad(), kvlab.hf.evicting(model, "sink", 24) as caches:
        texts = model.generate(ids, attention_mask=mask, **WORDS)
    for row, length in enumerate(lengths):
        with torch.no_grad(), kvlab.hf.evicting(model, "sink", 24) as own:
            assert torch.equal(model.generate(ids[row : row + 1, -length:], **WORDS)[0, length:], texts[row, 40:])
        assert caches.kept(1, 1, row).tolist() == own.kept(1, 1).tolist()


@pytest.mark.parametrize("policy", ["knorm", "sink", "window:once", "knorm:tiers=16@8t+4@100%"])
def test_turns_keep_what_the_cpu_keeps(policy: str) -> None:
    """Runs a prompt, an answer and another prompt, under policies for which near ties in the attention do not
    matter."""
    model, kept = model_of(), []
    for device in ("cpu", "cuda"):
        past = {cache_word(model): transformers.DynamicCache(), "use_cache": True}
        with torch.no_grad(), kvlab.hf.evicting(model.to(device), policy, 24, length=200) as caches:
            for count in (40, 1, 1, 30, 1, 1, 1):
                model(ids_of(count, seed=count).to(device), **past)
        kept.append([caches.kept(layer, head).tolist() for layer in (0, 1) for head in (0, 1)])
        assert caches.tokens == 75
    assert kept[0] == kept[1]


def test_memory_is_what_the_budget_says() -> None:
    """Checks that the memory is that of the keys, values, policy states and positions of all slots, and no more. All
    layers share one workspace for attention."""
    layers, budget = 12, 1024
    model = model_of(dtype=torch.bfloat16, layers=layers)
    with torch.no_grad():
        model(ids_of(8))
    gc.collect()  # frees memory that other tests have left
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    caches = kvlab.hf.evicting(model, "h2o", budget)
    taken = before - torch.cuda.mem_get_info()[0]
    slots = layers * 2 * budget
    assert caches.allocated_bytes == slots * 2 * 64 * 2
    assert caches.allocated_bytes <= taken <= 1.05 * slots * (2 * 64 * 2 + 8 + 4) + 2**22  # whole pages
    with caches, torch.no_grad():
        model.generate(ids_of(2000), **WORDS)
    assert caches.kv_bytes == slots * 2 * 64 * 2


@pytest.mark.parametrize("budget", [64, "25%bytes"])
def test_a_tier_plan_keeps_more_tokens_in_the_same_bytes(budget: int | str) -> None:
    model = model_of(dtype=torch.bfloat16)
    with torch.no_grad(), kvlab.hf.evicting(model, "h2o", budget, tiers="16:16t,4:100%", length=256) as caches:
        model.generate(ids_of(200), **(WORDS | {"max_new_tokens": 50}))
    full_bytes = 2 * 2 * 64 * 2 * 64 * 2
    assert 0.95 * full_bytes < caches.kv_bytes <= full_bytes and len(caches.kept(1, 1)) == 16 + 48 * 256 // 80


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: kvlab.hf.evicting(m, "h2o"), "--budget: policy h2o needs one"),
        (lambda m: kvlab.hf.evicting(m, "lagkv", 16), "lagkv"),
        (lambda m: kvlab.hf.evicting(m, "h2o", "ada(16)"), "the kernel library does not support it"),
        (lambda m: kvlab.hf.evicting(m, "h2o", 16, graph=True, record=True), "graph=True needs"),
        (lambda m: _call(m, input_ids=ids_of(3), attention_mask=torch.tensor([[1, 0, 1]]).cuda()), "leaves tokens out"),
        (lambda m: kvlab.hf.evicting(m.double(), "h2o", 16), "float64 is not supported on CUDA; use"),
        (lambda m: kvlab.hf.evicting(miniature("gpt_oss"), "h2o", 16), "layer 1 has sinks, which caches on CUDA do not support"),
        (lambda m: kvlab.hf.evicting(miniature("gemma3_text"), "h2o", 16, graph=True), "graph=True: layer 0 has a window"),
    ],
)
def test_unsupported_requests_are_refused(use: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(model_of())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("wrong", [{"attention_mask": [[1, 0] + [1] * 41]}, {"position_ids": [[100]]}])
def test_masks_and_positions_of_decoded_tokens_are_checked_later(graph: bool, wrong: dict[str, Any]) -> None:
    model = model_of()
    past = {cache_word(model): transformers.DynamicCache(), "use_cache": True}
    with pytest.raises(ValueError, match="a decoded token came with an attention_mask that leaves tokens out, or"):
        with torch.no_grad(), kvlab.hf.evicting(model, "h2o", 24, graph=graph):
            for count in (40, 1, 1):
                model(input_ids=ids_of(count), **past)
            model(input_ids=ids_of(1), **past, **{name: torch.tensor(value).cuda() for name, value in wrong.items()})
            model(input_ids=ids_of(1), **past)


def test_a_head_size_without_kernels_is_refused_by_name() -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config).cuda()
    with pytest.raises(ValueError, match="head_size is 16; it should be 64, 96, 128 or 256.*model.to"):
        kvlab.hf.evicting(model, "h2o", 16)


def _call(model: Any, **words: Any) -> None:
    with kvlab.hf.evicting(model, "h2o", 16), torch.no_grad():
        model(**words)


def test_the_replay_runs_on_cuda(small: kvlab.Trace) -> None:
    here, there = (kvlab.replay(small, ["h2o", "lru"], [16, 24], device=device).frame() for device in ("cpu", "cuda"))
    assert list(here.metric) == list(there.metric)
    numpy.testing.assert_allclose(here.value.to_numpy(), there.value.to_numpy(), rtol=2e-3, atol=1e-5)


def cache_of(draft_tokens: int = 0) -> Any:
    import kvlab.ops
    from kvlab import _kvlab

    requested = _kvlab.CacheRequest("h2o", [], "8", "dense", "", 0, 0.01, 100, 1, 2, 64)
    layers = [kvlab.ops.CacheLayer(0, 0.125, torch.zeros(32))]
    return kvlab.ops.KvCache(_kvlab.slot_plan(requested), layers, 4, 64, torch.float32, torch.device("cuda", 0), draft_tokens=draft_tokens)


def test_accepted_drafts_are_an_append() -> None:
    drafting, plain = cache_of(draft_tokens=4), cache_of()
    qkv = torch.randn(9, 8, 64, device="cuda")
    for cache in (drafting, plain):
        cache.append(0, qkv[:5], 0)
    drafting.begin_drafts([4])
    out = drafting.verify_drafts(0, qkv[5:])
    drafting.accept_drafts([3])
    torch.testing.assert_close(out[:3], plain.append(0, qkv[5:8], 5, ends_prompt=False), rtol=1e-5, atol=1e-5)
    assert drafting.info().tokens == 8
    for head in range(2):
        assert drafting.positions(0, head).tolist() == plain.positions(0, head).tolist()


def test_an_operators_error_names_the_cause() -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="fed is 3; layer 0 has had 0 tokens"):
        cache.append(0, torch.zeros(2, 8, 64, device="cuda"), 3)
    with pytest.raises(ValueError, match="layer is 1; it should be at least 0 and below 1"):
        cache.step(1, torch.zeros(1, 8, 64, device="cuda"))


def test_torch_compile_works_around_operators() -> None:
    def step(cache: Any, qkv: Any) -> Any:
        out = torch.empty(1, 4, 64, device="cuda")
        torch.ops.kvlab.step(cache, 0, qkv * 2, out)
        return out + 1

    plain, compiled = cache_of(), cache_of()
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(12):
        qkv = torch.randn(1, 8, 64, device="cuda")
        for cache in (plain, compiled):
            cache.begin_step()
        assert torch.equal(step(plain.handle, qkv), traced(compiled.handle, qkv))
    assert plain.positions(0, 1).tolist() == compiled.positions(0, 1).tolist()


def test_a_sequence_can_start_again_and_be_copied() -> None:
    cache = cache_of()
    rows = torch.randn(20, 1, 8, 64, device="cuda")

    def run() -> list[int]:
        for row in rows:
            cache.begin_step()
            cache.step(0, row)
        return list(cache.positions(0, 1))

    first = run()
    cache.start(0, seed=3)
    assert cache.info().tokens == 0 and not len(cache.positions(0, 1))
    assert run() == first  # h2o uses no random numbers
    cache.copy(0, 0)
    with pytest.raises(ValueError, match="to is 1; it should be at least 0 and below 1"):
        cache.copy(0, 1)
