"""Compares KV-cache eviction policies offline: replays attention traces under many policies and budgets.

>>> trace = kvlab.Trace("trace")
>>> run = kvlab.replay(trace, policies=["h2o", "window"], budgets=["10%", 128])
>>> run.frame()
"""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

from kvlab._commands import evaluate, fidelity, task, tune
from kvlab._kvlab import version as __version__
from kvlab._formats import quantize
from kvlab._policy import Policy, PolicyInfo, Seen, Step, Token, policies, policy, policy_source
from kvlab._rows import Rows
from kvlab._run import Difference, Kept, LruPoint, Metric, Run, difference, load_run, metrics, replay
from kvlab._trace import Trace

if TYPE_CHECKING:
    from kvlab import hf
    from kvlab.hf import KvlabPress, from_press

share = pathlib.Path(__file__).parent / "share"
"""Folder of the files that come with the package: engine/models/tiny, traces/samples, tools/texts, tools/demo."""

__all__ = [
    "Difference",
    "Kept",
    "KvlabPress",
    "LruPoint",
    "Metric",
    "Policy",
    "PolicyInfo",
    "Rows",
    "Run",
    "Seen",
    "Step",
    "Token",
    "Trace",
    "__version__",
    "difference",
    "evaluate",
    "fidelity",
    "from_press",
    "hf",
    "load_run",
    "metrics",
    "policies",
    "policy",
    "policy_source",
    "quantize",
    "replay",
    "share",
    "task",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "hf":  # imported on first use, because it needs torch
        return importlib.import_module("kvlab.hf")
    if name in ("KvlabPress", "from_press"):  # imported on first use, because they need kvpress
        return getattr(importlib.import_module("kvlab.hf"), name)
    raise AttributeError(f"module 'kvlab' has no attribute '{name}'")
