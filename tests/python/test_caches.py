"""Tests of the caches of the extension module with numpy arrays: the tokens that they keep, and the calls that they
refuse."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from conftest import random_arrays

import kvlab
from kvlab import _kvlab

INV_FREQ = [10000.0 ** (-i / 8) for i in range(8)]


def output(inputs: int = 64) -> _kvlab.OutputProjections:
    random = numpy.random.default_rng(3)
    return _kvlab.OutputProjections([random.standard_normal((inputs, 24), dtype="float32") for _ in range(2)], 2, 16)


def caches_of(policy: str) -> Any:
    requested = _kvlab.CacheRequest(policy, [], "24", "dense", "", 0, 0.01, 80, 2, 2)
    return _kvlab.Caches(requested, 4, 16, INV_FREQ, 1.0, [{"scale": 0.25}] * 2, output)


@pytest.mark.parametrize("policy", ["h2o", "sink", "criticalkv", "lru:scope=layer"])
def test_caches_keep_what_a_replay_keeps(policy: str) -> None:
    arrays, caches = random_arrays(), caches_of(policy)
    config = {"inv_freq": INV_FREQ, "rope_factor": 1.0, "softmax_scale": 0.25}
    trace = kvlab.Trace.from_arrays(**arrays, prompt_tokens=32, config=config)
    run = kvlab.replay(trace, policy, 24, references=False, model=output())
    live = [[run.kept(layer, head, policy.split(":")[0], 24).live for head in range(2)] for layer in range(2)]
    for begin, end in [(0, 32), *((token, token + 1) for token in range(32, 80))]:
        for layer in range(2):
            rows = [arrays[part][layer, :, begin:end].transpose(1, 0, 2) for part in "qkv"]
            assert caches.attend(layer, *rows, begin == 0, 2).shape == (end - begin, 4, 16)
            for head in range(2 if begin > 0 else 0):
                positions = numpy.flatnonzero(live[layer][head][begin - 32])
                numpy.testing.assert_array_equal(caches.kept(layer, head), positions)
    assert caches.kv_bytes <= caches.allocated_bytes


def test_caches_refuse_other_shapes() -> None:
    caches, row = caches_of("h2o"), numpy.zeros((1, 2, 16), "float32")
    with pytest.raises(ValueError, match=r"q: the shape is \[1, 2, 16\]; it should be \[1, 4, 16\]"):
        caches.attend(0, row, row, row, True, 1)
    with pytest.raises(IndexError):
        caches.kept(5, 0)
    with pytest.raises(ValueError, match="layer 0 has shape .60, 24.; it should be .60, 24., with whole query heads of 2 KV heads"):
        output(60)
