"""What is refused, and the line that says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvlab._words import in_python


class Refused(ValueError):
    """Bad input: one line that says what, where, and what would be right: `line` in the options of the command, the
    error's own text in the keywords of Python."""

    def __init__(self, line: str) -> None:
        super().__init__(in_python(line))
        self.line = line


def one_line(error: object, most: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[:most] + "..."


@contextlib.contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """What the extension throws is refused."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise Refused(prefix + one_line(error)) from None
