"""Messages of the commands in the words of Python: an option is a keyword."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

# An option, and behind it a number or list that begins with one (128,20%), or a word such as DIR or FILE...
_OPTION = re.compile(
    r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?: (\d[\w.%]*(?:,[\w.%]+)*|[A-Z]+(?:\.\.\.)?(?![\w.])))?"
)
_OTHERS = ("huggingface-cli", "python -m", "pip install")  # what follows is for a shell

LISTS = {"policy": "policies", "budget": "budgets"}
"""Keywords of functions that take lists, by the options whose names differ."""


def in_python(message: str, names: Mapping[str, str] = {}) -> str:
    """The message with `budget` for --budget and `budget="128,20%"` for --budget 128,20%. `names`: keywords that are
    called otherwise than the option."""

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
    """What the extension throws within says keywords in place of options."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if type(error) not in (ValueError, RuntimeError) or len(error.args) != 1:
            raise
        message = in_python(str(error), names)
        if message == str(error):
            raise
        raise type(error)(message) from None
