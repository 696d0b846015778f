"""Tests of replays with refetch: misses equal those of libCacheSim on the same accesses."""

from __future__ import annotations

import csv
import io
import pathlib
import re
from typing import Any

import numpy
import pytest
from conftest import ROOT, random_arrays

import kvlab

HEAD = {"layer": 1, "head": 1}
TOP = 8


def run_of(trace: kvlab.Trace, policies: Any, budgets: Any, **words: Any) -> kvlab.Run:
    """A run in which every query selects tokens, from the first one on, so that the cache is empty at the beginning."""
    return kvlab.replay(
        trace, policies, budgets, refetch=f"top:{TOP}", queries="all", prefill="stream", references=False, **words
    )


def selections(trace: kvlab.Trace) -> list[list[int]]:
    """For each query, the earlier tokens with the largest probabilities. A token counts with the larger of its
    probabilities under the two query heads."""
    group = trace.query_heads // trace.kv_heads
    p = numpy.max([trace.attention(HEAD["layer"], HEAD["head"] * group + i) for i in range(group)], axis=0)
    return [sorted(numpy.argsort(-row[:query], kind="stable")[:TOP].tolist()) for query, row in enumerate(p)]


def misses_of(live: Any, wanted: list[list[int]]) -> list[list[int]]:
    """The selected tokens that were not resident after the step before."""
    return [[token for token in own if not live[query - 1][token]] if query else [] for query, own in enumerate(wanted)]


def replayed_misses(trace: kvlab.Trace, policy: str, budget: int) -> list[list[int]]:
    run = run_of(trace, policy, budget)
    return misses_of(run.kept(**HEAD, policy=policy, budget=budget).live, selections(trace))


class Simulated:
    """A cache of libCacheSim that a test calls step by step. Within a step, the tokens that are in the cache are
    accessed first."""

    def __init__(self, name: str, budget: int) -> None:
        self.module = pytest.importorskip("libcachesim", reason="libcachesim is not installed: pip install libcachesim")
        self.cache = getattr(self.module, name)(budget)

    def request(self, token: int) -> Any:
        request = self.module.Request()
        request.obj_id, request.obj_size = token + 1, 1
        return request

    def holds(self, token: int) -> bool:
        return self.cache.find(self.request(token), update_cache=False) is not None

    def use(self, token: int) -> None:
        self.cache.get(self.request(token))

    def step(self, query: int, wanted: list[int], moves: bool) -> list[int]:
        """Accesses the tokens of a step. Returns the misses. `moves`: whether a use moves a token within the cache, as
        in LRU. If so, the order of accesses within a step matters."""
        found = [token for token in wanted if self.holds(token)]
        missed = [token for token in wanted if token not in found]
        for token in [*found, *missed, query]:
            self.use(token)
        for token in [*wanted, query] if moves else found:
            self.use(token)
        return missed


# libCacheSim's CLOCK and SIEVE may evict a token that the same step has fetched, which refetch does not. At these
# budgets this happens in at most two steps. tests/sim/refetch_test.cpp compares smaller budgets with implementations
# that never evict such a token.
CASES = [
    *(("lru", "LRU", budget) for budget in (16, 24, 40, 80, 200)),
    *(("clock", "Clock", budget) for budget in (24, 40, 80, 200)),
    *(("sieve", "Sieve", budget) for budget in (80, 200)),
]


@pytest.mark.parametrize(("policy", "name", "budget"), CASES)
def test_misses_equal_those_of_libcachesim(sample: kvlab.Trace, policy: str, name: str, budget: int) -> None:
    simulated = Simulated(name, budget)
    expected = sum(len(simulated.step(query, own, policy == "lru")) for query, own in enumerate(selections(sample)))
    assert sum(map(len, replayed_misses(sample, policy, budget))) == expected > 0


@pytest.mark.parametrize("budget", [16, 24, 40])
def test_belady_misses_equal_those_of_libcachesim(sample: kvlab.Trace, tmp_path: pathlib.Path, budget: int) -> None:
    """Belady's misses are the fewest that are possible, so they do not depend on how ties are broken."""
    libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed: pip install libcachesim")
    wanted = selections(sample)
    # Each selected token is accessed twice, before and after the query's own token. So Belady does not evict it to make
    # room for the query's token.
    accesses = [(query, token) for query, own in enumerate(wanted) for token in [*own, query, *own, query]]
    records = numpy.zeros(len(accesses), [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    following: dict[int, int] = {}
    for at in range(len(accesses) - 1, -1, -1):
        time, token = accesses[at]
        records[at] = time, token, 1, following.get(token, -1)
        following[token] = at + 1
    records.tofile(tmp_path / "accesses.bin")
    reader = libcachesim.TraceReader(str(tmp_path / "accesses.bin"), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    ratio, _ = libcachesim.Belady(budget, reader=reader).process_trace(reader)
    expected = round(ratio * len(accesses)) - sample.tokens  # a token's first access writes it
    assert sum(map(len, replayed_misses(sample, "belady", budget))) == expected > 0


def test_misses_are_the_metric(sample: kvlab.Trace) -> None:
    run = run_of(sample, ["lru", "sieve", "belady"], 40)
    rows = {
        row["policy"]: float(row["value"])
        for row in csv.DictReader(io.StringIO(run.csv()))
        if (row["layer"], row["head"], row["metric"]) == ("1", "1", "fetch_rate")
    }
    wanted = selections(sample)
    for policy, rate in rows.items():
        missed = misses_of(run.kept(**HEAD, policy=policy, budget=40).live, wanted)
        assert rate == pytest.approx(sum(map(len, missed)) / sum(map(len, wanted)))
    assert rows["belady"] < rows["lru"]


def test_a_run_with_refetch_is_saved_and_read(sample: kvlab.Trace, tmp_path: pathlib.Path) -> None:
    run = kvlab.replay(sample, "lru", [32, 64], refetch="page:4:16", references=False)
    run.save(tmp_path / "run")
    read = kvlab.load_run(tmp_path / "run")
    assert read.refetch == run.refetch == "page:4:16"
    assert read.lru_curve == run.lru_curve
    by_budget = {budget: rate for _, budget, rate, _ in read.lru_curve}
    rows = {
        row["budget"]: float(row["value"])
        for row in csv.DictReader(io.StringIO(run.csv()))
        if (row["layer"], row["metric"]) == ("all", "fetch_rate")
    }
    assert {budget: by_budget[int(budget)] for budget in rows} == pytest.approx(rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"refetch": "top"}, "refetch: 'top' is not a selector; give top:K"),
        ({"refetch": "top:64"}, "policy lru: budget 40 is 40 tokens, but refetch top:64 needs at least 65"),
        ({"refetch": "top:8", "positions": "cache"}, "policy lru: with refetch a token returns to its position"),
    ],
)
def test_bad_refetches_are_refused(sample: kvlab.Trace, words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvlab.replay(sample, "lru", 40, references=False, **words)


def drawn_selections(queries: str = "decode", seed: int = 1) -> numpy.ndarray:
    """Random selections of 2 layers with 2 KV heads: up to 4 tokens of each of 40 queries, after a prompt of 20 tokens."""
    random = numpy.random.default_rng(seed)
    first = 0 if queries == "all" else 20
    selected = numpy.full((2, 2, 60 - first, 4), -1, numpy.int64)
    for layer, head, row in numpy.ndindex(selected.shape[:3]):
        query = first + row
        own = random.choice(query + 1, min(query + 1, int(random.integers(0, 5))), replace=False)
        selected[layer, head, row, : len(own)] = own
    return selected


def fifo_misses(selected: numpy.ndarray, first: int, budget: int) -> tuple[int, int]:
    """Misses and selected tokens if the token with the smallest position is evicted first."""
    live, misses, count = set(range(first)), 0, 0
    for query, row in enumerate(selected, first):
        wanted = set(row.tolist()) - {-1, query}
        count += len(wanted)
        for token in [*sorted(wanted - live), query]:
            while len(live) >= budget:
                live.remove(min(live - wanted))
            misses += token in wanted
            live.add(token)
    return misses, count


@pytest.mark.parametrize("queries", ["decode", "all"])
def test_logged_selections_are_replayed(queries: Any) -> None:
    selected, first = drawn_selections(queries), 0 if queries == "all" else 20
    trace = kvlab.Trace.from_selections(selected, head_size=16, prompt_tokens=20, queries=queries)
    assert (trace.tokens, trace.prompt_tokens, trace.layers, trace.kv_heads) == (60, 20, 2, 2)
    row = selected[1, 0, 7]
    assert trace.selected(1, 0)[7].tolist() == sorted(row[row >= 0].tolist()) + [-1] * int((row < 0).sum())
    words = {"queries": queries, "prefill": "stream" if queries == "all" else "dense"}
    run = kvlab.replay(trace, ["window", "lru", "sieve"], [5, 9, 30], refetch="logged", **words)
    rates = {
        (row["policy"], row["budget"], row["layer"], row["head"]): float(row["value"])
        for row in csv.DictReader(io.StringIO(run.csv()))
        if row["metric"] == "fetch_rate"
    }
    for layer, head in numpy.ndindex(2, 2):
        for budget in (5, 9, 30):
            misses, count = fifo_misses(selected[layer, head], first, budget)
            assert rates["window", str(budget), str(layer), str(head)] == pytest.approx(misses / count)
            assert rates["belady", str(budget), str(layer), str(head)] <= rates["lru", str(budget), str(layer), str(head)]
    kept = run.kept(layer=1, head=1, policy="lru", budget=9)
    assert kept.live[-1].sum() == 9


def test_the_selections_of_the_most_probable_tokens_are_replayed_like_them(tmp_path: pathlib.Path) -> None:
    arrays = random_arrays()
    trace = kvlab.Trace.from_arrays(**arrays, prompt_tokens=32, out=tmp_path / "trace")
    selected = numpy.empty((2, 2, 48, TOP), numpy.int32)
    for layer, head in numpy.ndindex(2, 2):
        p = numpy.max([trace.attention(layer, 2 * head + i, 32) for i in range(2)], axis=0)
        for row in range(48):
            selected[layer, head, row] = numpy.argsort(-p[row, : 32 + row], kind="stable")[:TOP]
    trace.add_selections(selected)
    policies = ["lru", "clock", "h2o:recent=0"]
    logged, top = (kvlab.replay(trace, policies, [12, 20], refetch=selector) for selector in ("logged", f"top:{TOP}"))

    def values(run: kvlab.Run) -> list[str]:
        return [row["value"] for row in csv.DictReader(io.StringIO(run.csv())) if row["metric"] != "selection_recall"]

    assert values(logged) == values(top)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (lambda a: a[0], {}, "selected: layer 0 has dtype int64 and 2 dimensions; whole numbers"),
        (lambda a: a.astype(float), {}, "selected: layer 0 has dtype float64"),
        (lambda a: a + 2**40, {}, "selected: layer 0 has a number outside int32"),
        (lambda a: numpy.maximum(a, 59), {}, r"layers.0.selected: KV head 0, row 0 \(query 20\): has token 59"),
        (lambda a: a[..., :0], {}, "a row has 0 entries"),
        (lambda a: [], {}, "selected: has no layers"),
        (lambda a: [a[0], a[1, :, :9]], {}, r"selected: layer 1 is \[2, 9, 4\]; \[2 KV heads, 40 decode queries, 4\]"),
        (lambda a: a, {"head_size": 0}, "head_size: 0 should be a whole number from 1"),
        (lambda a: a, {"prompt_tokens": None}, "prompt_tokens and segments are missing"),
        (lambda a: a, {"queries": "prompt"}, "queries: 'prompt' should be decode or all"),
        (lambda a: a, {"ids": [1, 2]}, "ids: has 2 ids for 60 tokens"),
        (lambda a: a, {"layer_numbers": [1]}, "one for each of 2 layers"),
        (lambda a: 5, {}, "selected: 5 should be whole numbers"),
    ],
)
def test_bad_selections_are_refused(change: Any, words: Any, message: str, tmp_path: pathlib.Path) -> None:
    keywords = {"head_size": 16, "prompt_tokens": 20, "out": tmp_path / "trace"} | words
    with pytest.raises(ValueError, match=message):
        kvlab.Trace.from_selections(change(drawn_selections()), **keywords)
    assert not (tmp_path / "trace").exists()


def test_a_trace_of_selections_has_no_attention() -> None:
    trace = kvlab.Trace.from_selections(drawn_selections(), head_size=16, segments=[(20, "prompt"), (40, "decode")])
    with pytest.raises(RuntimeError, match="has only selections and no queries, keys and values"):
        trace.read("k", 0, 0)
    with pytest.raises(RuntimeError, match="has only selections"):
        trace.attention(0, 0)
    with pytest.raises(ValueError, match="policy h2o: it needs attention"):
        kvlab.replay(trace, "h2o:recent=0", 9, refetch="logged")
    with pytest.raises(ValueError, match="use refetch logged"):
        kvlab.replay(trace, "lru", 9)
    arrays = kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32)
    with pytest.raises(ValueError, match="layer 0: the trace .* has no selections of this layer"):
        arrays.selected(0, 0)


def test_the_example_of_the_guide(command: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "docs" / "guides" / "refetch.md").read_text().split("## Selections of your own engine")[1]
    section = section.split("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```py\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
        exec(compile(block, "refetch.md", "exec"), {})
    lines = re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[0].splitlines()
    assert len(lines) == 1 and lines[0].startswith("kvlab replay --trace my-engine --refetch logged ")
    done = command(*lines[0].split()[1:])
    assert done.returncode == 0, done.stderr
    assert "other metric of attention for my-engine" in done.stderr
    assert (tmp_path / "logged" / "lru_curve.csv").exists()
    assert command("trace", "verify", "my-engine").returncode == 0
    assert "selections of up to 16 tokens at decode queries" in command("trace", "info", "my-engine").stdout
    done = command("report", "logged", "--out", "report.html")
    assert done.returncode == 0, done.stderr
