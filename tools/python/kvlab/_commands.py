"""The end-to-end evaluation and all that is made of it: the commands of `kvlab`, in this process."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from kvlab import _arguments, _kvlab
from kvlab._policy import Policy, known_as, resolve
from kvlab._progress import Progress, shown
from kvlab._words import LISTS, python_words

Path = str | os.PathLike[str]
Option = str | int | float | bool | os.PathLike[str] | Iterable[Any] | None
Policies = str | Policy | Sequence[str | Policy]
Budgets = str | int | Sequence[str | int]

_OWN = ("help", "json", "policy", "budget")  # options that these functions give themselves


def evaluate(
    model: Path,
    text: Path | Sequence[Path],
    policies: Policies,
    budgets: Budgets,
    *,
    progress: Progress = True,
    **options: Option,
) -> Any:
    """End-to-end evaluation: perplexity, KL to the full cache and top-1 agreement of each configuration (`kvlab eval`)."""
    return _run("evaluate", "eval", options, _files(model, text), policies, budgets, progress)


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
    """Which metric of a replay predicts the end-to-end evaluation of this model (`kvlab fidelity`). `out`: a new folder."""
    return _run("fidelity", "fidelity", options, _files(model, text, out), policies, budgets, progress)


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
    """A policy file from texts: a sweep in the offline replay, successive halving in the closed one (`kvlab tune`)."""
    return _run("tune", "tune", options, _files(model, text, out), policies, budget, progress)


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
    _arguments.one_of("kind", kind, "passkey", "needle", "recall")
    return _run("task", "task", options, {"task": kind, "model": _arguments.path("model", model)}, policies, budgets, progress)


def _files(model: Any, text: Any, out: Any = None) -> dict[str, Any]:
    named: dict[str, Any] = {"model": _arguments.path("model", model), "text": _arguments.paths("text", text)}
    return named if out is None else named | {"out": _arguments.path("out", out)}


def _run(
    function: str,
    name: str,
    options: Mapping[str, Option],
    named: Mapping[str, Any],
    policies: Policies,
    budgets: Budgets,
    progress: Progress,
) -> Any:
    """What the command prints with --json. `options` are its own, with '_' for '-'; `named` are parameters of the
    function."""
    kinds = {option: kind for option, kind in _kvlab.command_options(name) if option not in _OWN}
    for option in options:
        if option.replace("_", "-") not in kinds:
            known = [one.replace("-", "_") for one in kinds]
            near = difflib.get_close_matches(option, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {_arguments.shown(option)}{hint}")
    texts, own = resolve([policies] if isinstance(policies, (str, Policy)) else policies)
    if any(known.function for known in map(known_as, texts) if known):
        options = {"device": "cpu"} | dict(options)
    names = LISTS | {"tune": {"budget": "budget"}, "task": {"task": "kind"}}.get(name, {})
    amounts = _arguments.amounts(names["budget"], budgets)
    requested = ["--json", *_joined("--policy", texts), *_joined("--budget", amounts)]
    for option, value in (dict(options) | dict(named)).items():
        dashed = option.replace("_", "-")
        requested += _words("--" + dashed, option, kinds[dashed], value)
    with shown(progress, name) as told, python_words(names):
        return json.loads(_kvlab.run_command(name, requested, own, told))


def _words(dashed: str, name: str, kind: str, value: Any) -> list[str]:
    """The option as the command takes it: a switch, a number, a text, or several texts."""
    if value is None:
        return []
    if kind == "switch":
        return [dashed] if _arguments.flag(name, value) else []
    if kind == "whole":
        return _joined(dashed, [str(_arguments.whole(name, value, -(2**63), 2**63 - 1))])
    if kind == "number":
        return _joined(dashed, [repr(_arguments.real(name, value))])
    parts = _arguments.words(name, value)
    return [word for part in parts for word in _joined(dashed, [part])] if kind == "texts" else _joined(dashed, parts)


def _joined(dashed: str, parts: Sequence[str]) -> list[str]:
    """One option, or none without a value. A value that begins with a dash is no option."""
    value = ",".join(parts)
    if not parts:
        return []
    return [f"{dashed}={value}"] if value.startswith("-") else [dashed, value]


def main() -> None:
    """`kvlab` on the command line."""
    sys.exit(_kvlab.main(sys.argv[1:]))
