"""`mgpu-check accept`, as a user calls it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., str]

NODE = ("accept", "--gpus=2", "--simulate", "--gpu-level=quick")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("accept", "--gpus=4", "--for=2x"), "--accept-for: '2x' is not valid; choose a time above 0 with its unit"),
        (("accept", "--gpus=4", "--gpu-level=fast"), "choose one of quick, standard, long"),
        (("accept", "--gpus=4", "--memory=2"), "choose a share of the free memory, above 0 and at most 1"),
        (("accept", "--gpus=4", "--report=a.pdf"), "choose a file whose name ends in .html, .json, .md or .xml"),
        (("accept", "--gpus=4", "--plant=x"), "a defect is planted in a simulated node only; add --simulate"),
        ((*NODE, "--plant=no-such-fault"), "'no-such-fault' is no fault of hardware; choose one of"),
        ((*NODE, "-k", "nosuchcheck"), "no check was selected; checks are inventory, memory,"),
        ((*NODE, "-n", "2"), "it uses all GPUs at once, and runs in one process: leave out -n 2"),
        (("accept", "--gpus=9999"), "or simulate them: --gpus=9999 --simulate"),
    ],
    ids=str,
)
def test_a_wrong_call_is_exit_code_4(command: Command, arguments: tuple[str, ...], told: str) -> None:
    text = command(*arguments, code=4)
    assert told in text
    assert "Traceback" not in text


def test_collecting_gives_no_verdict(command: Command) -> None:
    text = command(*NODE, "--collect-only")
    assert "test_memory.py" in text
    assert "ACCEPTED" not in text


def test_what_can_be_planted_is_listed(command: Command) -> None:
    assert command("accept", "--plant=list") is not None


def test_a_check_that_returns_at_once_leaves_the_node_undecided(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check of memory is called, and does nothing: that is no pass."""
    (tmp_path / "idle.py").write_text(
        "from mgpu_check.acceptance.node import Node\n\n"
        "def nothing(*_):\n    return []\n\n"
        "for name in ('on_ranks', 'in_node_process'):\n"
        "    real = getattr(Node, name)\n"
        "    setattr(Node, name, lambda self, check, fn, *args, real=real, **more: real(self, check, nothing, **more))\n"
    )
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p idle")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    text = command(*NODE, "-k", "memory", code=2)
    assert "memory did less than its least work on GPU 0, GPU 1: 0 of " in text
    assert "INCONCLUSIVE" in text
