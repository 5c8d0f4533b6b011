"""The examples: all pass, and the gate fails for each broken twin with the report in its file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "examples" / "reports"
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?|-?\d+e[+-]\d+")


def shape(report: str) -> str:
    """A report without what differs between machines: values to two digits, which elements, paths, the cost."""
    report = re.sub(r"^ *diagnosis: .*\n", "", report, flags=re.MULTILINE)
    report = re.sub(r"element \[[\d, ]*\]: got .*$", "element", report, flags=re.MULTILINE)
    report = re.sub(r"[\w./-]*/(?=\w+\.py:\d+)", "", report)
    return NUMBER.sub(lambda number: f"{float(number[0]):.1e}", report)


@pytest.fixture
def examples(pytester: pytest.Pytester) -> Path:
    """A copy of the examples alone, as somebody has it who installed mgpu-check."""
    copy = pytester.path / "examples"
    shutil.copytree(ROOT / "examples", copy, ignore=shutil.ignore_patterns("reports", "__pycache__"))
    return copy


EXAMPLES = sorted(path.stem for path in (ROOT / "examples" / "broken").glob("[!_]*.py"))


@pytest.mark.slow  # tests/docs/test_examples.py has reports of the README and of the tutorial each day
def test_examples_pass_and_their_twins_are_refuted_as_reported(
    run: Callable[..., pytest.RunResult], examples: Path
) -> None:
    written = examples / "written"
    tests = [str(examples / f"test_{name}.py") for name in EXAMPLES]
    result = run("--gpus=4", "--simulate", f"--reports={written}", *tests)
    assert result.ret == 0, result.stdout.str()
    assert {report.stem for report in written.iterdir()} == set(EXAMPLES)
    for report in written.iterdir():
        assert shape(report.read_text()) == shape((REPORTS / report.name).read_text())


@pytest.mark.slow
def test_three_axes_need_eight_gpus(run: Callable[..., pytest.RunResult], examples: Path) -> None:
    result = run("--gpus=8", "--simulate", "-k", "scales", str(examples / "test_transformer_3d.py"))
    assert result.ret == 0, result.stdout.str()


def test_there_is_a_test_and_a_report_of_each_broken_twin() -> None:
    assert {path.stem for path in REPORTS.iterdir()} == set(EXAMPLES)
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "examples").glob("test_*.py")}
    assert tests == set(EXAMPLES)


def test_a_report_is_told_from_another() -> None:
    report = (REPORTS / "lenet_by_hand.txt").read_text()
    assert shape(report) == shape(report.replace("got -0", "got -1"))
    assert shape(report) != shape(report.replace("  NO  ", "  yes ", 1))
    assert shape(report) != shape(report.replace("world-size-factor", "stale-gradients"))


def test_the_readme_names_every_example() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    files = {path.name for path in (ROOT / "examples").glob("*.py")} - {"conftest.py"}
    trained = {name for name in files if not name.startswith("test_")}
    assert files == trained | {f"test_{name}" for name in trained}
    assert {name for name in trained if f"]({name})" in text} == trained
