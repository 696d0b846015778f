"""Tests of kvpress's presses as policies, and of policies as a press. Needs the extra `kvpress`, which pins the version
of kvpress."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import numpy
import pytest
from conftest import ROOT, SAMPLE, TINY, random_arrays

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
kvpress = pytest.importorskip("kvpress")

PROMPT, TOKENS = 96, 128
NAMES = ["Knorm", "SnapKV", "TOVA", "ObservedAttention", "StreamingLLM", "KeyDiff", "LagKV", "ExpectedAttention"]
NAMES += ["LeverageScore", "NonCausalAttn", "Compactor", "CUR", "Cap", "Random", "CriticalKV"]


def press_of(name: str, ratio: float, **words: Any) -> Any:
    if name == "CriticalKV":
        return kvpress.CriticalKVPress(press_of("SnapKV", ratio, **words))
    own = {"SnapKV": {"window_size": 16}, "LagKV": {"lag_size": 16}, "Random": {"seed": 3}}.get(name, {})
    return getattr(kvpress, f"{name}Press")(compression_ratio=ratio, **own | words)


def live_kept(model: Any, ids: Any, press: Any) -> dict[int, Any]:
    """For each layer, the tokens that the press keeps in its own forward pass: [kv_heads, tokens] of bool."""
    kept, score = {}, press.score

    def scored(module: Any, *rest: Any) -> Any:
        torch.manual_seed(module.layer_idx)
        scores = score(module, *rest)
        stay = scores.topk(kvpress.utils.compute_n_kept(scores.shape[-1], press.compression_ratio)).indices[0]
        kept[module.layer_idx] = torch.zeros(scores.shape[1:], dtype=torch.bool).scatter_(1, stay, True).numpy()
        return scores

    press.score = scored
    with torch.no_grad(), press(model):
        model.model(ids, past_key_values=transformers.DynamicCache())
    return kept


def replayed(trace: kvlab.Trace, policy: Any, budget: str, **words: Any) -> dict[int, Any]:
    """For each layer, the tokens of the prompt that a replay keeps at the first decoded query, in the same form."""
    run = kvlab.replay(trace, policy, budget, references=False, **words)
    return {
        layer: numpy.stack(
            [run.kept(layer, head, policy).live[0, : trace.prompt_tokens] for head in range(trace.kv_heads)]
        )
        for layer in trace.layer_numbers
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bundled model, a text and its trace."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager")
    ids = torch.from_numpy(kvlab.Trace(SAMPLE).ids[:TOKENS].astype(int))[None]
    trace = kvlab.hf.capture(model, ids, prompt_tokens=PROMPT, out=tmp_path_factory.mktemp("press") / "trace")
    return types.SimpleNamespace(model=model, ids=ids, trace=trace)


@pytest.mark.parametrize("ratio", [0.5, 0.75])
@pytest.mark.parametrize("name", NAMES)
def test_a_press_keeps_the_same_tokens_offline_and_live(told: Any, name: str, ratio: float) -> None:
    mine = kvlab.from_press(press_of(name, 0.1), model=TINY)
    found = replayed(told.trace, mine, f"ratio({ratio})")
    live = live_kept(told.model, told.ids[:, :PROMPT], press_of(name, ratio))
    same = [found[layer] == live[layer] for layer in live]
    assert len(live) == told.trace.layers and numpy.mean(same) > 0.999, numpy.mean(same)
    assert all(head.sum() == int(PROMPT * (1 - ratio)) for layer in found.values() for head in layer)


def test_ties_at_the_cut_are_reported(told: Any) -> None:
    policy = kvlab.from_press(press_of("LagKV", 0.5), name="tied")
    with pytest.warns(UserWarning, match="LagKVPress: .* tokens in layer 0, KV head .* have the same score"):
        kvlab.replay(told.trace, policy, "ratio(0.9)", layers=[0])
    assert policy.ties and policy.ties[0][:2] == (0, 0)


def test_wrappers_map_or_are_refused_by_name(told: Any) -> None:
    rotated = kvlab.from_press(kvpress.KeyRerotationPress(press_of("Knorm", 0.5)), name="rotated")
    assert rotated.info.positions == "cache" and rotated.budget == "ratio(0.5)"
    shared = kvlab.from_press(kvpress.AdaKVPress(press_of("SnapKV", 0.5)), name="shared")
    run = kvlab.replay(told.trace, shared, shared.budget, references=False)
    kept = [run.kept(1, head, shared).live[0, :PROMPT].sum() for head in range(told.trace.kv_heads)]
    assert shared.budget == "ada(ratio(0.5))" and sum(kept) == len(kept) * PROMPT // 2
    for press, why in [
        (kvpress.PyramidKVPress(0.5), "PyramidKVPress: does not choose tokens by its scores alone"),
        (kvpress.ChunkKVPress(press_of("Knorm", 0.5)), "ChunkKVPress: is not a ScorerPress"),
        (kvpress.CriticalKVPress(kvpress.QFilterPress(0.5)), "QFilterPress: reads its own weights"),
    ]:
        with pytest.raises(ValueError, match=why):
            kvlab.from_press(press)
    with pytest.raises(ValueError, match="reads the output projection; give model="):
        kvlab.replay(told.trace, kvlab.from_press(press_of("CriticalKV", 0.5), name="unknown_output"), 64)


def test_a_press_scores_one_prompt_and_keeps_a_token() -> None:
    policy = kvlab.from_press(press_of("Knorm", 0.5), name="one_prompt")
    segments = [(40, "prompt"), (8, "decode"), (24, "prompt"), (8, "decode")]
    turns = kvlab.Trace.from_arrays(**random_arrays(), segments=segments)
    with pytest.raises(ValueError, match="from_press: Knorm scores one prompt, but a second one ends at token 72"):
        kvlab.replay(turns, policy, 20)
    assert kvlab.replay(turns, policy, 48, references=False).kept(0, 0, policy).live[8].sum() == 48
    with pytest.raises(ValueError, match="a budget of 1 token keeps no token of the prompt"):
        kvlab.replay(kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32), policy, 1)


@pytest.mark.parametrize("policy", ["h2o:once", "snapkv", "sink:once", "random"])
def test_a_policy_as_a_press_keeps_what_a_replay_keeps(told: Any, policy: str) -> None:
    press = kvlab.KvlabPress(policy, compression_ratio=0.5)
    cache = transformers.DynamicCache()
    with torch.no_grad(), press(told.model):
        told.model.model(told.ids[:, :PROMPT], past_key_values=cache)
    found = replayed(told.trace, policy, "ratio(0.5)", positions="original")
    for layer, kept in found.items():
        for head, live in enumerate(kept):
            values = torch.from_numpy(told.trace.read("v", layer, head)[:PROMPT][live])
            assert torch.allclose(cache.layers[layer].values[0, head], values, atol=1e-4)


@pytest.mark.parametrize(("theirs", "policy"), [("Knorm", "knorm:once"), ("StreamingLLM", "sink:once")])
def test_the_pipeline_gives_the_same_text_with_a_policy_and_its_press(told: Any, theirs: str, policy: str) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"), bos_token="")
    pipe = transformers.pipeline("kv-press-text-generation", model=told.model, tokenizer=tokenizer)
    context = "Remember the secret number of Quito.\n" + "One day Ben went to the park with his dog. " * 8
    presses = [press_of(theirs, 0.85), kvlab.KvlabPress(policy, compression_ratio=0.85), None]
    words = {"questions": ["What is it?", "Where is Ben?"], "answer_prefix": "It is", "max_new_tokens": 16}
    said, mine, full = (pipe(context, press=press, **words)["answers"] for press in presses)
    assert said == mine and said != full


def test_an_unsupported_transformers_version_is_named() -> None:
    with pytest.raises(kvlab.hf.Refused, match="calls attention without past_key_values, which kvpress reads"):
        kvlab.KvlabPress("h2o", 24).forward_hook(None, None, {}, None)


@pytest.mark.skipif(not os.environ.get("KVLAB_COMMAND"), reason="KVLAB_COMMAND is not set")
def test_presses_decode_what_the_policies_decode(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "presses.md"
    command = [sys.executable, ROOT / "tools/experiments/presses.py", "--kvlab", os.environ["KVLAB_COMMAND"], "--model", TINY]
    command += ["--device", "cpu", "--quick", "--answers", 6, "--out", page]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == 2 * 8
    same = [int(cell.removesuffix("%")) for row in rows for cell in (row[4], row[7]) if row[0] != "`KeyDiffPress`" and cell != "-"]
    assert len(same) >= 2 * 7 and numpy.mean(same) > 95, page.read_text()
