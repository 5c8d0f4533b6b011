"""The table of mistakes in the documentation, made from their pages: `python tests/docs/mistakes.py` writes it."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "classes"
INDEX = PAGES / "README.md"

_BEGINNING = re.compile(r"# (?P<name>.+)\n\n\*\*(?P<title>.+)\.\*\*\n\nTypical symptom: (?P<symptom>.+)\.\n")
_TABLE = re.compile(r"(?<=\|---\|---\|---\|\n)(\|.*\n)*")


def pages() -> list[Path]:
    """The pages of mistakes, by name."""
    return [path for path in sorted(PAGES.glob("*.md")) if path != INDEX]


def row(page: Path) -> str:
    """The row of a mistake in the index, as its page begins."""
    said = _BEGINNING.match(page.read_text())
    if said is None or said["name"] != page.stem:
        raise ValueError(
            f"{page} begins with other lines than '# {page.stem}', '**What goes wrong.**' and 'Typical symptom: ….', "
            "with empty lines between them"
        )
    title = said["title"][0].lower() + said["title"][1:]
    return f"| [{page.stem}]({page.name}) | {title} | {said['symptom']} |\n"


def index() -> str:
    """The text of the index, with a row for each page."""
    return _TABLE.sub(lambda _: "".join(map(row, pages())), INDEX.read_text(), count=1)


if __name__ == "__main__":
    INDEX.write_text(index())
