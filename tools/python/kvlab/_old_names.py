"""Keywords of versions before 0.6 that have other names now. They are taken for one release more, with a FutureWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS = {"columns": "features", "draws": "samples", "ladder": "tiers", "span": "queries"}  # old name
"""Options of the commands, as keywords of `evaluate()` and its like."""


def rename(given: dict[str, Any], names: dict[str, str], function: str, stacklevel: int = 4) -> None:
    """Gives the keywords `given` their names of today, in place. Raises TypeError if both names are given.
    `stacklevel`: which caller the warning names, as in `warnings.warn()`."""
    for before, now in names.items():
        if before not in given:
            continue
        if now in given:
            raise TypeError(f"{function}() got both {now} and {before}, its old name; give {now}")
        warnings.warn(f"{function}({before}=) is called {now} now", FutureWarning, stacklevel=stacklevel)
        given[now] = given.pop(before)


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function take the keywords `names`, {before: now}."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            rename(kwargs, names, function.__name__, stacklevel=3)
            return function(*args, **kwargs)

        return call

    return decorate
