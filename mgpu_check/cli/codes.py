"""The exit codes of all commands, and the parser that keeps to them."""

from __future__ import annotations

import argparse
from typing import NoReturn

__all__ = ["INTERNAL_ERROR", "INTERRUPTED", "RIGHT", "UNDECIDED", "WRONG", "WRONG_USAGE", "Parser"]

# As pytest has them, as far as it has them.
RIGHT = 0
WRONG = 1
UNDECIDED = 2  # pytest's for a run that was interrupted, which says as little
INTERNAL_ERROR = 3
WRONG_USAGE = 4
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Ends the process with `WRONG_USAGE`, where argparse ends it with 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(None)
        self.exit(WRONG_USAGE, f"{self.prog}: error: {message}\n")
