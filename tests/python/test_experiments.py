"""Runs the experiments that need the Python package, up to their pages, on a few tokens of the bundled model."""

import importlib
import itertools
import os
import pathlib
import subprocess
import sys
import types

import numpy
import pytest
from conftest import ROOT, TINY

import kvlab

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.skipif(not os.environ.get("KVLAB_COMMAND"), reason="KVLAB_COMMAND is not set")
def test_plans_write_their_page(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "plans.md"
    words = ["--kvlab", os.environ["KVLAB_COMMAND"], "--model", ROOT / "engine/models/tiny", "--quick", "--tokens", 200, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/experiments/plans.py", *map(str, words), "--out", page], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in page.read_text().splitlines() if line.split(" | ")[1:2] in (["none"], ["prompt"])]
    assert len(rows) == 9
    for row in rows:
        cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        assert 0.5 < float(cells[5]) < 2  # measured KL divided by predicted KL
        assert float(cells[9]) < 1.1  # the plan's KL relative to that of the best single format


@pytest.mark.skipif(not os.environ.get("KVLAB_COMMAND"), reason="KVLAB_COMMAND is not set")
def test_the_cache_of_transformers_loses_what_kvlab_says(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("optimum.quanto")
    page = tmp_path / "engines.md"
    words = ["--kvlab", os.environ["KVLAB_COMMAND"], "--model", ROOT / "engine/models/tiny", "--quick", "--tokens", 160, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/experiments/transformers_cache.py", *map(str, words), "--out", page],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| `int")]
    assert [row[0] for row in rows] == ["`int4_g64`", "`int2_g64`"]
    for row in rows:
        assert 0.8 < float(row[4]) < 1.25  # KL in transformers relative to kvlab's


@pytest.fixture(scope="module")
def heads() -> types.ModuleType:
    """tools/experiments/heads.py as a module."""
    sys.path.insert(0, str(ROOT / "tools/experiments"))
    return importlib.import_module("heads")


def rotated(rows: numpy.ndarray, inv_freq: numpy.ndarray) -> numpy.ndarray:
    """[token, dim] after RoPE in float64, rounded to bfloat16 as the engine rounds."""
    angle = numpy.outer(numpy.arange(len(rows)), inv_freq.astype(float))
    low, high = numpy.split(rows.astype(float), 2, axis=1)
    turned = [low * numpy.cos(angle) - high * numpy.sin(angle), high * numpy.cos(angle) + low * numpy.sin(angle)]
    return torch.from_numpy(numpy.concatenate(turned, axis=1)).bfloat16().double().numpy()


def brute_outputs(trace: kvlab.Trace, layer: int, projection: numpy.ndarray, query: int) -> numpy.ndarray:
    """[query_head, hidden]: the outputs of the heads at one query after W_o, in float64."""
    found = []
    for head in range(trace.query_heads):
        own = head // (trace.query_heads // trace.kv_heads)
        inv_freq = trace.inv_freq.reshape(-1)
        row = rotated(trace.read("q", layer, head), inv_freq)[query]
        keys = rotated(trace.read("k", layer, own), inv_freq)[: query + 1]
        scores = keys @ row * trace.head_size**-0.5
        weights = numpy.exp(scores - scores.max())
        output = weights / weights.sum() @ trace.read("v", layer, own)[: query + 1].astype(float)
        found.append(output @ projection[head].astype(float))
    return numpy.stack(found)


def test_shares_of_heads_equal_brute_force(
    heads: types.ModuleType, sample: kvlab.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    residual = numpy.random.default_rng(1).uniform(1, 9, sample.tokens).astype("float32")  # the sample has none
    monkeypatch.setattr(heads, "residual_of", lambda trace, layer: [residual[:600], residual[600:]])
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    layer, first = 2, sample.tokens - 6
    projection = heads.projections_of(model)[layer]
    seen = heads.outputs_of(sample, layer, projection, first)
    for row, query in enumerate(range(first, sample.tokens)):
        outputs = brute_outputs(sample, layer, projection.numpy(), query)
        grouped = outputs.reshape(sample.kv_heads, -1, outputs.shape[1]).sum(1)
        for parts, gram in ((outputs, seen.gram), (grouped, heads.by_kv_head(seen.gram, sample.kv_heads))):
            norms = heads.norms_of(gram)
            squares = (parts**2).sum(1)
            for count in range(1, len(parts) + 1):
                subsets = [list(own) for own in itertools.combinations(range(len(parts)), count)]
                best = max(subsets, key=lambda own: squares[own].sum())
                share = heads.kept_share(norms, norms, count)[row].item()
                assert share == pytest.approx(squares[best].sum() / squares.sum(), rel=1e-4)
                rest = [part for part in range(len(parts)) if part not in best]
                error = heads.left_out(gram, norms, count)[row].item()
                assert error == pytest.approx((parts[rest].sum(0) ** 2).sum() / residual[query], rel=1e-3, abs=1e-9)
                # A worse choice of heads: in the order of their numbers.
                order = -torch.arange(len(parts)).expand_as(norms)
                own = list(range(count))
                assert heads.kept_share(norms, order, count)[row].item() == pytest.approx(squares[own].sum() / squares.sum(), rel=1e-4)
                assert heads.recall(norms, order, count)[row].item() == pytest.approx(len({*own} & {*best}) / count)


def plant_trace(tokens: int, seed: int) -> kvlab.Trace:
    """Makes a trace of two layers with 4 query heads and 2 KV heads, in which each query attends to its own token. In
    layer 1, one KV head has values that are 100 times as large as those of the other one. Which head this is can be
    predicted from the first element of the first query head in layer 0: KV head 0 if it is 1, and KV head 1 if it is
    -1."""
    random = numpy.random.default_rng(seed)
    q, v = random.standard_normal((2, 4, tokens, 16)), random.standard_normal((2, 2, tokens, 16))
    k = random.standard_normal((2, 2, tokens, 16))
    k *= 20 / numpy.linalg.norm(k, axis=-1, keepdims=True)
    q[0, 0, :, 0] = random.choice([-1, 1], tokens, p=[0.25, 0.75])
    q[1] = k[1].repeat(2, axis=0)
    v[1] *= numpy.where(q[0, 0, :, 0] == [[1], [-1]], 1, 0.01)[:, :, None]
    return kvlab.Trace.from_arrays(*(part.astype("float32") for part in (q, k, v)), prompt_tokens=8)


def test_planted_heads_are_found(heads: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "residual_of", lambda trace, layer: [numpy.ones(trace.tokens, numpy.float32)])
    projection = torch.from_numpy(numpy.random.default_rng(3).standard_normal((4, 16, 32)).astype("float32"))
    learnt = [heads.joined([plant_trace(400, 1), plant_trace(400, 2)], layer, projection, 0) for layer in (0, 1)]
    choice = heads.Choice(learnt, kv_heads=2)
    seen = heads.outputs_of(plant_trace(400, 4), 1, projection, 0)
    norms = choice.norms(seen.gram)
    found = {method: choice.scores(method, 1, norms, seen.previous) for method in heads.METHODS}
    share = {method: heads.kept_share(norms, scores, 1).mean().item() for method, scores in found.items()}
    assert share["oracle"] > 0.999
    assert share["predicted"] > 0.99
    assert 0.6 < share["static"] < 0.9  # KV head 0 has the large values at three quarters of the tokens
    assert heads.recall(norms, found["predicted"], 1).mean().item() > 0.99
    query_heads = heads.Choice(learnt, kv_heads=0)
    own = query_heads.norms(seen.gram)
    assert heads.recall(own, query_heads.scores("predicted", 1, own, seen.previous), 2).mean().item() > 0.99


def test_counts_prefer_layers_with_large_outputs(heads: types.ModuleType) -> None:
    norms = torch.tensor([[[1.0, 2.0]], [[8.0, 9.0]], [[7.0, 0.5]]])  # 3 layers, 1 query, 2 heads
    assert heads.counts_by_layer(norms, 0.5) == [0, 2, 1]
    assert heads.counts_by_layer(norms, 1) == [2, 2, 2]


def test_a_fractional_count_is_a_mean(heads: types.ModuleType) -> None:
    norms, scores = torch.tensor([[4.0, 1.0, 5.0]]), torch.tensor([[2.0, 3.0, 1.0]])
    assert heads.kept_share(norms, scores, 1.25).item() == pytest.approx((1 + 0.25 * 4) / 10)
    assert heads.recall(norms, scores, 1.25).item() == pytest.approx((0.75 * 0 + 0.25 * 1) / 1.25)


def test_leaving_out_heads_equals_zeros_in_the_projection(heads: types.ModuleType) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).to(heads.DEVICE)
    ids = numpy.arange(5, 69)
    text = heads.Continuation(model, ids, 32)

    def all_heads(_: int, outputs: torch.Tensor, __: object) -> torch.Tensor:
        return torch.ones(outputs.shape[1], outputs.shape[0], dtype=torch.bool, device=outputs.device)

    def without_head_3_of_layer_1(layer: int, outputs: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        assert (previous is None) == (layer == 0)
        kept = all_heads(layer, outputs, previous)
        kept[:, 3] = layer != 1
        return kept

    assert text.kl(all_heads).abs().max().item() == 0
    with heads.leaving_out(model, without_head_3_of_layer_1):
        own = text.log_probabilities()
    size = model.config.head_dim
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 3 * size :] = 0
    assert torch.allclose(text.log_probabilities(), own, atol=1e-5)
    assert (own - text.full).abs().max().item() > 1e-2


def test_equal_bytes(heads: types.ModuleType) -> None:
    assert heads.tokens_of_equal_bytes(8, 0, 1) == 8
    assert heads.tokens_of_equal_bytes(8, 4, 0.5) == 3  # reads 12 tokens, close to half of the full cache's 26
    assert heads.tokens_of_equal_bytes(1024, 1023, 0.25) == 256


@pytest.mark.skipif(not os.environ.get("KVLAB_COMMAND"), reason="KVLAB_COMMAND is not set")
def test_heads_write_their_page(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "heads.md"
    words = ["--kvlab", os.environ["KVLAB_COMMAND"], "--model", TINY, "--quick", "--tokens", 160, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/experiments/heads.py", *map(str, words), "--out", page], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.read_text().splitlines() if line.startswith("| ")]
    shares = {tuple(row[:2]): [float(cell.split()[0]) for cell in row[2:5]] for row in rows if row[1:2] == ["oracle"] and len(row) == 8}
    assert len(shares) == 2
    for own in shares.values():
        assert own == sorted(own)
        assert all(share > density for share, density in zip(own, (0.25, 0.5, 0.75), strict=True))
    errors = [float(row[5].split()[0]) for row in rows if len(row) == 7 and row[1] in ("oracle", "static", "predicted")]
    assert len(errors) == 18
    assert all(0 < error < 10 for error in errors)
    assert [row[1] for row in rows if row[0] == "all heads"] == ["`h2o`, 30 tokens", "`h2o`, 60 tokens", "`h2o`, 91 tokens"]
