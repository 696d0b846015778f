"""Tests of Trace.accesses(), which writes libCacheSim's format: the bytes of the file, their meaning, and what
libCacheSim computes from the file."""

from __future__ import annotations

import pathlib
import re
import struct
from typing import Any

import numpy
import pytest
from conftest import ROOT

import kvlab


def test_read_bytes(small: kvlab.Trace, tmp_path: pathlib.Path) -> None:
    records = small.accesses(tmp_path / "requests.bin", layer=1, head=1, top_k=3)
    data = (tmp_path / "requests.bin").read_bytes()
    assert len(data) == 24 * len(records) and sorted(path.name for path in tmp_path.iterdir()) == ["requests.bin"]
    read = list(struct.iter_unpack("<IQIq", data))
    assert read == records.tolist()
    assert [entry[:3] for entry in read[:32]] == [(t, 3 << 32 | t, 1) for t in range(32)]  # the writes of the prompt
    for at, (_, wanted, _, following) in enumerate(read):
        later = [i + 1 for i in range(at + 1, len(read)) if read[i][1] == wanted]
        assert following == (later[0] if later else -1)


@pytest.mark.parametrize("top_k", [1, 5, None])
@pytest.mark.parametrize("queries", ["decode", "all"])
def test_requested_tokens(small: kvlab.Trace, top_k: int | None, queries: Any) -> None:
    p = numpy.stack([small.attention(0, head) for head in (2, 3)])  # the query heads of KV head 1
    records = small.accesses(layer=0, head=1, top_k=top_k, queries=queries, request_threshold=0.2)
    for query in range(small.tokens):
        requested: set[int] = {query}
        for row in p[:, query, : query + 1] if queries == "all" or query >= small.prompt_tokens else ():
            if top_k is None:
                requested |= set(numpy.flatnonzero(row >= 0.2 * row.max()))
            else:
                requested |= set(numpy.argsort(-row, kind="stable")[:top_k])
        found = records["object"][records["time"] == query]
        assert found.tolist() == [1 << 32 | token for token in sorted(requested)]


def test_attention_equals_the_traces(small: kvlab.Trace) -> None:
    def rotate(x: Any) -> Any:
        angle = numpy.arange(len(x))[:, None] * small.inv_freq.astype("f8")
        a, b = numpy.split(x.astype("f8"), 2, axis=1)
        sides = a * numpy.cos(angle) - b * numpy.sin(angle), b * numpy.cos(angle) + a * numpy.sin(angle)
        return numpy.concatenate(sides, axis=1)

    scores = rotate(small.read("q", 1, 1)) @ rotate(small.read("k", 1, 0)).T * small.model["softmax_scale"]
    scores[numpy.triu_indices(len(scores), 1)] = -numpy.inf
    expected = numpy.exp(scores) / numpy.exp(scores).sum(axis=1, keepdims=True)
    numpy.testing.assert_allclose(small.attention(1, 1), expected, atol=1e-6)
    numpy.testing.assert_array_equal(small.attention(1, 1, 20, 3), small.attention(1, 1)[20:23])


def test_all_heads_share_one_cache(small: kvlab.Trace) -> None:
    whole = small.accesses(top_k=4)
    parts = [small.accesses(layer=layer, head=head, top_k=4) for layer in range(2) for head in range(2)]
    assert (numpy.diff(whole["time"].astype(int)) >= 0).all()
    assert sorted(whole[["time", "object"]].tolist()) == sorted(
        entry for part in parts for entry in part[["time", "object"]].tolist()
    )


def test_misses_equal_the_replays(sample: kvlab.Trace) -> None:
    run = kvlab.replay(sample, "lru", 64, references=False)
    live = run.kept(2, 1, "lru", 64).live
    p = numpy.stack([sample.attention(2, head) for head in (2, 3)])
    missed = []
    for head_rows in p:
        wanted = [row[:t] >= 655 / 65536 * row.max() for t, row in enumerate(head_rows)][sample.prompt_tokens :]
        outside = sum(int((requested & ~kept[: len(requested)]).sum()) for requested, kept in zip(wanted, live, strict=True))
        missed.append(outside / sum(int(requested.sum()) for requested in wanted))
    frame = [row.split(",") for row in run.csv().splitlines()]
    named = {(row[10], row[11], row[12]): row[13] for row in frame}
    assert numpy.mean(missed) == pytest.approx(float(named["2", "1", "miss_rate"]), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"layer": 2}, "layer 2, KV head 0: the trace .* has 2 layers of 2 KV heads"),
        ({"top_k": 0}, "top_k: 0 should be a whole number from 1 to 2147483647"),
        ({"request_threshold": 2.0}, "request_threshold: 2.0 should be a number from 0 to 1"),
        ({"queries": "prompt"}, "queries: 'prompt' should be decode or all"),
    ],
)
def test_bad_accesses_are_refused(small: kvlab.Trace, words: Any, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=message):
        small.accesses(tmp_path / "requests.bin", **words)
    assert not list(tmp_path.iterdir())


def test_bad_attention_is_refused(small: kvlab.Trace) -> None:
    with pytest.raises(ValueError, match="queries 79 to 81: the trace .* has 0 to 79"):
        small.attention(0, 0, 79, 2)
    with pytest.raises(ValueError, match="layer 0, head 4"):
        small.attention(0, 4)


def table_of_the_page() -> dict[int, dict[str, float]]:
    """The table of the page: misses in percent, by budget and then by column."""
    page = (ROOT / "docs" / "guides" / "cache-simulators.md").read_text()
    rows = [[cell.strip(" `%") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    names = next(row for row in rows if row[0] == "budget")
    return {int(row[0]): dict(zip(names[1:], map(float, row[1:]), strict=True)) for row in rows if row[0].isdigit()}


@pytest.mark.parametrize("budget", [32, 64, 128, 256])
def test_lru_misses_equal_the_pages_table(sample: kvlab.Trace, budget: int) -> None:
    live = kvlab.replay(sample, "lru", budget, references=False).kept(1, 1, "lru", budget).live
    cache: dict[int, None] = {}
    requested, left, refetched = 0, 0, 0
    for time, token in sample.accesses(layer=1, head=1)[["time", "object"]].tolist():
        position = token & 0xFFFFFFFF
        if position != time:
            requested += 1
            left += not live[time - sample.prompt_tokens][position]
            refetched += token not in cache
        cache.pop(token, None)
        cache[token] = None
        if len(cache) > budget:
            del cache[next(iter(cache))]
    row = table_of_the_page()[budget]
    assert (round(100 * left / requested, 1), round(100 * refetched / requested, 1)) == tuple(list(row.values())[:2])


def test_the_pages_libcachesim_example_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libCacheSim's LRU has to miss as often as the six-line LRU of this test."""
    pytest.importorskip("libcachesim")
    blocks = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "docs" / "guides" / "cache-simulators.md").read_text(), re.DOTALL | re.MULTILINE
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "cache-simulators.md", "exec"), names)
    assert names["misses"]["LRU"] == pytest.approx(names["refetched"], abs=1e-12)
    table = table_of_the_page()[64]
    assert {name: round(100 * misses, 1) for name, misses in names["misses"].items()} == {
        name: table[name] for name in names["misses"]
    }


def test_a_file_is_written_under_an_unpredictable_name(small: kvlab.Trace, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine").write_text("untouched")
    (tmp_path / "accesses.bin.part").symlink_to(tmp_path / "mine")
    small.accesses(tmp_path / "accesses.bin", layer=0, head=0, top_k=1)
    assert (tmp_path / "mine").read_text() == "untouched"
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "accesses.bin.part", "accesses.bin"}
