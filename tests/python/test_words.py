"""Tests that errors name Python keywords, and not options of the command line."""

from __future__ import annotations

import pytest
from conftest import TINY

import kvlab
from kvlab._words import LISTS, python_terms


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("--model: layer 0 attends more than once", "model: layer 0 attends more than once"),
        (
            "--budget: policy h2o needs one; give tokens or a share: --budget 128,20%",
            'budgets: policy h2o needs one; give tokens or a share: budgets="128,20%"',
        ),
        ("--prompt-tokens: 9 should be between 1 and 8", "prompt_tokens: 9 should be between 1 and 8"),
        ("--text: missing; give one or more files: --text FILE", "text: missing; give one or more files: text=FILE"),
        ("x is no trace; --queries all takes every query", "x is no trace; queries all takes every query"),
        (
            "no kl_estimate; python -m kvlab.hf sensitivities with --replace makes them",
            "no kl_estimate; python -m kvlab.hf sensitivities with --replace makes them",
        ),
        ("a -- b --x", "a -- b x"),
    ],
)
def test_a_message_in_keywords(said: str, expected: str) -> None:
    assert python_terms(said, LISTS) == expected


def test_errors_of_commands_name_keywords(tmp_path: object, small: kvlab.Trace) -> None:
    text = TINY.parents[2] / "tools" / "demo" / "prompt.txt"
    with pytest.raises(ValueError, match=r"^budgets: policy h2o needs one") as error:
        kvlab.replay(small, "h2o")
    assert "--" not in str(error.value)
    with pytest.raises(ValueError, match=r"^prompt_tokens: ") as error:
        kvlab.evaluate(TINY, text, "h2o", 32, prompt_tokens=-1, progress=False)
    assert "--" not in str(error.value)


def test_a_refusal_of_hf_names_keywords_and_its_command_options() -> None:
    pytest.importorskip("torch")
    from kvlab.hf.refused import Refused

    refused = Refused("--model: layer 0 has no keys")
    assert str(refused) == "model: layer 0 has no keys"
    assert refused.line == "--model: layer 0 has no keys"
