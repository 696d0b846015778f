"""Tests of kvlab.hf.evicting on miniatures of transformers' families, with single sequences and with batches."""

from __future__ import annotations

import collections
import contextlib
import os
from typing import Any

import numpy
import pytest

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_miniatures import miniatures
from test_families import IDS, one_thread  # noqa: F401
from test_families import made as made_by_default

from kvlab.hf.calls import cache_among, cache_word

PROMPT, TOKENS, BUDGET = 60, 100, 24
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

EVICTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {}),
    ("glm4", {}),
    ("cohere", {}),
    ("olmo2", {}),
    ("granite", {"attention_multiplier": 0.3}),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    ("gemma2", {"sliding_window": 16, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4}),
    ("gemma3_text", {"sliding_window": 16}),
    ("gemma3", {"sliding_window": 16}),  # a model inside a wrapper
    ("gpt_oss", {"sliding_window": 16}),
    ("qwen3_next", {}),
    ("qwen3_5_text", {}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("apertus", {}),
    ("hunyuan_v1_dense", {}),  # norms after RoPE, so keys are rotated back
    ("qwen3_moe", {}),
    ("gemma4_text", {"sliding_window": 16}),
    ("mimo_v2_flash", {"sliding_window": 16}),  # layers with sliding windows have other heads
]
NAMES = [family for family, _ in EVICTED]


def made(family: str, words: dict[str, Any]) -> Any:
    model = made_by_default(family, words)
    if "attn_logit_softcapping" in words:
        model.set_attn_implementation("eager")  # with other implementations, transformers 4 leaves out soft caps
    return model


def text_of(model: Any, ids: Any, **words: Any) -> Any:
    """The text that the model continues with."""
    with torch.no_grad():
        return model.generate(ids, **GREEDY, **words)[:, ids.shape[1] :]


def check_full(model: Any) -> None:
    plain = text_of(model, IDS[:, :PROMPT])
    with kvlab.hf.evicting(model, "full", length=TOKENS) as caches:
        assert torch.equal(text_of(model, IDS[:, :PROMPT]), plain)
    assert caches.tokens == PROMPT + 23 and caches.evictions == 0


def check_kept(model: Any) -> None:
    """Compares the kept tokens of all layers with a replay of the recorded queries and keys. For the first layer, also
    compares them with a replay of a trace that kvlab.hf.capture makes."""
    past: dict[str, Any] = {}
    with kvlab.hf.evicting(model, "h2o", BUDGET, record=True, length=TOKENS) as caches, torch.no_grad():
        kept: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
        acted = list(caches._attended.layer_indices)
        for ids in (IDS[:, :PROMPT], *IDS[:, PROMPT:TOKENS].split(1, 1)):
            past = {cache_word(model): cache_among(model(ids, **past, use_cache=True).values())}
            assert next(iter(past.values())).get_seq_length() == caches.tokens
            for layer, head in ((layer, head) for layer in acted for head in range(caches._attended.shape.kv_heads)):
                kept[layer, head].append(caches.kept(layer, head))
        for layer in set(caches._attended.layers) - set(acted):
            window = caches._attended.layers[layer].window
            numpy.testing.assert_array_equal(caches.kept(layer, 0), numpy.arange(max(0, TOKENS - window), TOKENS))
    assert caches.evictions == len(kept) * (TOKENS - BUDGET)
    replayed = [(caches.trace(), acted)]
    with contextlib.suppress(kvlab.hf.Refused):  # traces cannot have layers with different heads
        replayed.append((kvlab.hf.capture(model, IDS[:, :TOKENS], prompt_tokens=PROMPT, progress=False), acted[:1]))
    assert len(replayed) == 2 or caches.window_bytes > 0
    for trace, layers in replayed:
        run = kvlab.replay(trace, "h2o", BUDGET, references=False)
        for layer, head in ((layer, head) for layer, head in kept if layer in layers):
            live = run.kept(layer, head, "h2o").live
            for query, positions in zip(live, kept[layer, head][1:], strict=True):
                numpy.testing.assert_array_equal(numpy.flatnonzero(query), positions)


@pytest.mark.parametrize(("family", "words"), EVICTED, ids=NAMES)
def test_full_equals_the_plain_model(family: str, words: dict[str, Any]) -> None:
    check_full(made(family, words))


@pytest.mark.parametrize(("family", "words"), EVICTED, ids=NAMES)
def test_kept_tokens_equal_the_replays(family: str, words: dict[str, Any]) -> None:
    check_kept(made(family, words))


def padded(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """A batch of prompts of these lengths, and the mask that hides the padding before the shorter ones."""
    rows = [IDS[0, at * 90 : at * 90 + length] for at, length in enumerate(lengths)]
    longest = max(lengths)
    ids = torch.stack([torch.cat((row.new_zeros(longest - len(row)), row)) for row in rows])
    return ids, torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])


BATCHED = [
    "llama",
    "mistral",
    "glm4",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "gpt_oss",
    "qwen3_5_text",
    "hunyuan_v1_dense",
    "gpt2",
]


@pytest.mark.parametrize("lengths", [(40, 40), (31, 60, 1)])
@pytest.mark.parametrize("family", BATCHED)
def test_a_batch_is_its_rows_one_by_one(family: str, lengths: tuple[int, ...]) -> None:
    model = made(family, dict(EVICTED)[family])
    ids, mask = padded(lengths)
    with kvlab.hf.evicting(model, "h2o", BUDGET, length=TOKENS, record=True) as caches:
        texts = text_of(model, ids, attention_mask=mask)
        again = text_of(model, ids, attention_mask=mask) if caches.begin_anew() is None else None
    assert torch.equal(texts, again) and caches.tokens == max(lengths) + 23
    held = 0
    for row, length in enumerate(lengths):
        with kvlab.hf.evicting(model, "h2o", BUDGET, length=TOKENS) as own:
            assert torch.equal(text_of(model, ids[row : row + 1, -length:])[0], texts[row])
        held += own.evictions
        for layer in caches._attended.layers:
            numpy.testing.assert_array_equal(caches.kept(layer, 1, row), own.kept(layer, 1))
        assert caches.trace(row=row).tokens == length + 23
    assert caches.evictions == held > 0
    with pytest.raises(IndexError, match=f"row {len(lengths)} does not exist; the batch has {len(lengths)}"):
        caches.kept(0, 0, len(lengths))


def test_a_batched_chat_continues_after_padding() -> None:
    """The prompts of the second turn also have unequal lengths, so there is padding between the turns."""
    model = made("qwen3", {})
    first, second = padded((40, 25)), padded((10, 21))
    mask = torch.cat((first[1], torch.ones(2, 1, dtype=torch.int64), second[1]), 1)
    past: dict[str, Any] = {"use_cache": True}
    with kvlab.hf.evicting(model, "h2o", BUDGET) as caches, torch.no_grad():
        for begin, ids in ((0, first[0]), (40, IDS[:, 7:9].view(2, 1)), (41, second[0])):
            shown = mask[:, : begin + ids.shape[1]]
            positions = (shown.cumsum(1) - 1).clamp(0)[:, begin:]
            made_of = model(ids, attention_mask=shown, position_ids=positions, **past)
            past[cache_word(model)] = cache_among(made_of.values())
    past = {"use_cache": True}
    with kvlab.hf.evicting(model, "h2o", BUDGET), torch.no_grad():
        made_of_one = model(first[0], attention_mask=first[1], **past)
        past[cache_word(model)] = cache_among(made_of_one.values())
        with pytest.raises(ValueError, match="padding after tokens.*position_ids"):
            model(second[0], attention_mask=torch.cat((first[1], second[1]), 1), **past)
    for row, (one, two) in enumerate(((40, 10), (25, 21))):
        past = {"use_cache": True}
        with kvlab.hf.evicting(model, "h2o", BUDGET) as own, torch.no_grad():
            for ids in (first[0][row, -one:], IDS[0, 7 + row : 8 + row], second[0][row, -two:]):
                alone = model(ids[None], **past)
                past[cache_word(model)] = cache_among(alone.values())
        torch.testing.assert_close(alone.logits[0, -1], made_of.logits[row, -1], rtol=1e-4, atol=1e-4)
        assert own.tokens == one + 1 + two
        for layer in range(4):
            numpy.testing.assert_array_equal(caches.kept(layer, 0, row), own.kept(layer, 0))


@pytest.mark.skipif(not os.environ.get("KVLAB_EVERY"), reason="it takes minutes, and KVLAB_EVERY is not set")
def test_every_family_is_evicted_from_or_refused_in_one_line() -> None:
    counts: collections.Counter[str] = collections.Counter()
    for family, model in miniatures(counts, lambda model: text_of(model, IDS[:, :PROMPT])):
        try:
            check_full(model)
            check_kept(model)
            counts["evicted"] += 1
        except kvlab.hf.Refused as refused:
            assert "\n" not in str(refused)
            counts["refused"] += 1
            print(f"{family}: {refused}")
        except Exception as error:
            counts["wrong"] += 1
            print(f"{family}: WRONG: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    print(dict(counts))
    assert counts["evicted"] >= 125 and counts["wrong"] == 0
