"""Tests that kvlab.hf.evicting keeps the same tokens, while transformers runs, as a replay of the same queries and
keys."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy
import pytest

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if int(torch.__version__.split(".")[0]) < 2:
    pytest.skip("kvlab.hf.evicting needs torch 2", allow_module_level=True)
from test_hf import ids_of, model_of  # noqa: E402

from kvlab.hf.calls import cache_word  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
DECODED = [entry.name for entry in kvlab.policies()]


def decode(model: Any, ids: Any, steps: int, caches: Any) -> list[list[Any]]:
    """Decodes `steps` tokens. Returns, for each layer and KV head, the kept set at each decoded query."""
    past = {cache_word(model): transformers.DynamicCache(), "use_cache": True}
    kept: list[list[Any]] = [[] for _ in range(caches._attended.shape.layers * caches._attended.shape.kv_heads)]
    with torch.no_grad():
        logits = model(ids, **past).logits
        for _ in range(steps):
            logits = model(logits[:, -1:].argmax(-1), **past).logits
            for at, sets in enumerate(kept):
                sets.append(caches.kept(*divmod(at, caches._attended.shape.kv_heads)))
    return kept


def check_against_replay(model: Any, ids: Any, steps: int, policy: Any, budget: int | str, **words: Any) -> None:
    with kvlab.hf.evicting(model, policy, budget, record=True, length=ids.shape[1] + steps, **words) as caches:
        kept = decode(model, ids, steps, caches)
    trace = caches.trace()
    assert trace.segments == [(0, ids.shape[1], "prompt"), (ids.shape[1], steps, "decode")]
    run = kvlab.replay(trace, policy, () if policy == "full" else budget, references=False, model=model, **words)
    for at, sets in enumerate(kept):
        live = run.kept(*divmod(at, trace.kv_heads), str(policy).split(":")[0]).live
        for query, positions in zip(live, sets, strict=True):
            numpy.testing.assert_array_equal(numpy.flatnonzero(query), positions)


@pytest.mark.parametrize("policy", DECODED)
def test_every_policy_keeps_what_the_replay_keeps(policy: str) -> None:
    check_against_replay(model_of(), ids_of(60), 60, policy, 40)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("h2o:every=8", {}),
        ("h2o:scope=layer", {}),
        ("h2o:once", {}),
        ("h2o", {"prefill": "chunk:7"}),
        ("h2o", {"prefill": "stream", "positions": "cache"}),
        ("random", {"seed": 7}),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_modes_keep_what_the_replay_keeps(policy: str, words: dict[str, Any], family: str) -> None:
    check_against_replay(model_of(family), ids_of(40), 40, policy, 24, **words)


@pytest.mark.parametrize("tiers", ["4", "16@8t+8@40%+k4v2@60%"])
@pytest.mark.parametrize("words", [{}, {"prefill": "chunk:7"}])
def test_tier_plans_keep_what_the_replay_keeps_in_the_bytes_of_the_budget(tiers: str, words: dict[str, Any]) -> None:
    model, policy = model_of(hidden_size=128), f"a2sf:recent=4:tiers={tiers}"
    check_against_replay(model, ids_of(90), 30, policy, 24, **words)
    with kvlab.hf.evicting(model, policy, 24) as caches:
        decode(model, ids_of(90), 1, caches)
    if tiers == "4":
        tokens = 24 * 128 // 40  # a token takes 40 bytes in 4 bits and 128 bytes in 16 bits, per layer and KV head
        assert caches.kv_bytes == 4 * 40 * tokens


def test_exempt_layers(tmp_path: pathlib.Path) -> None:
    budgets = tmp_path / "budgets.json"
    budgets.write_text("[null, 20]")
    check_against_replay(model_of(), ids_of(40), 30, "h2o", f"@{budgets}")
    check_against_replay(model_of(), ids_of(40), 30, "h2o", f"@{budgets}", positions="cache")


def test_a_policy_file_sets_policy_budget_and_positions(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "policy.json"
    protected_tokens = {"sinks": 4, "recent": "25%"}
    said = {"format": 1, "policy": "h2o", "params": {}, "protected": protected_tokens, "budget": [[20, 12], [16, 24]]}
    said["model"] = {"name": "none", "weights_xxh3": ""}
    file.write_text(json.dumps(said | {"positions": "cache", "prefill": "chunk:7", "threshold": 0.01}))
    (tmp_path / "budgets.json").write_text(json.dumps(said["budget"]))
    model = model_of()
    words: list[dict[str, Any]] = [
        {"policy": str(file)},
        {"policy": "h2o:sinks=4:recent=25%", "budget": f"@{tmp_path}/budgets.json", "positions": "cache", "prefill": "chunk:7"},
    ]
    kept = []
    for one in words:
        with kvlab.hf.evicting(model, **one) as caches:
            kept.append([sets[-1].tolist() for sets in decode(model, ids_of(40), 10, caches)])
    assert kept[0] == kept[1] and [len(own) for own in kept[0]] == [20, 12, 16, 24]
    with pytest.raises(ValueError, match="the policy file sets budget and positions"):
        kvlab.hf.evicting(model, str(file), 24)


def test_budgets_by_head() -> None:
    check_against_replay(model_of(), ids_of(40), 30, "h2o", "ada(24)")
    check_against_replay(model_of(), ids_of(40), 30, "h2o", "50%")


@pytest.mark.parametrize("prompt", [10, 30, 60])
@pytest.mark.parametrize("budget", ["pyramid(40)", "ada(24)"])
def test_budgets_by_layer_and_prompts_shorter_than_them(budget: str, prompt: int) -> None:
    check_against_replay(model_of(num_hidden_layers=4), ids_of(prompt), 20, "h2o", budget)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_user_policy(by_head: bool) -> None:
    @kvlab.policy(needs="mass", state={"mass": "u8"}, recent="50%", by_head=by_head)
    def my_evicting_h2o(state: Any, seen: Any, token: Any, step: Any) -> Any:
        state["mass"] += seen.mass_by_head.sum(0, dtype="u8") if by_head else seen.mass
        return state["mass"]

    model = model_of()
    texts = []
    for policy in (my_evicting_h2o, "h2o"):
        with kvlab.hf.evicting(model, policy, 24) as caches:
            texts.append(decode(model, ids_of(40), 20, caches))
    for mine, header in zip(*texts, strict=True):
        for one, other in zip(mine, header, strict=True):
            numpy.testing.assert_array_equal(one, other)


def test_a_policy_of_a_header(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "policies" / "mass" / "h2o.hpp").read_text()
    text = text.replace('"h2o"', '"h2o_of_a_header"').replace("struct H2O ", "struct OfAHeader ")
    (tmp_path / "mine.hpp").write_text(text)
    mine = kvlab.policy_source(tmp_path / "mine.hpp")
    check_against_replay(model_of(), ids_of(40), 20, mine, 24)
    check_against_replay(model_of(), ids_of(40), 20, f"{mine}:every=8", 24)


def test_an_adapters_output_projection_is_the_merged_one() -> None:
    model = model_of()
    weights = model.model.layers[1].self_attn.o_proj.weight
    with torch.no_grad():
        weights[:, 8:16] *= 50  # the weights for query head 1, which belongs to KV head 0
    check_against_replay(model, ids_of(40), 30, "criticalkv", 24)
    plain = weights.detach().clone()

    class Doubled(torch.nn.Module):  # like an adapter: a module without weights
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.in_features = inner, inner.in_features

        def forward(self, x: Any) -> Any:
            return self.inner(x) * 2

    model.model.layers[1].self_attn.o_proj = Doubled(model.model.layers[1].self_attn.o_proj)
    check_against_replay(model, ids_of(40), 30, "criticalkv", 24)
    assert torch.equal(weights, plain)


@pytest.mark.parametrize(
    ("policy", "rows"), [("h2o", 64), ("criticalkv", 64), ("sink", 64), ("h2o:every=16", 64 + 15), ("h2o:scope=layer", 64)]
)
@pytest.mark.parametrize("prompt", [20, 64, 300])
@pytest.mark.parametrize("prefill", ["dense", "chunk:50"])
def test_allocated_memory_equals_the_budget(policy: str, rows: int, prompt: int, prefill: str) -> None:
    model, positions = model_of(), "original"
    row = 2 * 2 * 2 * 8 * 4  # layers, KV heads, K and V, head size, float32
    held: list[int] = []
    with kvlab.hf.evicting(model, policy, 64, prefill=prefill, positions=positions) as caches:
        hooks = [
            module.self_attn.o_proj.register_forward_pre_hook(lambda *_: held.append(caches.allocated_bytes))
            for module in model.model.layers  # each layer frees the memory of its prompt before the next one runs
        ]
        decode(model, ids_of(prompt), 80, caches)
        for hook in hooks:
            hook.remove()
    assert max(held) <= -(-rows // 16) * 16 * row, "memory may exceed the budget only up to a multiple of 16 rows"
    assert held[-1] >= caches.kv_bytes >= 63 * row


def test_a_budget_for_the_whole_text_equals_transformers() -> None:
    model, ids = model_of(), ids_of(30)
    words = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        plain = model.generate(ids, **words)
        for policy, budget in (("full", None), ("h2o", 80)):
            with kvlab.hf.evicting(model, policy, budget) as caches:
                assert torch.equal(model.generate(ids, **words), plain)
            assert caches.tokens == 79 and caches.evictions == 0
        with kvlab.hf.evicting(model, "sink", 16) as caches:
            for _ in range(2):
                caches.begin_anew()
                model.generate(ids, **words)
                assert caches.tokens == 79
        assert caches.kv_bytes == 2 * 2 * 16 * 2 * 8 * 4  # layers, heads, tokens, K and V, head size, float32
        numpy.testing.assert_array_equal(caches.kept(1, 1), [0, 1, 2, 3, *range(79 - 12, 79)])
        assert torch.equal(model.generate(ids, **words), plain)  # equal, because the model is restored


def test_a_foreign_forward_is_not_removed() -> None:
    model = model_of()
    module = model.model.layers[0].self_attn
    module.forward = own = module.forward
    with kvlab.hf.evicting(model, "h2o", 16) as caches, torch.no_grad():
        model(ids_of(20))
        assert caches.tokens == 20 and vars(module)["forward"] is own
    assert vars(module)["forward"] is own and not module._forward_pre_hooks


def test_the_real_model() -> None:
    folder = ROOT / "engine" / "models" / "smollm2"
    if not (folder / "config.json").exists():
        pytest.skip("engine/models/smollm2 is missing; ./dev model smollm2 makes it")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    ids = torch.randint(0, 40000, (1, 100), generator=torch.Generator().manual_seed(5))
    check_against_replay(model, ids, 40, "h2o", 64)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: kvlab.hf.evicting(m, "h2o"), "budget: policy h2o needs one"),
        (lambda m: kvlab.hf.evicting(m, "feature:name=mine", 16), "feature mine: a decoder"),
        (lambda m: kvlab.hf.evicting(m, "oracle_attention", 16), "uses future attention"),
        (lambda m: kvlab.hf.evicting(m, "h2o", 16).trace(), "nothing was recorded"),
        (lambda m: _call(m, input_ids=ids_of(3), attention_mask=torch.tensor([[1, 0, 1]])), "leaves tokens out"),
    ],
)
def test_unsupported_requests_are_refused(use: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(model_of())


def _call(model: Any, **words: Any) -> None:
    with kvlab.hf.evicting(model, "h2o", 16), torch.no_grad():
        model(**words)
