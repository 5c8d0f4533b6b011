"""Render GitHub's Markdown, and escape quoted text so that it is not parsed as markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Characters that start emphasis, links, HTML, cells, formulas, mentions, or references to issues.
_MARKUP = str.maketrans({character: f"&#{ord(character)};" for character in "\\`*_[]<>&|~#$@"})
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def text(words: str) -> str:
    """Escape text for Markdown or HTML, on one line, so that it is shown literally."""
    return " ".join(_printable(words).split()).translate(_MARKUP)


def code(words: str) -> str:
    """Render text as inline code, on one line, for a table cell or a sentence."""
    words = " ".join(_printable(words).split()).replace("|", "\\|")
    fence = "`" * (_longest_run(words) + 1)
    space = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{fence}{space}{words}{space}{fence}"


def fenced(words: str, language: str = "text") -> list[str]:
    """Render `words` as a code block, with a fence longer than any run of backticks in them."""
    words = _printable(words).strip("\n")
    fence = "`" * max(3, _longest_run(words) + 1)
    return [f"{fence}{language}", *words.split("\n"), fence]


def table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Render a table, one line per row. Cells are Markdown. With an empty `head`, return only the rows."""
    top = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] if head else []
    return [*top, *("| " + " | ".join(row) + " |" for row in rows)]


def _longest_run(words: str) -> int:
    return max((len(run) for run in re.findall(r"`+", words)), default=0)


def _printable(words: str) -> str:
    """Remove terminal colours, and escape unprintable characters."""
    words = _ESCAPES.sub("", words).encode(errors="backslashreplace").decode()
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in words.replace("\r\n", "\n"))
