"""The programs of the README and the pages give the results that are shown."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, MISTAKES, ROOT, all_pages, blocks, first_files, last_files

GPUS = ("--gpus=4", "--simulate")
README = ROOT / "README.md"
TUTORIAL = DOCS / "tutorial.md"
WRITE_TESTS = DOCS / "how-to" / "write-tests.md"
CI = DOCS / "how-to" / "ci.md"
COMPARE = DOCS / "how-to" / "compare.md"

Run = Callable[..., pytest.RunResult]


def of_any_version(line: str) -> str:
    """Without pytest's margin, and without digits that depend on versions and on how torch rounds."""
    line = re.sub(r"element \[.*$", "element", line)  # the worst one is another with another torch
    line = re.sub(r"^\S+ -m pytest", "pytest", re.sub(r"--gpu-replay=[\d.]+:", "--gpu-replay=", line))
    return re.sub(r"\s+", " ", re.sub(r"-?\d+\.\d+(e-\d+)?|\d+e-\d+|--+", "#", re.sub(r"^E\b", "", line))).strip()


def assert_shows(result: pytest.RunResult, shown: str) -> None:
    """Assert that the run printed these lines, one after the other."""
    # The pages leave out the last line of a report, the cost of its diagnosis.
    printed = [of_any_version(line) for line in result.outlines if not re.match(r"(E +|  )diagnosis: ", line)]
    wanted = [of_any_version(line) for line in shown.splitlines()]
    assert wanted[0] in printed
    start = printed.index(wanted[0])
    assert printed[start : start + len(wanted)] == wanted


def write(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def test_programs_that_fail_are_reported_as_shown(run: Run, pytester: pytest.Pytester) -> None:
    """Those of the README, the gate of the tutorial, and a property on every rank."""
    readme = first_files(README)
    write(
        pytester.path,
        {
            **first_files(TUTORIAL),  # its other test files come later on the page
            "test_readme.py": readme.pop("test_train.py"),
            **readme,
            "test_mean.py": first_files(WRITE_TESTS)["test_mean.py"],
        },
    )
    result = run(*GPUS, "test_train.py", "test_readme.py", "test_mean.py", *readme)
    result.assert_outcomes(failed=4, passed=2)
    (of_readme,), (_, of_gate) = blocks(README, ""), blocks(TUTORIAL, "")
    of_property = next(block for block in blocks(WRITE_TESTS, "") if "test_mean_over_ranks[ranks=2]" in block.text)
    for block in (of_readme, of_gate, of_property):
        assert_shows(result, block.text)


@pytest.mark.parametrize("command", ["model", pytest.param("simulate", marks=pytest.mark.slow)])
def test_the_commands_of_the_tutorial_do_what_it_says(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The others are pip's, and pytest's, which the gate is run with above, and in the end below."""
    install, *commands, gate = (block.text.strip() for block in blocks(TUTORIAL, "sh"))
    assert "pip install" in install and gate == " ".join(["pytest", *GPUS])
    shown = {"model": (1, blocks(TUTORIAL, "text")[0].text), "simulate": (0, blocks(TUTORIAL, "")[0].text)}
    assert [line.split()[:2] for line in commands] == [["mgpu-check", name] for name in shown]
    write(pytester.path, first_files(TUTORIAL))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # has torchrun
    (line,) = (line for line in commands if command in line.split())
    ran = pytester.run(sys.executable, "-m", "mgpu_check", *shlex.split(line)[1:])
    code, text = shown[command]
    assert ran.ret == code
    assert_shows(ran, text)


@pytest.mark.slow
def test_ranks_that_part_ways_are_reported_as_shown(run: Run, pytester: pytest.Pytester) -> None:
    write(
        pytester.path,
        {
            "train.py": (Path(__file__).with_name("programs.py")).read_text(),
            "test_step.py": "import pytest, train\n"
            "@pytest.mark.ranks(4)\ndef test_step(rank): train.step(rank)\n"
            "@pytest.mark.ranks(4)\ndef test_evaluate(rank): train.evaluate(rank)\n"
            "@pytest.mark.ranks(4)\ndef test_crash(rank): train.crash(rank)\n",
        },
    )
    result = run(*GPUS, "--rank-timeout=5")
    result.assert_outcomes(failed=3)
    for block in blocks(WRITE_TESTS, "")[1:]:
        assert_shows(result, block.text)


WEEKLY = {DOCS / "how-to" / f"gate-{name}.md" for name in ("model-parallel", "recovery", "reinforcement-learning")}
"""Their gates have tests for each day, in tests/gates/test_divided.py, test_survival.py and test_engines.py."""
MEGATRON = DOCS / "how-to" / "megatron.md"
FEW_EXAMPLES = """
from hypothesis import settings
from mgpu_check.gates import step_gate

step_gate._EXAMPLES = 2
settings.register_profile("few", max_examples=5)
settings.load_profile("few")
"""


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(set(DOCS.rglob("*.md")) - WEEKLY, id="most"),
        pytest.param(WEEKLY, id="weekly", marks=pytest.mark.slow),
    ],
)
def test_all_other_examples_pass(run: Run, pytester: pytest.Pytester, pages: set[Path]) -> None:
    """Run the final program of the tutorial, and those of other pages, in one run."""
    pytester.makeconftest(FEW_EXAMPLES)
    # tests/compare runs those of the page about scripts.
    failing = {(WRITE_TESTS, "test_mean.py"), (COMPARE, "train.py"), (COMPARE, "test_script.py")}
    tests = 0
    for page in sorted(pages):
        # Run by tests/gates/test_pages.py, and with Megatron Core by benchmarks/clients.
        if page.parent == MISTAKES or page == MEGATRON:
            continue
        files = {name: text for name, text in last_files(page).items() if (page, name) not in failing}
        assert all(name.endswith(".py") for name in files), (
            f"{page}: a block of Python needs the name of a file, as title"
        )
        write(pytester.path / page.stem, files)
        tests += sum(text.count("def test_") for text in files.values())
    run(*GPUS).assert_outcomes(passed=tests)


def test_the_command_of_the_workflow_works_and_leaves_what_it_uploads(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow, on_gpus = (block.text for block in blocks(CI, "yaml") if "upload-artifact" in block.text)
    for text in (on_gpus, workflow):
        (command,) = re.findall(r"^ +pytest (.*)$", text, re.MULTILINE)
        options = dict(word.partition("=")[::2] for word in shlex.split(command))
        (uploaded,) = re.findall(r"path: \|\n((?: +\S+\n)+)", text)
        assert set(uploaded.split()) == {options["--junitxml"], options["--gpu-report"]}
        assert f'cat {options["--gpu-report"]} >> "$GITHUB_STEP_SUMMARY"' in text
    pytester.makepyfile("def test_it(ranks): assert ranks.run(int) == [0] * 4")
    monkeypatch.setenv("CI", "true")
    run(*shlex.split(command)).assert_outcomes(passed=1)
    for name in uploaded.split():
        assert pytester.path.joinpath(name).exists()


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    for link in re.findall(r"https://github.com/mgpu-check/mgpu-check/(?:blob|tree)/main/([^)\s>#]+)", text):
        assert (ROOT / link).exists(), link
