"""GitHub's Markdown, in which nothing of what is quoted is taken for markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["code", "fenced", "table", "text"]

# What opens emphasis, links, HTML, cells, formulas, mentions, or references to issues.
_MARKUP = str.maketrans({character: f"&#{ord(character)};" for character in "\\`*_[]<>&|~#$@"})
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def text(words: str) -> str:
    """Escape words so that they show as they are, on one line, in Markdown or HTML."""
    return " ".join(_printable(words).split()).translate(_MARKUP)


def code(words: str) -> str:
    """Set words in the type of code, on one line, for a cell of a table or a line of text."""
    words = " ".join(_printable(words).split()).replace("|", "\\|")
    fence = "`" * (_longest_run(words) + 1)
    space = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{fence}{space}{words}{space}{fence}"


def fenced(words: str, language: str = "text") -> list[str]:
    """Render a block of code that holds `words`, with whatever fences they have."""
    words = _printable(words).strip("\n")
    fence = "`" * max(3, _longest_run(words) + 1)
    return [f"{fence}{language}", *words.split("\n"), fence]


def table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Render a table of cells that are Markdown, on one line each; without a head, rows only."""
    top = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] if head else []
    return [*top, *("| " + " | ".join(row) + " |" for row in rows)]


def _longest_run(words: str) -> int:
    return max((len(run) for run in re.findall(r"`+", words)), default=0)


def _printable(words: str) -> str:
    """Remove colours, and make visible what no file or page can show."""
    words = _ESCAPES.sub("", words).encode(errors="backslashreplace").decode()
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in words.replace("\r\n", "\n"))
