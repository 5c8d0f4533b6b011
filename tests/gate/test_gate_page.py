"""What docs/gate.md shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "gate.md"
GPUS = ("-p", "no:cacheprovider", "--gpus=4", "--simulate", "--hypothesis-seed=0")


def blocks(language: str) -> list[str]:
    """The fenced blocks of that language, in order."""
    parts = re.split(r"^```(.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    return [block for opening, block in zip(parts[1::4], parts[2::4], strict=True) if opening == language]


def of_any_version(line: str) -> str:
    """Without pytest's margin, and without digits that depend on how torch rounds."""
    line = re.sub(r"element \[.*$", "element", line)  # the worst one is another with another torch
    return re.sub(r"\s+", " ", re.sub(r"-?\d+\.\d+(e-\d+)?|\d+e-\d+|--+", "#", re.sub(r"^E\b", "", line))).strip()


def test_the_first_step_is_refuted_as_shown(pytester, monkeypatch):
    (shown,) = blocks("")
    pytester.makepyfile(test_train=blocks("python")[0])
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    result = pytester.run("pytest", *GPUS[:4])
    result.assert_outcomes(failed=1)
    printed = [of_any_version(line) for line in result.outlines]
    wanted = [of_any_version(line) for line in shown.splitlines()]
    start = printed.index(wanted[0])
    assert printed[start : start + len(wanted)] == wanted


def test_the_step_that_is_called_right_passes_and_so_do_the_other_examples(run, pytester):
    wrong, right, others = blocks("python")
    before, test = wrong.split("def test_")
    pytester.makepyfile(test_train=f"{before}{right}\n\ndef test_{test}", test_others=others)
    run(*GPUS).assert_outcomes(passed=5)


def test_the_command_of_the_workflow_works_and_leaves_what_it_uploads(pytester, monkeypatch):
    workflow, on_gpus = blocks("yaml")
    for text in (workflow, on_gpus):
        (command,) = re.findall(r"^ +pytest (.*)$", text, re.MULTILINE)
        options = dict(word.partition("=")[::2] for word in shlex.split(command))
        uploaded = re.search(r"path: \|\n((?: +\S+\n)+)", text)
        assert uploaded is not None
        assert set(uploaded[1].split()) == {options["--junitxml"], options["--gpu-report"]}
        assert f'cat {options["--gpu-report"]} >> "$GITHUB_STEP_SUMMARY"' in text
    (command,) = re.findall(r"^ +pytest (.*)$", workflow, re.MULTILINE)
    pytester.makepyfile("def test_it(ranks): assert ranks.run(int) == [0] * 4")
    monkeypatch.setenv("CI", "true")
    result = pytester.runpytest_subprocess(*shlex.split(command))
    result.assert_outcomes(passed=1)
    for name in re.search(r"path: \|\n((?: +\S+\n)+)", workflow)[1].split():
        assert pytester.path.joinpath(name).exists()


@pytest.mark.parametrize("page", ["gate.md", "classes/README.md", "classes/evaluation-differs.md"])
def test_links_between_pages_lead_somewhere(page):
    path = DOCS / page
    for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link
