"""Checks arguments. Each function returns the converted value, or raises ValueError that says what the argument should
be."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy

_MAX_SHOWN = 60  # characters of a value in a message


def shown(value: Any) -> str:
    """Returns any value as text on one line, for a message."""
    try:
        text = ascii(value)
    except Exception:  # an integer of thousands of digits, or an object whose own repr fails
        text = f"a value of type {type(value).__name__}"
    return brief(" ".join(text.split()))


def brief(text: str, max_length: int = _MAX_SHOWN) -> str:
    """A text for a message, cut after `max_length` characters."""
    return text if len(text) <= max_length else text[:max_length] + "..."


def refuse(name: str, value: Any, right: str) -> ValueError:
    return ValueError(f"{name}: {shown(value)} should be {right}")


def whole(name: str, value: Any, low: int, high: int) -> int:
    """Checks that the value is an integer of Python or numpy, from `low` to `high`. Refuses bool, which is usually a
    mistake."""
    right = f"a whole number from {low} to {high}" if high < 2**63 - 1 else f"a whole number of at least {low}"
    if isinstance(value, (bool, numpy.bool_)):
        raise refuse(name, value, right)
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse(name, value, right) from None
    if not low <= number <= high:
        raise refuse(name, value, right)
    return number


def real(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Checks that the value is a finite number of Python or numpy, from `low` to `high`."""
    right = "a finite number" if math.isinf(high) else f"a number from {low:g} to {high:g}"
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        raise refuse(name, value, right)
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, numpy.bool_)):
        raise refuse(name, value, "True or False")
    return bool(value)


def text(name: str, value: Any) -> str:
    """Checks that the value is a str that can be encoded in UTF-8. Lone surrogates cannot."""
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refuse(name, value, "a string that can be encoded in UTF-8") from None
    return value


def path(name: str, value: Any) -> str:
    """Returns a path as text. Refuses paths that are not UTF-8, because the extension takes text only."""
    if not isinstance(value, (str, os.PathLike)):
        raise refuse(name, value, "a path")
    found = os.fspath(value)
    if not isinstance(found, str) or "\0" in found:
        raise refuse(name, value, "a path without a NUL character")
    return text(name, found)


def paths(name: str, value: Any) -> list[str]:
    """Returns one path or several paths as a list."""
    if isinstance(value, (str, os.PathLike)):
        return [path(name, value)]
    return [path(name, one) for one in items(name, value, "a path, or a list of paths")]


def one_of(name: str, value: Any, *known: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}: {shown(value)} should be {', '.join(known[:-1])} or {known[-1]}")
    return value


def items(name: str, value: Any, right: str) -> list[Any]:
    """Returns the elements of an iterable as a list. Refuses a single text, which is an iterable of characters."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise refuse(name, value, right)
    try:
        return list(value)
    except TypeError:  # an array without dimensions
        raise refuse(name, value, right) from None


def texts(name: str, value: Any) -> list[str]:
    """Returns one text or several texts as a list."""
    if isinstance(value, str):
        return [text(name, value)]
    return [text(name, one) for one in items(name, value, "a string, or a list of strings")]


def amount(name: str, value: Any) -> str:
    """Returns a budget as text, written as on the command line. A whole number is a number of tokens."""
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, (float, numpy.floating)):
        return format(real(name, value), "g")
    return str(whole(name, value, 1, 2**31 - 1))


def amounts(name: str, value: Any) -> list[str]:
    """Returns one budget or several budgets as a list of texts."""
    one = isinstance(value, str) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0
    several = [value] if one else items(name, value, "a budget, or a list of budgets")
    return [amount(name, budget) for budget in several]


def words(name: str, value: Any) -> list[str]:
    """Returns one or several texts, paths or numbers as a list of words of the command line."""
    one = isinstance(value, (str, os.PathLike)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0
    return [_word(name, part) for part in ([value] if one else items(name, value, "a list"))]


def _word(name: str, value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return path(name, value)
    if isinstance(value, (bool, numpy.bool_, bytes)):
        raise refuse(name, value, "a string, a number or a path")
    try:
        return str(operator.index(value))
    except (TypeError, ValueError):
        pass
    if isinstance(value, (float, numpy.floating)):
        return repr(real(name, value))
    raise refuse(name, value, "a string, a number or a path")


def numbers(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> list[float]:
    return [real(f"{name}[{i}]", one, low, high) for i, one in enumerate(items(name, value, "a list of numbers"))]
