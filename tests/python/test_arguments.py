"""Arguments that are no good: each raises ValueError, in Python's own terms, and nothing is computed with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

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
    """What the code prints in a process of its own: a crash there fails one test and not all."""
    done = subprocess.run([sys.executable, "-c", _ARRAYS + textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.splitlines()


@pytest.mark.parametrize("length", [9, 10, 64, 1000, 100_000])
def test_frequencies_beyond_the_head_size(length: int) -> None:
    expected = f"config: inv_freq has {length} elements; at most half the head size, 8, is right"
    rows = "rows=[{'rope': 0, 'softcap': 1.0}]"
    assert said(f"trace(inv_freq=[1.0] * {length}); trace(inv_freq=[[1.0] * {length}], {rows})") == [expected] * 2


def test_sinks_of_other_heads() -> None:
    assert said("trace(rows=[{'sink': [1.0] * 9}])") == [
        "config: layer 0: 9 sinks; one for each of 1 query heads is expected"
    ]
