"""Designs KV-cache eviction policies offline: replays attention traces through many policies and budgets.

trace = kvlab.Trace("trace")
run = kvlab.replay(trace, policies=["h2o", "window"], budgets=["10%", 128])
run.frame()
"""

from kvlab._kvlab import version as __version__
from kvlab.policy import Policy, PolicyInfo, Seen, Step, Token, policies, policy, policy_source
from kvlab.run import Run, load_run, metrics, replay
from kvlab.trace import Trace

__all__ = [
    "Policy",
    "PolicyInfo",
    "Run",
    "Seen",
    "Step",
    "Token",
    "Trace",
    "__version__",
    "load_run",
    "metrics",
    "policies",
    "policy",
    "policy_source",
    "replay",
]
