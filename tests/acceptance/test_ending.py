"""An acceptance that Slurm, Kubernetes or a person ends still gives its verdict and its reports."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.processes.child_processes import EndOnRequest

NODE = ("accept", "--gpus=2", "--simulate", "--gpu-level=quick")

# As Slurm does: all processes of the job get the signal, the ranks first.
END = """
import os, signal, sys
from pathlib import Path

def below(pid):
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(found[1]) == pid:
            yield from below(int(stat.parent.name))
            yield int(stat.parent.name)

def end():
    for pid in [*below(os.getpid()), os.getpid()]:
        os.kill(pid, signal.SIGTERM)
"""
IN_A_CHECK = """
from mgpu_check.acceptance.node import Node

real = Node.on_ranks

def on_ranks(self, check, fn, *args, **more):
    found = real(self, check, fn, *args, **more)
    if check == "memory":
        end()
    return found

Node.on_ranks = on_ranks
"""
IN_A_SECOND_LOOK = """
from mgpu_check.acceptance import verdict

verdict._SecondRun.look = lambda self: end()
"""


Ended = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def ended(command: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Run an acceptance that this code ends; what it has printed, and its report."""

    def ended(code: str, *arguments: str) -> tuple[str, dict[str, Any]]:
        (tmp_path / "ending.py").write_text(END + code)
        monkeypatch.setenv("PYTEST_ADDOPTS", "-p ending")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        text = command(*NODE, *arguments, "--report=node.json", code=130)
        return text, json.loads((tmp_path / "node.json").read_text())

    return ended


@pytest.mark.slow
def test_a_signal_to_the_whole_job_leaves_a_verdict_and_a_report(ended: Ended) -> None:
    text, document = ended(IN_A_CHECK, "-k", "memory or health")
    verdict = document["verdict"]
    assert verdict["kind"] == "INCONCLUSIVE" and verdict["unknown"][0] == "the run was interrupted by SIGTERM"
    assert verdict["accusations"] == [] == verdict["unexplained"]
    assert "INCONCLUSIVE" in text and "written: node.json" in text


@pytest.mark.slow
def test_a_signal_in_second_looks_leaves_the_accusation(ended: Ended) -> None:
    text, document = ended(IN_A_SECOND_LOOK, "--plant=collective-wrong:device=1", "-k", "collectives")
    assert document["verdict"]["kind"] == "REJECTED"
    assert document["verdict"]["unknown"][0] == "the run was interrupted by SIGTERM"
    assert all(check["seconds"] >= 0 for check in document["checks"])
    assert "second looks at failures" in text and "at most 60 s left" in text


def test_a_signal_interrupts_once_and_no_signal_interrupts_the_report() -> None:
    ending = EndOnRequest()
    ending.begin()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert ending.by == "SIGTERM"
    finally:
        ending.end()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_the_parent_ignores_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    ending = EndOnRequest()
    try:
        ending.begin()
        signal.raise_signal(signal.SIGHUP)
        assert ending.by is None
    finally:
        ending.end()
        signal.signal(signal.SIGHUP, kept)
