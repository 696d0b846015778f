"""The error of kvlab.hf for input that it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvlab._words import python_terms


class Refused(ValueError):
    """Bad input. The message is one line that says what is wrong, where, and what to do instead.

    The error's text names the keywords of Python. `line` is the same message with the options of the command.
    """

    def __init__(self, line: str) -> None:
        super().__init__(python_terms(line))
        self.line = line


def one_line(error: object, max_length: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_length else text[:max_length] + "..."


@contextlib.contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Turns errors that the extension raises in the block into Refused."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise Refused(prefix + one_line(error)) from None
