"""Compares your own policy with published policies on any trace: python3 tools/examples/compare_policies.py TRACE"""

from __future__ import annotations

import sys
from typing import Any

import numpy
import numpy.typing

import kvlab


@kvlab.policy(needs="mass", state={"mass": "f8"}, sinks=4, recent="50%")
def fading(state: Any, seen: kvlab.Seen, token: kvlab.Token, step: kvlab.Step) -> numpy.typing.NDArray[numpy.float64]:
    """Keeps the tokens that received attention recently."""
    mass: numpy.typing.NDArray[numpy.float64] = state["mass"] * 0.98 + seen.mass
    state["mass"] = mass
    return mass


def main(path: str) -> None:
    trace = kvlab.Trace(path)
    run = kvlab.replay(trace, ["window", "sink", "h2o", fading], ["5%", "10%", "20%"])
    frame = run.frame()
    rows = frame[(frame["metric"] == "nll_recall") & (frame["layer"] == "all") & (frame["head"] == "all")]
    print(rows.pivot_table(values="value", index="policy", columns="budget", observed=True).round(3))
    kept = run.kept(layer=0, head=0, policy=fading, budget="10%")
    print(f"{trace.name}: the last query sees {int(kept.live[-1].sum())} of {trace.tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "traces/samples/tiny-story")
