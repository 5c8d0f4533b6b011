"""The exit codes of all commands, and an argument parser that uses them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# The same as pytest's exit codes, where pytest has one.
RIGHT = 0
WRONG = 1
UNDECIDED = 2  # pytest's code for an interrupted run, which has no verdict either
INTERNAL_ERROR = 3
WRONG_USAGE = 4
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that exits with `WRONG_USAGE` on an error, says which value a bare option needs, and refuses
    empty words and files.

    Both methods are private in argparse (Lib/argparse.py, Python 3.11), which has no public place for such messages.

    argparse exits with 2, and says "expected one argument". An empty value is most often that of a variable of the
    shell that is not set, and as a path it would be the current directory.
    """

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if action.nargs is None and action.option_strings:
                flag = action.option_strings[0]
                raise argparse.ArgumentError(action, f"needs a value: {flag}={action.metavar}") from None
            raise

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string and action.type in (None, Path):
            label = action.metavar or action.dest
            raise argparse.ArgumentError(action, f"'' is empty; give {label}, or leave it out")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        self.print_usage(None)
        self.exit(WRONG_USAGE, f"{self.prog}: error: {message}\n")


def number(least: int, description: str) -> Callable[[str], int]:
    """Return a type for `argparse`: an integer of at least `least`. `description` says of what, as in "number of
    GPUs"."""

    def parse(text: str) -> int:
        try:
            n = int(text)
        except ValueError:
            n = least - 1
        if n < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {description}; give an integer of at least {least}")
        return n

    return parse
