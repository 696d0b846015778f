"""What the command lines of tools/*.py share."""

import argparse
import sys


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(least, most=None):
    def parse(text):
        number = int(text) if text.isascii() and text.isdigit() else -1
        if number < least or (most and number > most):
            to = f"to {most}" if most else "on"
            raise argparse.ArgumentTypeError(f"{text!r} should be a whole number from {least} {to}")
        return number

    return parse


def refuse_missing_cuda(parser, arguments):
    import torch  # here, because not every script needs it

    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no CUDA device that torch can use; cpu would do")


def announce_size(program, what, size):
    """Says before a large write how many bytes it will be; nothing of less than 100 MB."""
    if size >= 100e6:
        print(f"{program}: writes up to {size / 1e6:.0f} MB of {what}", file=sys.stderr)
