"""The program that runs what does not depend on each other at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("side_by_side.py")


def run(directory: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *lines]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=60)


def test_they_run_at_the_same_time_and_are_shown_in_order(tmp_path):
    """Each waits for the other, and the first ends last."""
    os.mkfifo(tmp_path / "there")
    os.mkfifo(tmp_path / "back")
    ran = run(
        tmp_path,
        "sh -c 'echo hello > there; cat back' && echo first",
        "sh -c 'cat there; echo bye > back; echo second'",
    )
    lines = [line for line in ran.stdout.splitlines() if not line.startswith(("$", "#"))]
    assert (ran.returncode, lines) == (0, ["bye", "first", "hello", "second"])


@pytest.mark.parametrize("line", ["true && sh -c 'exit 3' && echo on", "no-such-command && echo on"])
def test_one_that_fails_ends_its_sequence_and_no_other(tmp_path, line):
    ran = run(tmp_path, line, "echo other")
    assert ran.returncode == 1
    assert "\nother\n" in ran.stdout and "\non\n" not in ran.stdout
    (told,) = ran.stderr.splitlines()
    assert told.startswith(
        "FAILED: sh -c 'exit 3': exit code 3 after" if "exit" in line else "FAILED: no-such-command: exit code 127"
    )
