"""The pages of the classes of mistakes: the wrong program of each is refuted by its name, and the right one passes."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from mgpu_check.mistakes.catalogue import CLASSES
from tests.docs.pages import MISTAKES, blocks, first_files

if TYPE_CHECKING:
    from tests.warm import Template

PAGES = MISTAKES
KINDS = ("wrong", "right")
FEW = {"wrong": {}, "right": {"max_examples": 8}}  # the right ones with one case of each kind, and not 24 in all
LONGEST = 900  # seconds for all pages

# How a program is handed to the gate, by the function that it is written for.
CALLS = {
    "make_loader": "assert_loader_covers(ranks, make_loader)",
    "train": "assert_resume_continues(ranks, train)",
    "evaluate": "assert_evaluation_agrees(ranks, step, build=build, batch=batch, evaluate=evaluate)",
    "step": "assert_step_scales(ranks, step, build=build, batch=batch, **options)",
}

# What else a program may define, for `assert_step_scales`.
OPTIONS = ("reference", "sizes", "single_process")

CASE = """

def test_{kind}(ranks):
    import pytest
    from mgpu_check import {function}
    from mgpu_check.errors import ScalingMismatch

    options = {{name: globals()[name] for name in {options} if name in globals()}} | {more}
    refuted = None
    try:
        {call}
    except ScalingMismatch as mismatch:
        refuted = mismatch
    if "{kind}" == "right":
        assert refuted is None, str(refuted)
    else:
        assert refuted is not None, "the gate passes the wrong program"
        with open("{name}.txt", "w") as file:
            file.write(str(refuted))
        assert refuted.mistakes[:1] == ("{name}",), str(refuted)
"""


def page_of(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def programs(name: str) -> dict[str, str]:
    """The programs of a page, each complete: what the right one does not define is as in the wrong one."""
    shown = first_files(PAGES / f"{name}.md")
    wrong, right = shown["wrong.py"], shown["right.py"]
    return {"wrong": wrong, "right": f"{wrong}\n\n{right}"}


def case(name: str, kind: str, more: dict[str, int]) -> str:
    """A test module of the program, and what is to come of it; with `more` options for `assert_step_scales`."""
    program = programs(name)[kind]
    call = next(call for function, call in CALLS.items() if re.search(rf"^def {function}\(", program, re.MULTILINE))
    function = call.partition("(")[0]
    return program + CASE.format(kind=kind, name=name, call=call, function=function, options=OPTIONS, more=more)


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Path:
    """Where all programs have run, in one run with warm ranks, and left their reports, `<class>.txt`, and `out.xml`.

    Workers of pytest-xdist share it: the first that asks runs them.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / "pages"
    with FileLock(shared / "pages.lock"):
        if not (directory / "out.xml").exists():
            cases = {module(name, kind): case(name, kind, FEW[kind]) for name in CLASSES for kind in KINDS}
            _run(template, directory, cases)
    return directory


@pytest.fixture(scope="session")
def verdicts(outcome: Path) -> dict[str, str]:
    return verdicts_in(outcome)


def verdicts_in(outcome: Path) -> dict[str, str]:
    """What came of each program, by the name of its module: its failure, or nothing."""
    found = {}
    for one in ET.parse(outcome / "out.xml").getroot().iter("testcase"):
        trouble = [*one.iter("failure"), *one.iter("error"), *one.iter("skipped")]
        found[str(one.get("classname")).removeprefix("test_")] = "\n".join(problem.text or "" for problem in trouble)
    return found


def _run(template: Template, directory: Path, cases: dict[str, str]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings =\n    error\n")
    for name, code in cases.items():
        (directory / f"test_{name}.py").write_text(code)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MGPU_CHECK_", "PYTEST_")) and name != "CI"
    }
    options = ("--gpus=4", "--simulate", "--rank-timeout=60", "--hypothesis-seed=0", "--junitxml=out.xml")
    with (directory / "output").open("w+b") as output:
        ran = template.popen(
            ("-q", "-p", "no:cacheprovider", *options),
            environment,
            output.fileno(),
            output.fileno(),
            directory=directory,
        )
        try:
            ran.wait(LONGEST)
        finally:
            ran.kill()
    assert (directory / "out.xml").exists(), (directory / "output").read_text()


def module(name: str, kind: str) -> str:
    return f"{name.replace('-', '_')}_{kind}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLASSES)
def test_the_program_of_a_page(verdicts, name, kind):
    verdict = verdicts[module(name, kind)]
    assert not verdict, verdict


@pytest.mark.slow
def test_right_programs_pass_as_many_cases_as_users_have(template, tmp_path):
    cases = {name: case(name, "right", {}) for name in CLASSES}
    _run(template, tmp_path, {module(name, "right"): code for name, code in cases.items()})
    verdicts = verdicts_in(tmp_path)
    assert len(verdicts) == len(CLASSES) and not any(verdicts.values()), verdicts


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


@pytest.mark.parametrize("name", CLASSES)
def test_the_table_of_a_page_is_that_of_its_report(outcome, name):
    shown = re.search(r"^## How it shows\n\n\| (.*) \|\n\|[-|]+\n\| (.*) \|$", page_of(name), re.MULTILINE)
    assert shown is not None
    table = dict(zip(shown[1].split(" | "), shown[2].split(" | "), strict=True))
    seen = rows_of((outcome / f"{name}.txt").read_text(), table)
    assert seen or "-" in table.values()  # a rank has died, and nothing could be compared
    wrong = {column for column, marks in seen.items() if "NO" in marks}
    assert wrong == {column for column in seen if table[column] == "NO"}


def test_every_class_has_a_page_and_every_page_a_class():
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_a_page_has_both_programs_and_says_what_the_class_says(name):
    text = page_of(name)
    assert text.startswith(f"# {name}\n")
    assert [block.title for block in blocks(PAGES / f"{name}.md", "python")] == ["wrong.py", "right.py"]
    words = " ".join(text.split()).lower()
    assert CLASSES[name].title.lower() in words
    assert CLASSES[name].advice.lower() in words


def test_the_index_has_a_row_for_each_page():
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| (.+?) \| (.+?) \|$", (PAGES / "README.md").read_text(), re.MULTILINE)
    assert [(name, link, title) for name, link, title, _ in rows] == [
        (name, f"{name}.md", known.title) for name, known in CLASSES.items()
    ]
