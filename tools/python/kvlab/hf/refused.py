"""What is refused, and the line that says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Refused(ValueError):
    """Bad input: one line that says what, where, and what would be right."""


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
