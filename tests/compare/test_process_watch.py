"""Processes of a script: those that it starts can import what watches them, and the one that is waited for is known."""

from __future__ import annotations

import functools
import os
import struct
import sys
import tempfile

import pytest

from mgpu_check.compare import process_watch
from mgpu_check.compare.process_watch import entered
from mgpu_check.processes import collective_records
from mgpu_check.torch_hooks.patches import around


class Failed(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_the_package_is_on_the_path_that_a_started_process_is_sent(monkeypatch, there, fails):
    others = [path for path in sys.path if path != process_watch._HOME]
    before = [*others, *([process_watch._HOME] if there else [])]
    monkeypatch.setattr(sys, "path", list(before))
    sent = []

    def launch(popen, process):
        sent.append((popen, list(sys.path), process.name))
        if fails:
            raise Failed
        return "launched"

    process = type("Process", (), {"name": "worker"})()
    watched = around(functools.partial(process_watch._with_watch, 3))(launch)
    if fails:
        with pytest.raises(Failed):
            watched("popen", process)
    else:
        assert watched("popen", process) == "launched"
    assert sent == [("popen", [*others, process_watch._HOME], "worker")]
    assert sys.path == before


def test_what_a_process_has_written_is_read():
    with tempfile.TemporaryFile(buffering=0) as file:
        assert entered(file.fileno()) == (0, 0), "it has not come to torch yet"
        os.ftruncate(file.fileno(), collective_records.SIZE)
        os.pwrite(file.fileno(), collective_records.HEADER.pack(3), 0)
        assert entered(file.fileno()) == (0, 3)
        os.pwrite(file.fileno(), struct.pack("=Q", 7), collective_records.SIZE)
        assert entered(file.fileno()) == (7, 3)


def test_those_with_the_fewest_are_waited_for():
    assert collective_records.fewest({0: 3, 2: 2, 3: 2}) == [2, 3]
    assert collective_records.fewest({0: (8, 3), 1: (8, 2)}) == [1]
    assert collective_records.fewest({0: (7, 9), 1: (8, 2)}) == [0], "of those in C++ first: all are counted, if later"
