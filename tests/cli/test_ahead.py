"""Checks that a second process runs ahead of their turn: reported in their place, and only if they have passed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes_with

PROGRAM = """
import sys, pytest
from mgpu_check.cli.ahead import RunAhead
sys.exit(pytest.main(sys.argv[1:], plugins=[RunAhead(fewest=2)]))
"""

# The first test runs in pytest's process, and waits until the last one has begun in the other.
CHECKS = """
import os, pathlib, sys, time, warnings
import pytest

HERE = os.getpid()

def note(name):
    with open(name, "a") as file:
        file.write(f"{os.getpid()}\\n")

def until(name):
    deadline = time.monotonic() + 120
    while not os.path.exists(name):
        assert time.monotonic() < deadline
        time.sleep(0.01)

def test_first():
    note("first")
    until("last")

@pytest.mark.ranks
def test_on_ranks(rank):
    pass

def test_last(record_property, request):
    note("last")
    print("captured")
    {last}
"""


@pytest.fixture
def run(pytester: pytest.Pytester, warm: None) -> Any:
    def run(*arguments: str, last: str = "pass", more: str = "") -> pytest.RunResult:
        pytester.makepyfile(CHECKS.replace("{last}", last) + more)
        return pytester.run(sys.executable, "-c", PROGRAM, "--gpus=2", "--simulate", "-v", *arguments)

    return run


def pids(directory: Path, name: str) -> list[int]:
    return [int(line) for line in (directory / name).read_text().split()]


def test_a_pass_is_reported_in_its_place(pytester, run):
    result = run("-rP", last="record_property('seen', 1)")
    (first,), (last,) = pids(pytester.path, "first"), pids(pytester.path, "last")
    assert first != last
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*::test_first PASSED*", "*::test_on_ranks PASSED*", "*::test_last PASSED*"])
    assert result.stdout.str().count("captured\n") == 1
    result.stdout.fnmatch_lines(["*_ test_last _*", "captured"])


@pytest.mark.parametrize(
    "last",
    [
        "assert os.getpid() == HERE",
        "os.getpid() == HERE or pytest.skip('there')",
        "os.getpid() == HERE or warnings.warn('there')",
        "os.getpid() == HERE or request.addfinalizer(lambda: 1 / 0)",
        "os.getpid() == HERE or os._exit(1)",
    ],
    ids=["failed", "skipped", "warned", "failed at its end", "died"],
)
def test_other_ends_than_a_pass_run_again(pytester, run, last):
    result = run(last=last)
    assert len({*pids(pytester.path, "last")}) == 2
    result.assert_outcomes(passed=3, warnings=0)
    assert result.ret == pytest.ExitCode.OK


def test_a_failure_is_reported_once_and_ends_the_run(pytester, run):
    result = run("-x", last="assert 0, 'wrong'", more="\ndef test_later():\n    pass\n")
    result.assert_outcomes(passed=2, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.stdout.str().count("E       AssertionError: wrong") == 1


def test_what_a_rank_leaves_behind_is_said(run):
    left = """
@pytest.mark.ranks
def test_leaves(rank):
    import threading
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
"""
    result = run(more=left)
    assert "test_leaves left behind" in result.stdout.str()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_survives(pytester, monkeypatch, number):
    pytester.makepyfile(CHECKS.replace("{last}", "time.sleep(3600)").replace('until("last")', "time.sleep(3600)"))
    monkeypatch.setenv("MGPU_AHEAD_TEST", str(pytester.path))
    command = [sys.executable, "-c", PROGRAM, "--gpus=2", "--simulate"]
    with subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while not all((pytester.path / name).exists() for name in ("first", "last")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == pytest.ExitCode.INTERRUPTED
    deadline = time.monotonic() + 60
    while (left := processes_with("MGPU_AHEAD_TEST", str(pytester.path))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == {}


@pytest.mark.parametrize("option", ["-s", "--setup-show", "--hypothesis-show-statistics"])
def test_options_that_need_one_process(pytester, warm, option):
    pytester.makepyfile(CHECKS.replace("{last}", "pass").replace('until("last")', "pass"))
    pytester.run(sys.executable, "-c", PROGRAM, "--gpus=2", "--simulate", option).assert_outcomes(passed=3)
    assert pids(pytester.path, "first") == pids(pytester.path, "last")
