"""Keywords of versions before 0.6 that have other names now. They are accepted for one more release, with a
FutureWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS = {"columns": "features", "draws": "samples", "ladder": "tiers", "span": "queries"}  # old name
"""Old name -> current name of the commands' options, which are keywords of `evaluate()`, `fidelity()`, `tune()` and
`task()`."""


def rename(given: dict[str, Any], names: dict[str, str], function: str, stacklevel: int = 4) -> None:
    """Replaces old names of the keywords in `given` by the current ones, in place. `names`: old -> current name. Raises
    ValueError if both names are given. `stacklevel`: which caller the warning names, as in `warnings.warn()`."""
    for before, now in names.items():
        if before not in given:
            continue
        if now in given:
            raise ValueError(f"{function}() got both {now} and {before}, its old name; give {now}")
        warnings.warn(f"{function}({before}=) is called {now} now", FutureWarning, stacklevel=stacklevel)
        given[now] = given.pop(before)


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that lets a function also accept old names of keywords. `names`: old name = current name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            rename(kwargs, names, function.__name__, stacklevel=3)
            return function(*args, **kwargs)

        return call

    return decorate
