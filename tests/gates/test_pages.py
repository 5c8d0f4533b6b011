"""The pages of the classes of mistakes: the wrong program of each is refuted by its name, and the right one passes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from mgpu_check.diagnosis.report import all_mistakes
from tests.docs import mistakes
from tests.docs.pages import MISTAKES as PAGES
from tests.docs.pages import ROOT, blocks
from tests.gates.pages import alarm, judge

CLASSES = all_mistakes()
FEW = 8  # cases: one of each kind, and not 24 in all
MORE = {"gathered-in-other-order": 16}  # what few of the cases show
WEEKLY = {
    *("batch-statistics-per-rank", "clipped-before-synchronization", "different-initialization"),
    *("expert-gradients-factor", "loss-term-factor", "memory-formats-differ", "optimizer-differs", "padding-counted"),
    *("positions-restart", "reduced-again", "set-order", "stale-gradients", "wrong-process-group"),
    *("opposite-sign", "recomputation-differs", "updated-too-often", "random-numbers-per-rank"),
    *("gradients-not-synchronized", "world-size-factor", "accumulation-factor", "decision-per-rank", "mean-of-means"),
    *("buffers-drift", "dataset-not-split", "epochs-not-reshuffled", "evaluation-differs", "not-waited"),
    *("resharded-wrongly", "restored-on-one-rank", "samples-missed"),
    *("other-values-combined", "labels-shifted-after-split", "not-scattered", "gradient-cut-by-collective"),
    *("low-precision-arithmetic", "low-precision-overflow", "integer-division", "strided-view"),
    *("blocks-in-other-order", "partial-result-added-on-every-rank", "result-discarded"),
    *("gathered-in-other-order", "uneven-steps", "value-of-one-rank", "wrong-reduction"),
}
"""Each of these pages takes seconds. The gates of the others run the same way each day."""


def page_of(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


@pytest.mark.gpus(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in WEEKLY else []) for name in CLASSES]
)
def test_the_wrong_program_of_a_page_is_refuted_as_it_shows(ranks, name):
    refuted = judge(ranks, name, "wrong", MORE.get(name, FEW))
    assert refuted is not None
    assert refuted.mistakes[:1] == (name,), str(refuted)
    shown = re.search(r"^## How it shows\n\n\| (.*) \|\n\|[-|]+\n\| (.*) \|$", page_of(name), re.MULTILINE)
    assert shown is not None
    table = dict(zip(shown[1].split(" | "), shown[2].split(" | "), strict=True))
    seen = rows_of(str(refuted), table)
    assert seen or "-" in table.values()  # a rank has died, and nothing could be compared
    wrong = {column for column, marks in seen.items() if "NO" in marks}
    assert wrong == {column for column in seen if table[column] == "NO"}


@pytest.mark.gpus(4)
@pytest.mark.parametrize("name", CLASSES)
def test_the_right_program_of_a_page_passes(ranks, name):
    assert alarm(ranks, name) is None


@pytest.mark.slow
@pytest.mark.gpus(4)
@pytest.mark.parametrize("kind", ["wrong", "right"])
@pytest.mark.parametrize("name", CLASSES)
def test_as_many_cases_as_users_have_say_the_same(ranks, name, kind):
    refuted = judge(ranks, name, kind, None)
    assert (refuted is None) == (kind == "right"), str(refuted)
    assert refuted is None or refuted.mistakes[:1] == (name,), str(refuted)


def rows_of(report: str, columns: Iterable[str]) -> dict[str, set[str]]:
    """Of a report's table: column -> the marks in it. Nothing where the report has no table."""
    lines = report.splitlines()
    head = next((i for i, line in enumerate(lines) if sum(f"  {column}" in line for column in columns) > 1), None)
    if head is None:
        return {}
    found: dict[str, set[str]] = {}
    for column in columns:
        place = lines[head].find(f"  {column}")
        if place >= 0:
            marks = {line[place + 2 : place + 5].strip() for line in lines[head + 1 :]}
            found[column] = marks & {"yes", "NO", "-"}
    return found


def test_every_class_has_a_page_and_every_page_a_class():
    assert [page.stem for page in mistakes.pages()] == [*CLASSES]


@pytest.mark.parametrize("name", CLASSES)
def test_a_page_has_both_programs_and_says_what_the_class_says(name):
    text = page_of(name)
    assert text.startswith(f"# {name}\n")
    assert [block.title for block in blocks(PAGES / f"{name}.md", "python")] == ["wrong.py", "right.py"]
    words = " ".join(text.split()).lower()
    assert CLASSES[name].title.lower() in words
    assert CLASSES[name].advice.lower() in words


def test_the_index_has_a_row_for_each_page_as_the_page_begins():
    written = mistakes.INDEX.read_text()
    assert mistakes.index() == written, "run `python tests/docs/mistakes.py`, which writes the rows"
    for name, known in CLASSES.items():
        assert written.count(f"\n| [{name}]({name}.md) | {known.title} | ") == 1


def test_the_site_has_all_pages_of_mistakes():
    site = (ROOT / "mkdocs.yml").read_text()
    assert "\nnot_in_nav: |\n  /classes/*.md\n" in site and "  - Mistakes: classes/README.md" in site
