"""Prose is plain: docstrings, comments, messages and pages have few hard sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import prose_of

TOP = Path(__file__).parents[2]
PAGES = [TOP / "docs", *(TOP / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
OF_ALL = 15
"""Hard patterns per 10,000 words; pytest-xdist and Hypothesis have about 20."""


def test_all_is_plain() -> None:
    found = prose_of([TOP / "mgpu_check", *PAGES])
    assert found.rate <= OF_ALL, "\n".join(map(str, found.hits))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('"""Return the ranks, of which there are several."""', "of which, of whose, of whom"),
        ('raise ValueError("the count of what is there is none at all")', "is none, so many"),
        ("# What was left.\n", "clause as a sentence"),
        (f'"""{"word " * 36}."""', "sentence of more than 35 words"),
    ],
)
def test_hard_sentences_are_found(text: str, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert [hit.pattern for hit in prose_of([path]).hits] == [pattern]


def test_code_of_pages_and_remarks_for_tools_are_no_prose(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("Plain.\n\n```\n# What was left.\n```\n\n| of which |\n")
    module.write_text("import os  # noqa: of which\n")
    assert not prose_of([tmp_path]).hits
