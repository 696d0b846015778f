"""Designs KV-cache eviction policies offline: replays attention traces through many policies and budgets.

trace = kvlab.Trace("trace")
run = kvlab.replay(trace, policies=["h2o", "window"], budgets=["10%", 128])
run.frame()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab import hf
    from kvlab._commands import evaluate, fidelity, task, tune
    from kvlab._kvlab import version as __version__
    from kvlab._policy import Policy, PolicyInfo, Seen, Step, Token, policies, policy, policy_source
    from kvlab._run import Difference, Kept, Metric, Run, difference, load_run, metrics, replay
    from kvlab._trace import Trace

# Imported when it is asked for: the scripts of tools/ take kvlab.hf from a checkout where nothing is compiled.
_HOMES = {
    "_commands": ("evaluate", "fidelity", "task", "tune"),
    "_policy": ("Policy", "PolicyInfo", "Seen", "Step", "Token", "policies", "policy", "policy_source"),
    "_run": ("Difference", "Kept", "Metric", "Run", "difference", "load_run", "metrics", "replay"),
    "_trace": ("Trace",),
}

__all__ = [
    "Difference",
    "Kept",
    "Metric",
    "Policy",
    "PolicyInfo",
    "Run",
    "Seen",
    "Step",
    "Token",
    "Trace",
    "__version__",
    "difference",
    "evaluate",
    "fidelity",
    "hf",
    "load_run",
    "metrics",
    "policies",
    "policy",
    "policy_source",
    "replay",
    "task",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "hf":
        return importlib.import_module("kvlab.hf")
    if name == "__version__":
        return importlib.import_module("kvlab._kvlab").version
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"kvlab.{module}"), name)
    raise AttributeError(f"module 'kvlab' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
