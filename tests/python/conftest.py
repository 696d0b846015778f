"""Common code of the tests of the Python package. The environment variable KVLAB_COMMAND is the path of the command
with which results are compared."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable

import numpy
import pytest

import kvlab

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "traces" / "samples" / "tiny-story"
TINY = ROOT / "engine" / "models" / "tiny"


@pytest.fixture(scope="session")
def sample() -> kvlab.Trace:
    """The bundled sample trace: 1,012 tokens, 4 layers of 2 KV heads, bfloat16."""
    return kvlab.Trace(SAMPLE)


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    program = os.environ.get("KVLAB_COMMAND")
    if not program:
        pytest.skip("KVLAB_COMMAND is not set to the path of kvlab")
    return lambda *words: subprocess.run([program, *map(str, words)], capture_output=True, text=True)


def random_arrays(tokens: int = 80, dtype: str = "float32", seed: int = 1) -> dict[str, numpy.ndarray]:
    """Random q, k, v and ids for 2 layers with 4 query heads and 2 KV heads of size 16."""
    random = numpy.random.default_rng(seed)

    def tensor(heads: int) -> numpy.ndarray:
        return random.standard_normal((2, heads, tokens, 16)).astype(dtype)

    return {"q": tensor(4), "k": tensor(2), "v": tensor(2), "ids": random.integers(0, 99, tokens)}


@pytest.fixture(scope="session")
def small() -> kvlab.Trace:
    return kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32)
