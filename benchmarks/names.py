"""Measure how far the first name of a refuted program can be trusted.

    python benchmarks/names.py [--pages] [--examples] [--divided=60] [--truth=TRUTH.toml DIRECTORY ...] [--json=FILE]

The programs have one mistake each, and their author says which:

- pages: the wrong programs of the pages of mistakes;
- examples: wrong programs of the project's tests whose mistakes are near others;
- divided: drawn programs whose model is divided among ranks, with a planted mistake (see `divided.py`);
- directories of tests that call a gate. The file given by ``--truth`` has a line for each: ``"file.py" = ["name"]``,
  with the names that are right, the best first. An empty list says that no known name fits, so that each name is wrong.
  Tests whose names contain ``fixed`` or ``right`` are right programs.

For each source, the table counts the programs that passed falsely, and those whose first name is right, wrong or
absent. Each program that was not named rightly follows. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "classes"
_REQUEST = "BENCH_NAMES"

# The names of planted mistakes; any name for another one is wrong.
PLANTED = {
    "scaled by the size of an axis": ["world-size-factor"],
    "gradients not reduced": ["gradients-not-synchronized"],
    "one gradient not reduced": ["gradients-not-synchronized"],
    "reduced over all ranks": ["wrong-process-group"],
    "reduced over the other axis": ["wrong-process-group"],
    "norms and biases not reduced": ["gradients-not-synchronized"],
    "another learning rate": ["decision-per-rank", "optimizer-differs"],  # on some ranks, as the next two
    "never steps": ["decision-per-rank", "optimizer-differs", "value-of-one-rank"],
    "stale replica": ["decision-per-rank", "value-of-one-rank"],
    "parameter groups lost": ["optimizer-differs"],
    "bias added on every rank": ["partial-result-added-on-every-rank"],
    "gradient of the input not reduced": ["gradient-cut-by-collective"],
    "positions restart": ["positions-restart"],
    "gradients of experts divided": ["expert-gradients-factor", "world-size-factor"],
    "auxiliary loss times the world": ["loss-term-factor"],
    "tied weights not summed": ["gradients-not-synchronized"],
    "replicas take the same samples": ["dataset-not-split", "samples-missed"],
    "sum in place of a mean": ["world-size-factor", "wrong-reduction"],
}


@dataclass(frozen=True)
class Named:
    """A program and what was said of it.

    Attributes:
        source: the kind of programs that it belongs to.
        program: the name of the file or page.
        truth: the right names; empty if no known name fits; None for a right program.
        outcome: "refuted", "passed", or the class of another error.
        names: the mistakes that the report names, the likeliest first.
        text: the report.
    """

    source: str
    program: str
    truth: Sequence[str] | None
    outcome: str
    names: Sequence[str]
    text: str

    @property
    def verdict(self) -> str:
        """The column of the table that counts the program."""
        if self.truth is None:
            return "right" if self.outcome == "passed" else "false alarm"
        if self.outcome != "refuted":
            return "missed"
        if not self.names:
            return "unnamed"
        return "right" if self.names[0] in self.truth else "wrong"


# pytest runs this file as a plugin, which writes what each test raised


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "call":
        error = call.excinfo.value if call.excinfo else None
        said = {
            "file": item.path.name,
            "directory": item.path.parent.name,
            "test": item.name,
            "outcome": _outcome(error),
            "names": list(getattr(error, "mistakes", ())),
            "text": str(error or "")[:6000],
        }
        with open(os.environ[_REQUEST], "a") as file:
            file.write(json.dumps(said) + "\n")
    return report


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "passed"
    return "refuted" if hasattr(error, "mistakes") else type(error).__name__


_PAGE_TESTS = """\
import pytest
from tests.gates.pages import judge

@pytest.mark.parametrize("name", {names})
@pytest.mark.parametrize("kind", ["wrong"])
def test_page(ranks, name, kind):
    if error := judge(ranks, name, kind, None):
        raise error
"""

_EXAMPLE_TESTS = """\
import functools
import pytest
from mgpu_check import assert_step_scales
from tests.gates.diagnosed import mlp, regression
from tests.gates.test_diagnosis import PROGRAMS

@pytest.mark.parametrize(("step", "reference", "mistake", "parting"), PROGRAMS)
def test_example(ranks, step, reference, mistake, parting, request):
    request.node.name = f"{{step.__name__}} {{mistake}}"
    options = dict(build=mlp, batch=regression, reference=reference, sizes=4)
    assert_step_scales(ranks, functools.partial(step, wrong=True), max_examples=1, **options)
"""

_DIVIDED_TESTS = """\
import pytest
from divided import wrong_one
from programs.divided import WAYS, arguments_of
from mgpu_check import assert_step_scales

@pytest.mark.gpus(8)
@pytest.mark.parametrize("number", range({count}))
def test_program(ranks, number, request):
    program = wrong_one(number, {seed}, tuple(WAYS))
    request.node.name = program.plant.name
    assert_step_scales(ranks, **arguments_of(program))
"""


def _run(paths: Sequence[Path], gpus: int) -> list[dict[str, Any]]:
    """Run these files in pytest, and return a record of each test."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out.jsonl")
        out.touch()
        options = ["-o", f"pythonpath={HERE} {HERE.parent}", "-o", "addopts=", "-o", "filterwarnings=", "-p", "names"]
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--tb=no", f"--gpus={gpus}", "--simulate"),
                *("-p", "no:cacheprovider", "-c", "/dev/null", *options, *map(str, paths)),
            ],
            env=os.environ | {_REQUEST: str(out), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
            check=False,
        )
        return [json.loads(line) for line in out.read_text().splitlines()]


def _of_tests(template: str, gpus: int, **values: object) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "test_names.py")
        path.write_text(template.format(**values))
        return _run([path], gpus)


def of_pages() -> list[Named]:
    names = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README")
    return [
        Named("pages", name, [name], said["outcome"], said["names"], said["text"])
        for said in _of_tests(_PAGE_TESTS, 4, names=names)
        for name in [said["test"].partition("-")[2].rstrip("]")]
    ]


def of_examples() -> list[Named]:
    return [
        Named("examples", name, [truth], said["outcome"], said["names"], said["text"])
        for said in _of_tests(_EXAMPLE_TESTS, 2)
        for name, truth in [said["test"].split()]
    ]


def of_divided(count: int, seed: int) -> list[Named]:
    return [
        Named("divided", said["test"], PLANTED.get(said["test"], []), said["outcome"], said["names"], said["text"])
        for said in _of_tests(_DIVIDED_TESTS, 8, count=count, seed=seed)
    ]


def of_directories(directories: Sequence[Path], truth: Mapping[str, Sequence[str]]) -> list[Named]:
    files = [path for directory in directories for path in sorted(directory.glob("*.py")) if path.name in truth]
    return [
        Named(
            said["directory"],
            f"{said['file']}::{said['test']}",
            None if "fixed" in said["test"] or "right" in said["test"] else truth[said["file"]],
            said["outcome"],
            said["names"],
            said["text"],
        )
        for said in _run(files, 4)
    ]


def table(programs: Sequence[Named]) -> list[str]:
    """Return the counts of each source, and the programs that were missed or named wrongly."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for program in programs:
        source = program.source if program.truth is not None else f"{program.source}, right programs"
        counts[source][program.verdict] += 1
        counts["all" if program.truth is not None else "all right programs"][program.verdict] += 1
    columns = ("right", "wrong", "unnamed", "missed", "false alarm")
    lines = [f"| programs | number | {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) + 1)]
    for source, count in sorted(counts.items(), key=lambda row: row[0].startswith("all")):
        lines.append(f"| {source} | {count.total()} | {' | '.join(str(count[name]) for name in columns)} |")
    for program in programs:
        if program.verdict != "right":
            truth = "passes" if program.truth is None else " or ".join(program.truth) or "no known name"
            said = ", ".join(program.names) or program.outcome
            lines.append(f"{program.verdict}: {program.source} {program.program}: {said}; true: {truth}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="the wrong programs of the pages of mistakes")
    parser.add_argument("--examples", action="store_true", help="wrong programs of the tests")
    parser.add_argument("--divided", type=int, default=0, metavar="N", help="number of drawn divided programs")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn programs")
    parser.add_argument("--truth", type=Path, help="the right names of the programs of the directories, as TOML")
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--json", type=Path, help="write what was said of each program to this file")
    arguments = parser.parse_args()
    if bool(arguments.directories) != bool(arguments.truth):
        parser.error("--truth and directories belong together; give both")
    programs = of_pages() if arguments.pages else []
    if arguments.examples:
        programs += of_examples()
    if arguments.divided:
        programs += of_divided(arguments.divided, arguments.seed)
    if arguments.directories:
        truth = tomllib.loads(arguments.truth.read_text())
        programs += of_directories(arguments.directories, truth)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(asdict(program)) + "\n" for program in programs))
    print("\n".join(table(programs)))
    return int(any(program.verdict in ("wrong", "missed", "false alarm") for program in programs))


if __name__ == "__main__":
    sys.exit(main())
