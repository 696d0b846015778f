"""Tests that names of versions before 0.6 are accepted for one more release, with a warning that gives the new name."""

import pathlib

import pytest

import kvlab

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "old_names"
STORY = kvlab.share / "traces/samples/tiny-story"


def test_keywords_are_taken_with_a_warning():
    trace = kvlab.Trace(STORY)
    with pytest.warns(FutureWarning, match="span=.*queries"):
        old = kvlab.replay(trace, ["h2o"], [16], span="decode", layers=[0])
    new = kvlab.replay(trace, ["h2o"], [16], queries="decode", layers=[0])
    assert old.frame().equals(new.frame())
    with pytest.raises(ValueError, match="both queries and span"):
        kvlab.replay(trace, ["h2o"], [16], span="decode", queries="decode")
    with pytest.warns(FutureWarning, match="columns=.*features"):

        @kvlab.policy(columns=["key_norm"])
        def largest(state, seen, token, step):
            return -token.key_norm


def test_options_of_commands_are_taken_with_a_warning():
    model, text = kvlab.share / "engine/models/tiny", kvlab.share / "tools/demo/prompt.txt"
    with pytest.warns(FutureWarning, match="ladder=.*tiers"):
        made = kvlab.evaluate(model, text, "h2o", 32, ladder="4", window=64, max_tokens=128)
    assert any("tiers=4" in str(one) for one in made["configurations"])


def test_policies_are_taken():
    trace = kvlab.Trace(STORY)
    old = kvlab.replay(trace, ["h2o:ladder=4", "column:name=key_norm"], [16], layers=[0])
    new = kvlab.replay(trace, ["h2o:tiers=4", "feature:name=key_norm"], [16], layers=[0])
    assert old.frame().equals(new.frame())


def test_runs_are_read():
    frame = kvlab.load_run(DATA / "run").frame()
    assert {"feature", "oracle_attention"} <= set(frame.policy)
    assert "tiers" in frame.columns
