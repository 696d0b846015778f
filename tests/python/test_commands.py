"""Tests of the functions that run kvlab's commands: evaluate, fidelity, tune and task."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sysconfig
from typing import Any

import numpy
import pytest
from conftest import ROOT

import kvlab

TINY, TEXT = ROOT / "engine" / "models" / "tiny", ROOT / "tools" / "demo" / "prompt.txt"
SHORT: dict[str, Any] = {"prompt_tokens": 128, "max_tokens": 256}


@pytest.fixture(autouse=True)
def there(command: Any) -> None:
    """Skips the test if there is no command."""


def test_evaluate_equals_the_command(command: Any) -> None:
    mine = kvlab.evaluate(TINY, TEXT, ["window", "h2o:recent=8"], [64, "50%"], window=256, prefill="stream")
    words = ("--policy", "window,h2o:recent=8", "--budget", "64,50%", "--window", "256", "--prefill", "stream")
    theirs = command("eval", "--model", TINY, "--text", TEXT, *words, "--json")
    assert mine == json.loads(theirs.stdout)
    assert [entry["policy"] for entry in mine["configurations"]] == ["full", "window", "window", "h2o", "h2o"]


def test_a_policy_of_a_header_is_compiled(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "policies" / "mass" / "h2o.hpp").read_text().replace('"h2o"', '"mine_too"')
    (tmp_path / "mine.hpp").write_text(text.replace("struct H2O ", "struct MineToo "))
    policy = kvlab.policy_source(tmp_path / "mine.hpp")
    rows = kvlab.evaluate(TINY, [TEXT], [policy, "h2o"], 64, window=256)["configurations"]
    assert rows[1]["policy"] == "mine_too" and rows[1]["kl"] == rows[2]["kl"]


def test_fidelity_and_tune_write_their_files(tmp_path: pathlib.Path) -> None:
    kvlab.fidelity(TINY, TEXT, ["window", "h2o", "sink"], 64, tmp_path / "fidelity", **SHORT)
    assert (tmp_path / "fidelity" / "fidelity.csv").exists()
    kvlab.tune(TINY, TEXT, 64, tmp_path / "policy.json", ["window:sinks=4", "h2o:sinks=4"], **SHORT)
    assert json.loads((tmp_path / "policy.json").read_text())["policy"] in ("window", "h2o")


def test_task() -> None:
    answers = kvlab.task("passkey", TINY, "sink", 64, words=[100], depth=["50%"], samples=2, query_aware=True)
    assert answers


@kvlab.policy(needs="mass", state={"mass": "u8"}, recent="50%")
def summed(state: Any, seen: Any, token: Any, step: Any) -> Any:
    state["mass"] += seen.mass
    return state["mass"]


@kvlab.policy(needs="mass", state={"mass": "u8"}, recent="50%", by_head=True)
def summed_by_head(state: Any, seen: Any, token: Any, step: Any) -> Any:
    state["mass"] += seen.mass_by_head.sum(0, dtype="u8")
    return state["mass"]


@kvlab.policy(rows=True, modifiers=["once"])
def short_keys(state: Any, seen: Any, token: Any, step: Any) -> Any:
    assert token.rows.k.shape[1] >= step.now and len(token.keys) == step.live
    return -numpy.linalg.norm(token.keys, axis=1)


@pytest.mark.parametrize(("mine", "header"), [(summed, "h2o"), (summed_by_head, "h2o"), (short_keys, "knorm:once")])
def test_a_function_evaluates_like_its_header(mine: Any, header: str, tmp_path: Any) -> None:
    def metrics(found: Any) -> Any:
        return [entry | {"policy": "", "params": ""} for entry in found if "bytes" not in entry["metric"]]

    loop = kvlab.evaluate(TINY, TEXT, [mine, header], [64, "ratio(0.5)"], window=256)["configurations"]
    for a, b in zip(loop[1:3], loop[3:5]):
        assert a["policy"] == mine.name and a["kl"] == pytest.approx(b["kl"], rel=1e-4) and a["kl"] > 0
    words: dict[str, Any] = {"words": [100], "depth": ["50%"], "samples": 3}
    mine_says, theirs = (kvlab.task("passkey", TINY, policy, 64, **words)["metrics"] for policy in (mine, header))
    assert metrics(mine_says) == metrics(theirs)
    kvlab.tune(TINY, TEXT, 64, tmp_path / "policy.json", [mine, "sink:once", header], **SHORT)
    assert (tmp_path / "policy.json").exists()


@kvlab.policy(features=["value_norm1"], modifiers=["once"])
def small_values(state: Any, seen: Any, token: Any, step: Any) -> Any:
    return -token.value_norm1


HEADER = """#include "policies/features/by_feature.hpp"
namespace kvlab {
struct Small : HighestEvictedFirst {
  static constexpr PolicyInfo kInfo{.name = "small", .summary = "large values are evicted first", .citation = "none",
                                    .order = Order::nested, .modifiers = {.once = true}, .features = {"value_norm1"}};
};
}  // namespace kvlab
"""


def test_a_function_a_feature_file_and_a_header_of_the_same_rule_agree(command: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "small.hpp").write_text(HEADER)
    text = ("--model", TINY, "--prompt-file", TEXT, "--teacher-forced", "--prompt-tokens", 128, "--max-tokens", 200)
    command("capture", *text, "--out", tmp_path / "text")
    words: dict[str, Any] = {"words": [100], "depth": ["50%"], "samples": 2, "query_aware": True}
    kvlab.task("passkey", TINY, (), (), capture=tmp_path / "task", **words)
    paths = [tmp_path / "text", *(tmp_path / "task").iterdir()]
    for path in paths:
        trace = kvlab.Trace(path)
        v = numpy.stack([[trace.read("v", layer, head) for head in range(2)] for layer in range(4)])
        # cumsum() adds from the first element on, in the same order as kvlab's value_norm1.
        trace.add_feature("mine", numpy.abs(v).cumsum(axis=-1, dtype="f4")[..., -1])
    rules = [small_values, kvlab.policy_source(tmp_path / "small.hpp"), "feature:name=mine:keep=-1:once"]
    opened = kvlab.Trace(tmp_path / "text")
    live = [kvlab.replay(opened, [rule], [32]).kept(1, 1, rule, 32).live for rule in rules]
    assert (live[0] == live[1]).all() and (live[0] == live[2]).all()
    scores = [kvlab.evaluate(TINY, TEXT, rule, 32, window=256, max_tokens=255, features=paths) for rule in rules]
    kl = [score["configurations"][1]["kl"] for score in scores]
    assert kl[0] > 0 and kl == [kl[0]] * 3

    def said(rule: Any) -> Any:
        metrics = kvlab.task("passkey", TINY, rule, 32, features=paths, **words)["metrics"]
        return [row["value"] for row in metrics if "bytes" not in row["metric"]]

    says = [said(rule) for rule in rules]
    assert says == [says[0]] * 3 and said("sink:once") != says[0]
    out = tmp_path / "policy.json"
    tuned = kvlab.tune(TINY, TEXT, 32, out, [rules[2], "feature:name=mine:once"], features=paths, **SHORT)
    assert tuned["evidence"]["criteria"]["why"] == "task accuracy was not measured"
    generated = ("generate", "--model", TINY, "--prompt", "It was", "--policy-file", out)
    assert command(*generated, "--features", paths[0]).stderr.startswith("kvlab generate: --features: none of the 1 traces")
    with pytest.raises(ValueError, match="features: none of the 1 traces begins with the prompt of 128 tokens"):
        kvlab.evaluate(TINY, TEXT, rules[2], 32, window=256, features=paths[1:2])


def test_a_function_that_reads_attention_requires_a_dense_prompt() -> None:
    with pytest.raises(ValueError, match="short_keys: needs the whole prompt at once; use prefill dense"):
        kvlab.evaluate(TINY, TEXT, short_keys, 64, window=256, prefill="chunk:8")


def test_progress_is_reported() -> None:
    seen: list[float] = []
    kvlab.evaluate(TINY, TEXT, ["window", "h2o"], [64, 128], window=256, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0

    def broken(fraction: float) -> None:
        raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        kvlab.task("passkey", TINY, "sink", 64, words=[100], samples=2, query_aware=True, progress=broken)


def test_errors_equal_the_commands() -> None:
    with pytest.raises(ValueError, match=r"^budgets: policy h2o needs one"):
        kvlab.evaluate(TINY, TEXT, "h2o", ())
    with pytest.raises(RuntimeError, match="nodir"):
        kvlab.evaluate("nodir", TEXT, "h2o", 8)


def test_the_package_contains_the_command() -> None:
    program = pathlib.Path(sysconfig.get_path("scripts")) / "kvlab"
    if not program.exists():
        pytest.skip("kvlab was not installed by pip")
    words: list[Any] = ["task", "passkey", "--model", kvlab.share / "engine/models/tiny", "--policy", "h2o", "--budget", 32]
    few = ["--words", "100", "--depth", "50%", "--samples", 1, "--query-aware"]
    done = subprocess.run([program, *map(str, words + few)], capture_output=True, text=True)
    assert done.returncode == 0 and "passkey, query-aware" in done.stdout, done.stderr
    done = subprocess.run([program, "eval", "--modle", "x"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "kvlab eval: unknown option '--modle'; did you mean --model?\n"
