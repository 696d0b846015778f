"""Rewrites the commands' messages for Python: option --some-name becomes the keyword some_name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

# An option, then optionally its value: a number, a list that begins with one (128,20%), or a word (DIR, FILE...).
_OPTION = re.compile(
    r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?: (\d[\w.%]*(?:,[\w.%]+)*|[A-Z]+(?:\.\.\.)?(?![\w.])))?"
)
_OTHERS = ("huggingface-cli", "python -m", "pip install")  # a shell command: its options stay

LISTS = {"policy": "policies", "budget": "budgets"}
"""Option -> keyword, for the options whose keyword has another name because it takes a list."""


def python_terms(message: str, names: Mapping[str, str] = {}) -> str:
    """Returns the message with options rewritten: --budget becomes `budget`, and --budget 128,20% becomes
    `budget="128,20%"`. `names`: option -> keyword, for options whose keyword has another name."""

    def keyword(found: re.Match[str]) -> str:
        if any(other in message[: found.start()].split("; ")[-1] for other in _OTHERS):
            return found[0]
        name = names.get(found[1], found[1].replace("-", "_"))
        if found[2] is None:
            return name
        return f"{name}={found[2]}" if found[2][0].isalpha() else f'{name}="{found[2]}"'

    return _OPTION.sub(keyword, message)


@contextlib.contextmanager
def python_words(names: Mapping[str, str] = {}) -> Iterator[None]:
    """Rewrites the messages of errors that the extension raises in the block."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if type(error) not in (ValueError, RuntimeError) or len(error.args) != 1:
            raise
        message = python_terms(str(error), names)
        if message == str(error):
            raise
        raise type(error)(message) from None
