"""The closed loop and all that is made of it: the commands of `kvlab`, in this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from kvlab import _kvlab
from kvlab._policy import Policy, known_as, resolve
from kvlab._progress import Progress, shown
from kvlab._words import LISTS, python_words

Path = str | os.PathLike[str]
Option = str | int | float | bool | os.PathLike[str] | Iterable[Any] | None
Policies = str | Policy | Sequence[str | Policy]
Budgets = str | int | Sequence[str | int]

_REPEATED = {"text", "trace", "policy_source", "columns"}  # the others take one list, with commas


def evaluate(
    model: Path,
    text: Path | Sequence[Path],
    policies: Policies,
    budgets: Budgets,
    *,
    progress: Progress = True,
    **options: Option,
) -> Any:
    """Closed loop: perplexity, KL to the full cache and top-1 agreement of each configuration (`kvlab eval`)."""
    return _run("eval", [], options | {"model": model, "text": text}, policies, budgets, progress)


def fidelity(
    model: Path,
    text: Path | Sequence[Path],
    policies: Policies,
    budgets: Budgets,
    out: Path,
    *,
    progress: Progress = True,
    **options: Option,
) -> Any:
    """Which figure of a replay predicts the closed loop of this model (`kvlab fidelity`). `out`: a new folder."""
    return _run("fidelity", [], options | {"model": model, "text": text, "out": out}, policies, budgets, progress)


def tune(
    model: Path,
    text: Path | Sequence[Path],
    budget: str | int,
    out: Path,
    policies: Policies = (),
    *,
    progress: Progress = True,
    **options: Option,
) -> Any:
    """A policy file from texts: a grid in the open loop, a race in the closed one (`kvlab tune`)."""
    return _run("tune", [], options | {"model": model, "text": text, "out": out}, policies, budget, progress)


def task(
    kind: Literal["passkey", "needle", "recall"],
    model: Path,
    policies: Policies,
    budgets: Budgets,
    *,
    progress: Progress = True,
    **options: Option,
) -> Any:
    """Answers under each policy, with intervals (`kvlab task`)."""
    return _run("task", [kind], options | {"model": model}, policies, budgets, progress)


def _run(
    name: str, words: list[str], options: dict[str, Any], policies: Policies, budgets: Budgets, progress: Progress
) -> Any:
    """What the command prints with --json. Options are its own, with '_' for '-'."""
    several = [policies] if isinstance(policies, (str, Policy)) else list(policies)
    texts, own = resolve(several)
    if any(known.function for known in map(known_as, texts) if known):
        options = {"device": "cpu"} | options
    asked = [*words, "--json"]
    for option, value in ({"policy": texts, "budget": budgets} | options).items():
        asked += _words("--" + option.replace("_", "-"), value, option in _REPEATED)
    names = LISTS | ({"budget": "budget"} if name == "tune" else {})
    with shown(progress, name) as told, python_words(names):
        return json.loads(_kvlab.run_command(name, asked, own, told))


def _words(option: str, value: Option, repeated: bool) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, (str, int, float, os.PathLike)):
        return [option, os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
    items = [os.fspath(item) if isinstance(item, os.PathLike) else str(item) for item in value]
    if not items:
        return []
    return [word for item in items for word in (option, item)] if repeated else [option, ",".join(items)]



def main() -> None:
    """`kvlab` on the command line."""
    sys.exit(_kvlab.main(sys.argv[1:]))
