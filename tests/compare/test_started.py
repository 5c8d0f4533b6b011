"""Processes that a script starts: they must be able to import what watches them."""

from __future__ import annotations

import functools
import sys

import pytest

from mgpu_check.compare import process_watch
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
