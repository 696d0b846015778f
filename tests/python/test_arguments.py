"""Tests of invalid arguments. Each raises ValueError with the names that Python users know, before anything is
computed."""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import kvlab

_ARRAYS = """
import numpy, kvlab
q = numpy.ones((1, 1, 8, 16), "f4")
def trace(**config):
    try:
        kvlab.Trace.from_arrays(q, q, q, config=config, prompt_tokens=4)
    except ValueError as error:
        print(error)
    else:
        print("accepted")
"""


def said(code: str) -> list[str]:
    """The lines that the code prints. It runs in a separate process, so that a crash fails only one test."""
    done = subprocess.run([sys.executable, "-c", _ARRAYS + textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.splitlines()


@pytest.mark.parametrize("length", [9, 10, 64, 1000, 100_000])
def test_frequencies_beyond_the_head_size(length: int) -> None:
    expected = f"config: inv_freq has {length} elements; at most 8, half the head size, are expected"
    rows = "rows=[{'rope': 0, 'softcap': 1.0}]"
    assert said(f"trace(inv_freq=[1.0] * {length}); trace(inv_freq=[[1.0] * {length}], {rows})") == [expected] * 2


def test_sinks_of_other_heads() -> None:
    assert said("trace(rows=[{'sink': [1.0] * 9}])") == [
        "config: layer 0: 9 sinks; one for each of 1 query heads is expected"
    ]


_ROOT = pathlib.Path(__file__).parents[2]
_HUGE = 10**5000
_NO_NUMBERS = [1.5, "5", True, None, -1, 2**64, _HUGE, [1], {}, object(), "\ud800", b"5", float("nan"), numpy.float32(2)]
_NO_TEXTS = [5, 1.5, b"x", None, "\ud800", object(), ["x"]]


def kind(value: Any) -> str:
    return type(value).__name__


def refused(call: Callable[[], Any], name: str = "") -> None:
    """Checks that the call raises an error of kvlab, in one line that contains the argument's name."""
    with pytest.raises(ValueError) as caught:
        call()
    line = str(caught.value)
    assert name in line, line
    assert "\n" not in line and len(line) < 1500, line
    for foreign in ("std::", "nanobind", "incompatible function", "json.exception", "numpy.", "not supported between"):
        assert foreign not in line, line


@pytest.fixture(scope="module")
def trace() -> kvlab.Trace:
    return kvlab.Trace(_ROOT / "traces/samples/tiny-story", verify=False)


@pytest.fixture(scope="module")
def run(trace: kvlab.Trace) -> kvlab.Run:
    return kvlab.replay(trace, "h2o", 16, layers=[0], progress=False)


@pytest.mark.parametrize("value", _NO_NUMBERS, ids=kind)
def test_bad_integers_are_refused(trace: kvlab.Trace, run: kvlab.Run, value: Any) -> None:
    q = numpy.ones((1, 1, 8, 16), "f4")
    refused(lambda: kvlab.Trace.from_arrays(q, q, q, prompt_tokens=value), "prompt_tokens")
    refused(lambda: kvlab.Trace.from_arrays(q, q, q, segments=[(value, "prompt")]), "segments")
    refused(lambda: kvlab.Trace.from_arrays(q, q, q, segments=value or 5), "segments")
    refused(lambda: trace.read("k", value, 0), "layer")
    refused(lambda: trace.read("k", 0, value), "head")
    refused(lambda: trace.feature("x", value, 0), "layer")
    refused(lambda: trace.attention(0, value), "head")
    refused(lambda: trace.attention(0, 0, value), "first")
    refused(lambda: run.kept(value, 0, "h2o"), "layer")
    refused(lambda: run.kept(0, value, "h2o"), "head")
    refused(lambda: kvlab.replay(trace, "h2o", 16, layers=[value], progress=False), "layers")
    refused(lambda: kvlab.replay(trace, "h2o", 16, seed=value, progress=False), "seed")
    if value is not None:
        refused(lambda: trace.attention(0, 0, 0, value), "count")
        refused(lambda: trace.accesses(top_k=value), "top_k")
        refused(lambda: trace.accesses(layer=value), "layer")
        refused(lambda: trace.accesses(head=value), "head")
        refused(lambda: kvlab.replay(trace, "h2o", 16, threads=value, progress=False), "threads")
        refused(lambda: kvlab.Trace(trace.path, threads=value), "threads")


@pytest.mark.parametrize("value", _NO_TEXTS, ids=kind)
def test_bad_texts_are_refused(trace: kvlab.Trace, run: kvlab.Run, value: Any) -> None:
    refused(lambda: trace.read(value, 0, 0), "part")
    refused(lambda: trace.feature(value, 0, 0), "name")
    refused(lambda: trace.accesses(queries=value), "queries")
    refused(lambda: trace.to_dict(value), "framework")
    refused(lambda: kvlab.replay(trace, value, 16, progress=False), "")
    refused(lambda: kvlab.replay(trace, "h2o", 16, queries=value, progress=False), "queries")
    refused(lambda: kvlab.replay(trace, "h2o", 16, device=value, progress=False), "device")
    refused(lambda: kvlab.replay(trace, "h2o", 16, output_error=value, progress=False), "output_error")
    refused(lambda: kvlab.replay(trace, "h2o", 16, prefill=[value], progress=False), "prefill")
    refused(lambda: kvlab.replay(trace, "h2o", 16, positions=[value], progress=False), "positions")
    refused(lambda: run.ranking(16, value), "metric")
    refused(lambda: kvlab.Trace(value), "path" if value != ["x"] else "")
    if value is not None:
        refused(lambda: kvlab.policy(value), "needs")
        refused(lambda: kvlab.policy(name=value), "name")
    refused(lambda: kvlab.policy(positions=value), "positions")
    refused(lambda: kvlab.policy(features=[value]), "features")
    refused(lambda: kvlab.policy(summary=value), "summary")


@pytest.mark.parametrize("value", [0.5j, "x", None, object(), [1.0], float("inf"), float("nan"), 1.5])
def test_bad_shares_are_refused(trace: kvlab.Trace, value: Any) -> None:
    refused(lambda: trace.accesses(request_threshold=value), "request_threshold")
    refused(lambda: kvlab.replay(trace, "h2o", 16, request_threshold=value, progress=False), "")
    refused(lambda: kvlab.policy(weights=[value]), "weights[0]")


@pytest.mark.parametrize("value", [-1, 0, None, True, _HUGE, object(), [16], "\ud800", "x", float("nan")], ids=kind)
def test_bad_budgets_are_refused(trace: kvlab.Trace, value: Any) -> None:
    refused(lambda: kvlab.replay(trace, "h2o", [value], progress=False), "budget")


@pytest.mark.parametrize("value", [0, -1, 1e400, math.nan, True, "x", 0.5j, None, [10000.0], object()])
def test_bad_bases_are_refused(value: Any) -> None:
    q = numpy.ones((1, 1, 8, 16), "f4")
    if value is not None:
        refused(lambda: kvlab.Trace.from_arrays(q, q, q, config={"rope_theta": value}, prompt_tokens=4), "rope_theta")
        refused(lambda: kvlab.Trace.from_arrays(q, q, q, config={"softmax_scale": value}, prompt_tokens=4), "softmax_scale")
    refused(lambda: kvlab.Trace.from_arrays(q, q, q, config={"inv_freq": [value or "x"] * 3}, prompt_tokens=4), "")


@pytest.mark.parametrize(
    "config",
    [
        5,
        "x",
        [1],
        object(),
        {"zzz": 1},
        {"rope_theta": 10000.0, "zzz": 1},
        {"inv_freq": []},
        {"inv_freq": [[]]},
        {"inv_freq": [[1.0], [1.0, 2.0]]},
        {"inv_freq": "x"},
        {"inv_freq": [[[1.0]]]},
        {"rows": 5},
        {"rows": [5]},
        {"rows": [{"span": -1}]},
        {"rows": [{"span": "x"}]},
        {"rows": [{"rope": 1.5}]},
        {"rows": [{"sink": 5}]},
        {"rows": [{5: 5}]},
        {"rows": [{"\ud800": 5}]},
        {"layer_numbers": 5},
        {"layer_numbers": [-1]},
        {"name": 5},
        {"name": "\ud800"},
        {"rope_factor": "x"},
        {"rope_factor": [[1.0]]},
        {"rope_scaling": "x"},
        {"rope_scaling": {"rope_type": 5}},
    ],
)
def test_bad_models_are_refused(config: Any) -> None:
    q = numpy.ones((1, 1, 8, 16), "f4")
    refused(lambda: kvlab.Trace.from_arrays(q, q, q, config=config, prompt_tokens=4))


def test_models_described_by_transformers() -> None:
    q = numpy.ones((1, 1, 8, 16), "f4")
    for config in (
        {"model_type": "llama", "rope_theta": 500.0, "hidden_size": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        types.SimpleNamespace(rope_theta=numpy.float32(500.0)),
    ):
        trace = kvlab.Trace.from_arrays(q, q, q, config=config, prompt_tokens=4)
        assert trace.inv_freq[1] == pytest.approx(500.0 ** (-1 / 8))


def test_too_long_arrays_are_refused_with_their_length() -> None:
    one = numpy.ones((1, 1, 1, 16), "f4")
    began = time.monotonic()
    for shape, name in (
        ((1, 1, 2**31, 16), "tokens: 2147483648"),
        ((65537, 1, 8, 16), "layers: 65537"),
        ((1, 65537, 8, 16), "query_heads: 65537"),
        ((1, 1, 8, 0), "head_size: 0"),
        ((0, 1, 8, 16), "layers: 0"),
    ):
        q = numpy.broadcast_to(one[..., : shape[3]], shape) if 0 not in shape else numpy.zeros(shape, "f4")
        refused(lambda: kvlab.Trace.from_arrays(q, q, q, prompt_tokens=1), name)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "state", [{"a": "V100000000"}, {"a": "O"}, {"a": "zzz"}, {"a": 5.5}, {5: "f4"}, 5, ["a"], {"a": "V0"}, {"a": ("f4", 10**6)}]
)
def test_bad_states_are_refused(state: Any) -> None:
    refused(lambda: kvlab.policy("mass", state=state), "state")


def test_numpy_numbers_are_accepted(trace: kvlab.Trace) -> None:
    i, u = numpy.int64, numpy.uint8
    q = numpy.ones((1, 1, 8, 16), "f4")
    assert kvlab.Trace.from_arrays(q, q, q, prompt_tokens=i(4)).prompt_tokens == 4
    assert trace.read("k", u(0), i(0)).shape == trace.read("k", 0, 0).shape
    assert trace.attention(i(0), u(0), i(2), u(3)).shape == (3, trace.tokens)
    words: dict[str, Any] = {"layers": numpy.array([0]), "threads": u(1), "seed": i(3), "plain": numpy.bool_(False)}
    run = kvlab.replay(trace, "h2o", numpy.array([16, 32]), progress=False, request_threshold=numpy.float32(0.5), **words)
    assert run.csv() == kvlab.replay(
        trace, "h2o", [16, 32], progress=False, layers=[0], threads=1, seed=3, request_threshold=0.5
    ).csv()
    assert run.kept(i(0), u(0), "h2o", i(16)).live.any()
    assert kvlab.policy(needs="mass", sinks=u(2), weights=numpy.array([0.5], "f4"))


def test_unchecked_casts_are_refused() -> None:
    with pytest.raises(ValueError, match="threads: has an unexpected type"):
        words = dict.fromkeys(("policies", "budgets", "prefill", "positions", "layers"), [])
        rest = {"seed": 0, "threshold": 0.01, "queries": "decode", "every_output_error": False, "plain": False, "refetch": None}
        kvlab._kvlab.replay([], [], words | rest | {"progress": None, "threads": 1.5, "output": None, "device": "cpu"})


_TINY, _TEXT = _ROOT / "engine/models/tiny", _ROOT / "tools/demo/prompt.txt"
_COMMANDS: dict[str, Callable[..., Any]] = {
    "evaluate": lambda policies="h2o", budgets=16, **words: kvlab.evaluate(_TINY, _TEXT, policies, budgets, **words),
    "fidelity": lambda policies=("h2o", "lru", "sink"), budgets=16, **words: kvlab.fidelity(
        _TINY, _TEXT, policies, budgets, "/nowhere/out", **words
    ),
    "tune": lambda policies="h2o", budgets=16, **words: kvlab.tune(_TINY, _TEXT, budgets, "/nowhere/out", policies, **words),
    "task": lambda policies="h2o", budgets=16, **words: kvlab.task("passkey", _TINY, policies, budgets, **words),
}


@pytest.mark.parametrize("name", _COMMANDS)
def test_commands_check_their_arguments_by_name(name: str) -> None:
    call = _COMMANDS[name]
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'threds'; did you mean threads\?"):
        call(threds=1)
    for option in ("json", "policy", "help"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            call(**{option: "x"})
    for value in (1.5, "5", True, [1], {}, object(), "\ud800", b"5", 2**64, numpy.float32(2), 1j):
        refused(lambda: call(threads=value), "threads")
        refused(lambda: call(seed=value), "seed")
    for value in (1j, True, object(), b"x", "\ud800", "a\0b", ["\ud800"], [None], float("nan")):
        refused(lambda: call(device=value), "device")
    budget = "budget" if name == "tune" else "budgets"
    for value in (-1, True, object(), [None], "\ud800", float("inf"), b"5", {1: object()} and [{}]):
        refused(lambda: call(budgets=value), budget)
    for value in (5, None, [5], b"h2o", object(), "\ud800"):
        refused(lambda: call(policies=value), "policies")
    refused(lambda: call(progress=5), "progress")


def test_commands_accept_numpy_numbers_and_paths() -> None:
    words: dict[str, Any] = {"window": numpy.int64(256), "threads": numpy.uint8(1), "prefill": numpy.array(["dense"])}
    few = kvlab.evaluate(str(_TINY), [_TEXT], "h2o", numpy.int64(32), progress=False, **words)
    assert few == kvlab.evaluate(_TINY, _TEXT, ["h2o"], ["32"], progress=False, window=256, threads=1, prefill="dense")
    refused(lambda: kvlab.evaluate(_TINY, _TEXT, "h2o", 16, device="--help"), "device")
    with pytest.raises(ValueError, match="kind"):
        kvlab.task("nothing", _TINY, "h2o", 16)  # type: ignore[arg-type]
    for value in (5, None, b"x", ["x", 5j], "\ud800"):
        refused(lambda: kvlab.evaluate(_TINY, value, "h2o", 16), "text")  # type: ignore[arg-type]


def test_messages_are_short(trace: kvlab.Trace, run: kvlab.Run) -> None:
    long = "x" * 5000
    refused(lambda: kvlab.replay(trace, "h2o", long, progress=False), "budget")
    refused(lambda: kvlab.replay(trace, f"h2o:{long}", 16, progress=False), "h2o")
    refused(lambda: trace.feature(long, 0, 0), "feature")
    refused(lambda: run.kept(0, 0, long), "kept")
    refused(lambda: run.kept(0, 0, "h2o", long), "kept")
    refused(lambda: run.kept(0, 0, "h2o", object()), "budget")  # type: ignore[arg-type]
    refused(lambda: run.kept(0, 0, "h2o", 16, trace=long), "trace")
    refused(lambda: run.ranking(16, long), "")
    refused(lambda: kvlab.policy(features=[long])(lambda state, seen, token, step: token), "")
    refused(lambda: kvlab.policy(sinks=long)(lambda state, seen, token, step: token), "")
    refused(lambda: kvlab.policy(name="x" * 101)(lambda state, seen, token, step: token), "at most 100 letters")
    with pytest.raises(RuntimeError, match=r"/nowhere/x+ \.\.\. x+.*: ") as caught:
        kvlab.load_run(f"/nowhere/{long}")
    assert len(str(caught.value)) < 1100


def test_results_that_are_not_ranks_are_refused(trace: kvlab.Trace) -> None:
    for number, answer in enumerate((None, [1, 2], numpy.array(["x"]), 5)):
        policy = kvlab.policy(name=f"no_ranks{number}")(lambda state, seen, token, step, answer=answer: answer)
        refused(lambda: kvlab.replay(trace, policy, 16, progress=False), f"no_ranks{number}")


def test_lists_are_no_arrays(trace: kvlab.Trace) -> None:
    q = numpy.ones((1, 1, 8, 16), "f4")
    refused(lambda: kvlab.Trace.from_arrays([[1.0], [1.0, 2.0]], q, q, prompt_tokens=4), "q: its lists have different lengths")
    refused(lambda: kvlab.Trace.from_arrays(q.tolist(), q, q, prompt_tokens=4), "q: has dtype float64")


def test_an_empty_list_of_prefills() -> None:
    assert said(
        """
        held = kvlab.Trace.from_arrays(q, q, q, prompt_tokens=4)
        for policies in ("full", "h2o"):
            try:
                kvlab.replay(held, policies, 16, prefill=[], progress=False)
            except ValueError as error:
                print(error)
        """
    ) == ["prefill: empty; give dense, chunk:N, stream, or a list of them"] * 2
