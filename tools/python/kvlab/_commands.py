"""The commands `kvlab eval`, `fidelity`, `tune` and `task`, run in this process."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from kvlab import _arguments, _kvlab
from kvlab._old_names import OPTIONS, rename
from kvlab._policy import Policy, known_as, resolve
from kvlab._progress import Progress, shown
from kvlab._words import LISTS, python_words

Path = str | os.PathLike[str]
Option = str | int | float | bool | os.PathLike[str] | Iterable[Any] | None
Policies = str | Policy | Sequence[str | Policy]
Budgets = str | int | Sequence[str | int]

_OWN = ("help", "json", "policy", "budget")  # options that these functions set themselves


def evaluate(
    model: Path,
    text: Path | Sequence[Path],
    policies: Policies,
    budgets: Budgets,
    *,
    progress: Progress = True,
    **options: Option,
) -> Any:
    """Runs the end-to-end evaluation: perplexity, KL to the full cache and top-1 agreement, as `kvlab eval` does.

    >>> kvlab.evaluate("model", "text.txt", ["h2o", "sink"], [64, 128], window=256)["configurations"]

    `model`: a checkpoint's folder. `text`: one text file or a list. `policies`, `budgets`, `progress`: as in
    `replay()`. `options`: any other option of the command as a keyword, with "_" for "-": `max_tokens=512` for
    --max-tokens 512.

    Returns what the command prints with --json, as a dict. KL is in nats. Raises ValueError for a bad argument,
    TypeError for an unknown option, and RuntimeError if a file cannot be read.
    """
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
    """Measures how well each metric of the offline replay predicts the end-to-end evaluation, as `kvlab fidelity` does.

    >>> kvlab.fidelity("model", ["a.txt", "b.txt"], ["window", "sink", "h2o"], [64, 128], out="fidelity")

    `out`: a new folder for the results. Give at least three policies, because each budget needs three for a comparison.
    Other arguments, the result and the errors are those of `evaluate()`.
    """
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
    """Finds a policy for a budget and writes a policy file, as `kvlab tune` does.

    >>> kvlab.tune("model", ["a.txt", "b.txt"], budget=256, out="policy.json")

    The offline replay ranks all configurations. The best ones are then evaluated end to end, and successive halving
    selects one of them.

    `out`: the policy file. `policies`: the policies to try, by default those of `kvlab tune`. Other arguments, the
    result and the errors are those of `evaluate()`.
    """
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
    """Measures task accuracy under each policy, with 95% intervals, as `kvlab task` does.

    >>> kvlab.task("passkey", "model", ["h2o", "sink"], [64], words=[250], samples=2)

    `kind`: what the model has to find in the text. Other arguments, the result and the errors are those of
    `evaluate()`.
    """
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
    """Runs the command and returns what it prints with --json. `options`: keywords that are options of the command,
    with '_' for '-'. `named`: parameters of the Python function."""
    kinds = {option: kind for option, kind in _kvlab.command_options(name) if option not in _OWN}
    options = dict(options)
    rename(options, {before: now for before, now in OPTIONS.items() if now in kinds}, function)
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
    """An option and its values as words of the command line."""
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
    """Returns an option with its values joined by commas, or nothing if there is no value. A value that begins with a
    dash becomes OPTION=VALUE, so that it is not read as an option."""
    value = ",".join(parts)
    if not parts:
        return []
    return [f"{dashed}={value}"] if value.startswith("-") else [dashed, value]


def main() -> None:
    """The `kvlab` command."""
    sys.exit(_kvlab.main(sys.argv[1:]))
