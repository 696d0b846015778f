"""Progress of long calls: a tqdm bar, or the caller's function."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvlab import _arguments

Progress = bool | Callable[[float], object]


def _bar() -> Any:
    """tqdm's class for a notebook or a terminal. None if the output is neither, or tqdm is not installed."""
    if importlib.util.find_spec("tqdm") is None:
        return None
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    in_notebook = type(shell).__name__ == "ZMQInteractiveShell"
    if in_notebook and importlib.util.find_spec("ipywidgets") is not None:
        return importlib.import_module("tqdm.notebook").tqdm
    return importlib.import_module("tqdm").tqdm if in_notebook or sys.stderr.isatty() else None


@contextlib.contextmanager
def shown(requested: Progress | None, label: str) -> Iterator[Callable[[float], object] | None]:
    """Yields a function that takes the fraction done, from 0 to 1, or None if no progress is shown.

    A bar appears after 0.5 s, so short calls show none.
    """
    if not (requested is None or isinstance(requested, bool) or callable(requested)):
        raise _arguments.refuse("progress", requested, "True, False or a function")
    bar_class = _bar() if requested is True else None
    if bar_class is None:
        yield requested if callable(requested) else None
        return
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    with bar_class(total=1.0, desc=label, delay=0.5, leave=False, bar_format=form) as bar:
        yield lambda fraction: bar.update(fraction - bar.n)
