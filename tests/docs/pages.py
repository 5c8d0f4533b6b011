"""The pages of the documentation, and the fenced blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MISTAKES = DOCS / "classes"

_FENCE = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: "python", "sh", "yaml", or "" for what a program prints.
        title: the name of the file that it shows, or "".
    """

    language: str
    title: str
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of `page` in that language, in order."""
    found = [
        Block(match["language"], match["title"] or "", match["text"]) for match in _FENCE.finditer(page.read_text())
    ]
    return [block for block in found if block.language == language]


def first_files(page: Path) -> dict[str, str]:
    """The Python files that a page shows, by name, as it shows them first."""
    files: dict[str, str] = {}
    for block in blocks(page, "python"):
        files.setdefault(block.title, block.text)
    return files


def last_files(page: Path) -> dict[str, str]:
    """The Python files that a page shows, by name, with what it adds to them later."""
    files: dict[str, str] = {}
    for block in blocks(page, "python"):
        files[block.title] = "\n\n".join(filter(None, [files.get(block.title), block.text]))
    return files


def all_pages() -> list[Path]:
    """Every page of documentation in the repository."""
    beside = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [
        *beside,
        *sorted((ROOT / "examples").glob("*.md")),
        *sorted((ROOT / "benchmarks").glob("*.md")),
        *sorted(DOCS.rglob("*.md")),
    ]
