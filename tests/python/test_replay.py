from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable

import numpy
import pytest
from conftest import SAMPLE, TINY, random_arrays

import kvlab

SWEEP = ["h2o", "sink", "lru:sinks=4", "h2o:every=16:scope=layer", "knorm"]


@pytest.fixture(scope="module")
def run(sample: kvlab.Trace) -> kvlab.Run:
    return kvlab.replay(sample, SWEEP, ["10%", 128], threads=2)


def test_results_are_the_bytes_of_the_command(
    run: kvlab.Run, command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: pathlib.Path
) -> None:
    done = command(
        "replay", "--trace", SAMPLE, "--policy", ",".join(SWEEP), "--budget", "10%,128", "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    run.save(tmp_path / "mine")
    for file in ("results.csv", "blocks.csv", "kept.json"):
        assert (tmp_path / "mine" / file).read_bytes() == (tmp_path / "run" / file).read_bytes()
    assert run.csv() == (tmp_path / "run" / "results.csv").read_text()
    assert kvlab.load_run(tmp_path / "run").csv() == run.csv()
    assert command("report", tmp_path / "mine", "--out", tmp_path / "page.html").returncode == 0


def test_output_projections_of_the_model(
    sample: kvlab.Trace, command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: pathlib.Path
) -> None:
    words = ["--policy", "criticalkv", "--budget", "64", "--model", TINY]
    done = command("replay", "--trace", SAMPLE, *words, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = kvlab.replay(sample, "criticalkv", 64, model=TINY)
    assert run.csv() == (tmp_path / "run" / "results.csv").read_text()
    live = run.kept(2, 1, "criticalkv", 64).live
    again = kvlab.load_run(tmp_path / "run", model=TINY)
    numpy.testing.assert_array_equal(again.kept(2, 1, "criticalkv", 64).live, live)
    with pytest.raises(ValueError, match="value_out_norm1: is computed from the model's weights"):
        kvlab.load_run(tmp_path / "run").kept(2, 1, "criticalkv", 64)
    with pytest.raises(RuntimeError, match="config.json: cannot open"):
        kvlab.replay(sample, "criticalkv", 64, model=tmp_path)


def test_a_run_is_saved_completely_or_not_at_all(run: kvlab.Run, tmp_path: pathlib.Path) -> None:
    run.save(tmp_path / "run")
    with pytest.raises(RuntimeError, match="exists"):
        run.save(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_frame(run: kvlab.Run) -> None:
    pandas = pytest.importorskip("pandas")
    import io

    frame = run.frame()
    empty = {"stderr": [""], "budget_bytes": [""]}
    words = {"keep_default_na": False, "na_values": empty, "float_precision": "round_trip"}
    read = pandas.read_csv(io.StringIO(run.csv()), **words)
    assert list(frame.columns) == list(read.columns)
    for name in frame.columns:
        mine = frame[name].astype(str) if frame[name].dtype == "category" else frame[name]
        numpy.testing.assert_array_equal(mine.to_numpy(), read[name].astype(mine.dtype).to_numpy(), err_msg=name)


def test_arrow_and_parquet(run: kvlab.Run, tmp_path: pathlib.Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = run.arrow()
    run.parquet(tmp_path / "run.parquet")
    assert parquet.read_table(tmp_path / "run.parquet").to_pydict() == table.to_pydict()
    values = table.to_pydict()
    assert values["layer"][0] == "all" or values["layer"][-1] in {"0", "1", "2", "3", "all"}
    assert len(values["value"]) == len(run.csv().splitlines()) - 1
    assert None in values["stderr"]


def test_plot(run: kvlab.Run) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = run.plot("nll_recall")
    legend = axes.get_legend()
    assert legend is not None and legend.get_bbox_to_anchor() != axes.bbox, "the legend covers curves"
    assert all("sinks=0" not in text.get_text() for text in legend.get_texts())
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {"sink", "knorm", "oracle_attention"} <= labels
    assert any(label.startswith("h2o:") for label in labels)  # the run has two variants of h2o
    with pytest.raises(ValueError, match="plot: the run has no nothing; it has .*recall"):
        run.plot("nothing")


def test_kept_sets(run: kvlab.Run, sample: kvlab.Trace) -> None:
    kept = run.kept(3, 1, "sink", 128)
    assert kept.live.shape == (439, 1012) and kept.live.dtype == bool
    assert kept.queries[0] == 573 and kept.queries[-1] == 1011
    assert (kept.live.sum(axis=1) == 128).all()
    assert kept.live[:, :4].all()  # the sinks
    last = numpy.flatnonzero(kept.live[-1])
    numpy.testing.assert_array_equal(last, [0, 1, 2, 3, *range(1012 - 124, 1012)])
    plain = run.kept(3, 1, "h2o:every=16", "10%", plain=True)
    numpy.testing.assert_array_equal(plain.live, run.kept(3, 1, "h2o:every=16", "10%").live)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"policy": "window"}, "kept: the run has no window; it has"),
        ({"policy": "sink"}, "kept: 2 configurations of the run match sink; give settings"),
        ({"policy": "sink", "budget": 64}, "kept: the run has no sink at budget 64"),
        ({"policy": "sink", "budget": 128, "layer": 9}, "layer 9: the trace .* has layers 0 to 3"),
        ({"policy": "oracle_topk", "budget": 128}, "oracle_topk keeps one set for each query head"),
    ],
)
def test_bad_kept_sets_are_refused(run: kvlab.Run, words: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.kept(**({"layer": 0, "head": 0} | words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"policies": "h2o"}, "^budgets: policy h2o needs one; give tokens or a share"),
        ({"policies": "h3o", "budgets": 64}, "h3o.*h2o"),
        ({"policies": "h2o:recent=2", "budgets": 1}, "h2o"),
        ({"policies": ["h2o"], "budgets": ["200%"]}, "200%"),
        ({"policies": "h2o", "budgets": 64, "layers": [7]}, "layer 7: the trace .* has layers 0 to 3"),
        ({"policies": "h2o", "budgets": 64, "prefill": "whole"}, "whole"),
        ({"policies": "h2o", "budgets": 64, "queries": "prompt"}, "decode or all"),
        ({"policies": "h2o", "budgets": 64, "output_error": "none"}, "sample or all"),
        ({"policies": "h2o", "budgets": 64, "request_threshold": 2.0}, "threshold 2"),
        ({"policies": "feature:name=score", "budgets": 64}, "feature score: the trace"),
        ({"policies": "h2o", "budgets": 64, "device": "tpu"}, "device: 'tpu' should be cpu or cuda"),
        ({"policies": "criticalkv", "budgets": 64}, "value_out_norm1: is computed from the model's weights"),
        ({"policies": "h2o", "budgets": 64, "model": 7}, "model: has type int; give a folder or a transformers model"),
        ({"policies": "h2o", "budgets": 64, "threads": 0}, "threads: 0 should be a whole number from 1 to 1024"),
    ],
)
def test_bad_replays_are_refused(sample: kvlab.Trace, words: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvlab.replay(sample, **words)


def test_the_replay_on_cuda_agrees(run: kvlab.Run, sample: kvlab.Trace) -> None:
    try:
        there = kvlab.replay(sample, SWEEP, ["10%", 128], device="cuda")
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"no CUDA: {error}")
    for mine, theirs in zip(run.csv().splitlines()[1:], there.csv().splitlines()[1:], strict=True):
        *place, value, _, count, tier_plan, held = mine.split(",")
        assert theirs.split(",")[: len(place)] == place and theirs.split(",")[-3:] == [count, tier_plan, held]
        assert float(theirs.split(",")[-5]) == pytest.approx(float(value), rel=1e-3, abs=1e-5)


def test_traces_without_ids_count_as_several_texts(tmp_path: pathlib.Path) -> None:
    arrays = [random_arrays(seed=seed) for seed in (1, 2)]
    counts = {}
    for name in ("ids", "none"):
        traces = [
            kvlab.Trace.from_arrays(
                **(one | {"ids": arrays[0]["ids"] if name == "ids" else None}), prompt_tokens=32, out=tmp_path / f"{name}{i}"
            )
            for i, one in enumerate(arrays)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = kvlab.replay(traces, ["h2o", "sink"], 20)
        counts[name] = (run.recommendation(20)["text"], any("the same text" in line for line in run.notices))
    assert "1 text, 48 scored tokens" in counts["ids"][0] and counts["ids"][1]
    assert "2 texts, 96 scored tokens" in counts["none"][0] and not counts["none"][1]


def test_a_policy_that_is_not_text_is_refused(sample: kvlab.Trace) -> None:
    with pytest.raises(ValueError, match="policies: an entry has type int; give a text such as"):
        kvlab.replay(sample, [3], 64)  # type: ignore[list-item]


def test_several_traces(sample: kvlab.Trace, tmp_path: pathlib.Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "again")
    both = kvlab.replay([sample, tmp_path / "again"], "window", 64, references=False)
    one = kvlab.replay(sample, "window", 64, references=False)
    assert both.csv().replace("again,", "tiny-story,").splitlines()[1:] == one.csv().splitlines()[1:] * 2
    with pytest.raises(ValueError, match="trace: None should be one of tiny-story, again"):
        both.kept(0, 0, "window", 64)
    assert both.kept(0, 0, "window", 64, trace="again").live[0].sum() == 64
    with pytest.raises(ValueError, match="two traces are called tiny-story"):
        kvlab.replay([sample, sample], "window", 64)


def test_pickling(run: kvlab.Run) -> None:
    again = pickle.loads(pickle.dumps(run))
    assert again.csv() == run.csv() and again.sweep == run.sweep
    numpy.testing.assert_array_equal(again.kept(0, 0, "sink", 128).live, run.kept(0, 0, "sink", 128).live)


def test_two_replays_at_once(run: kvlab.Run, sample: kvlab.Trace) -> None:
    texts: list[str] = []

    def work() -> None:
        texts.append(kvlab.replay(sample, SWEEP, ["10%", 128], threads=2).csv())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [run.csv()] * 2


def test_progress(small: kvlab.Trace) -> None:
    seen: list[float] = []
    kvlab.replay(small, "h2o", 16, progress=seen.append)
    assert seen[-1] == 1.0 and seen == sorted(seen)

    def broken(fraction: float) -> None:
        raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        kvlab.replay(small, "h2o", 16, progress=broken)


def test_other_threads_keep_running(sample: kvlab.Trace) -> None:
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    kvlab.replay(sample, "h2o", 64, threads=1, queries="all", output_error="all")
    stop.set()
    thread.join()
    assert counted > 5


LONG = """
    import signal, sys, kvlab
    signal.signal(signal.SIGINT, signal.default_int_handler)  # because background jobs of a shell ignore SIGINT
    trace = kvlab.Trace(sys.argv[1])
    print("ready", flush=True)
    while True:
        kvlab.replay(trace, ["h2o", "lru", "sink"], [16, 32, 64, 128, 256], queries="all", output_error="all", plain=True)
"""


def test_control_c_ends_a_replay() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LONG), str(SAMPLE)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        time.sleep(1)
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        error = child.stderr.read().decode()
        child.wait(timeout=60)
    assert time.monotonic() - began < 10
    assert error.rstrip().endswith("KeyboardInterrupt"), error


def test_a_forked_child_replays(run: kvlab.Run, sample: kvlab.Trace) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        same = kvlab.replay(sample, SWEEP, ["10%", 128], threads=2).csv() == run.csv()
        os.write(write, b"same" if same else b"other")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"same"
    assert os.waitpid(child, 0)[1] == 0


def test_a_policy_over_the_budget_is_not_ranked(sample: kvlab.Trace) -> None:
    run = kvlab.replay(sample, ["snapkv", "h2o", "lru:sinks=4:recent=28"], [32], threads=2)
    ranking = run.ranking(32)
    assert ranking["standings"][-1]["policy"] == "snapkv" and ranking["standings"][-1]["over_budget"]
    assert all(one["behind"] == one["from_lowest"] for one in ranking["standings"])
    verdict = ranking["verdict"]  # old name
    assert verdict["holds_more"] == ["snapkv"] and verdict["winner"] != "snapkv"  # old name
    made = run.recommendation(32)
    assert made == ranking["recommendation"] and made["choice"] == verdict["winner"]  # old name
    assert [one["policy"] for one in made["over_budget"]] == ["snapkv"] and made["difference"]["low"] is not None
    assert "not ranked: snapkv" in made["text"] and "1 text" in made["text"]
    assert made["full_bytes"] > made["kv_bytes_mean"]
    assert any("snapkv is over the budget of 32 and not ranked" in line for line in run.notices)
    assert any("the protected tokens fill the budget" in line for line in run.notices)
    with pytest.raises(ValueError, match="budget 33"):
        run.ranking(33)


def test_differences_are_paired() -> None:
    texts = [0.3, 1.2, 2.5, 0.9]
    apart = kvlab.difference([text + 0.1 for text in texts], texts)
    assert apart.significantly_different and apart.texts == 4
    assert apart.mean == pytest.approx(0.1)
    # One text of seven blocks is too short for an interval: eight are needed.
    assert not kvlab.difference([[1.0] * 7], [[0.0] * 7]).significantly_different
    same = kvlab.difference(texts, texts)
    assert (same.mean, same.standard_error) == (0, 0) and not same.significantly_different
    with pytest.raises(ValueError, match="same number of texts"):
        kvlab.difference(texts, texts[:2])
