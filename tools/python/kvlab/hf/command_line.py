"""Helpers for the command lines of kvlab.hf."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(min_value: int, max_value: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else -1
        if number < min_value or (max_value and number > max_value):
            right = f"from {min_value} to {max_value}" if max_value else f"of at least {min_value}"
            raise argparse.ArgumentTypeError(f"{text!r} should be a whole number {right}")
        return number

    return parse


def refuse_missing_cuda(parser: Parser, arguments: argparse.Namespace) -> None:
    import torch  # not at the top, because not every command needs it

    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no CUDA device that torch can use; use --device cpu")


def announce_size(program: str, what: str, size: float) -> None:
    """Prints before a write of at least 100 MB how large it may be. `size` is in bytes."""
    if size >= 100e6:
        print(f"{program}: writes up to {size / 1e6:.0f} MB of {what}", file=sys.stderr)
