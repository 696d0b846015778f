"""The closed loop and all that is made of it, by the `kvlab` command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from kvlab import _kvlab
from kvlab._policy import Policy, known_as, resolve
from kvlab._progress import Progress, shown

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
    in_process = any(known.function for known in map(known_as, texts) if known)
    if in_process:
        options = {"device": "cpu"} | options
    sources = [] if in_process else [str(one.source) for one in several if isinstance(one, Policy)]
    all_options: dict[str, Any] = {"policy": texts, "policy_source": sources, "budget": budgets, **options}
    asked = [*words, "--json"]
    for option, value in all_options.items():
        asked += _words("--" + option.replace("_", "-"), value, option in _REPEATED)
    with shown(progress, name) as told:
        if in_process:
            return json.loads(_kvlab.run_command(name, asked, own, told))
        call = [_program(), name, *asked]
        code, out, error = _finished(call, told)
    if code != 0:
        line = error.strip().splitlines()[-1:] or [f"ended with {code}"]
        message = line[0].removeprefix(f"kvlab {name}: ")
        raise ValueError(message) if code == 2 else RuntimeError(message)
    return json.loads(out)


def _finished(call: list[str], told: Callable[[float], object] | None) -> tuple[int, str, str]:
    """The exit code and what was printed. Ctrl-C, or what `told` raises, ends the command too."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error, os.fdopen(read) as fractions:
        with os.fdopen(write, "w"):
            child = subprocess.Popen(
                call, stdout=out, stderr=error, pass_fds=[write], env=os.environ | {"KVLAB_PROGRESS_FD": str(write)}
            )
        try:
            for line in fractions:  # until the command ends
                if told is not None:
                    told(float(line))
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        texts = []
        for file in (out, error):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return code, texts[0], texts[1]


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


def _program() -> str:
    program = os.environ.get("KVLAB_COMMAND") or shutil.which("kvlab")
    if not program:
        raise RuntimeError("the kvlab command is needed: put it on PATH, or name it in KVLAB_COMMAND (./dev build)")
    return program
