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
        pytest.param("os.getpid() == HERE or pytest.skip('there')", id="skipped", marks=pytest.mark.slow),
        pytest.param("os.getpid() == HERE or warnings.warn('there')", id="warned"),
        pytest.param("os.getpid() == HERE or os._exit(1)", id="died"),
    ],
)
def test_other_ends_than_a_pass_run_again(pytester, run, last):
    result = run(last=last)
    assert len({*pids(pytester.path, "last")}) == 2
    result.assert_outcomes(passed=3, warnings=0)
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("last", "outcomes"),
    [
        ("assert os.getpid() == HERE, 'there'", {"passed": 2, "failed": 1}),
        pytest.param(
            *("os.getpid() == HERE or request.addfinalizer(lambda: 1 / 0)", {"passed": 3, "errors": 1}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["call", "teardown"],
)
def test_a_failure_that_does_not_repeat_is_reported(pytester, run, last, outcomes):
    result = run(last=last)
    assert len({*pids(pytester.path, "last")}) == 2
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(["failed in a second process, and passed when it was repeated here"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_examples_are_drawn_again(pytester, run):
    drawn = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=3, database=None)
@given(st.integers())
def test_drawn(number):
    note(f"drawn-{os.getpid()}")
    with open(f"numbers-{os.getpid()}", "a") as file:
        file.write(f"{number}\\n")
    assert os.getpid() == HERE
"""
    run(more=drawn)
    second, first = sorted(pytester.path.glob("numbers-*"), key=lambda path: len(path.read_text().split()))
    assert second.read_text().split()[0] == first.read_text().split()[0]


def test_a_failure_is_reported_once_and_ends_the_run(pytester, run):
    result = run("-x", last="assert 0, 'wrong'", more="\ndef test_later():\n    pass\n")
    result.assert_outcomes(passed=2, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.stdout.str().count("E       AssertionError: wrong") == 1


@pytest.mark.slow
def test_what_a_rank_leaves_behind_is_said(run):
    left = """
@pytest.mark.ranks
def test_leaves(rank):
    import threading
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
"""
    result = run(more=left)
    assert result.stdout.str().count("test_leaves left behind") == 1


def test_a_rank_that_dies_idle_fails_the_run(run):
    dies = """
def test_kills():
    pid = pathlib.Path("pid").read_text()
    os.kill(int(pid), 9)
    deadline = time.monotonic() + 120
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)

@pytest.mark.ranks(1)
def test_pid(rank):
    pathlib.Path("pid").write_text(str(os.getpid()))
"""
    result = run(more=dies)
    result.assert_outcomes(passed=5)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*rank 0* died *test_pid*"])


def test_without_a_second_process_all_checks_run_here(pytester, warm):
    pytester.makepyfile(CHECKS.replace("{last}", "pass").replace('until("last")', "pass"))
    program = "import os\ndef fork(): raise BlockingIOError(11, 'no more processes')\nos.fork = fork\n" + PROGRAM
    pytester.run(sys.executable, "-c", program, "--gpus=2", "--simulate").assert_outcomes(passed=3)
    assert pids(pytester.path, "first") == pids(pytester.path, "last")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
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


@pytest.mark.parametrize(
    "option",
    [
        "-pno:capture",
        *(pytest.param(option, marks=pytest.mark.slow) for option in ("-s", "--timeout=60", "-olog_cli=true")),
    ],
)
def test_options_that_need_one_process(pytester, warm, option):
    pytester.makepyfile(CHECKS.replace("{last}", "pass").replace('until("last")', "pass"))
    pytester.run(sys.executable, "-c", PROGRAM, "--gpus=2", "--simulate", option).assert_outcomes(passed=3)
    assert pids(pytester.path, "first") == pids(pytester.path, "last")
