"""A run that is forked from the template is to itself, and to its test, as one that an interpreter was started for."""

from __future__ import annotations

import os

import pytest


def test_a_run_that_imports_in_another_way_gets_an_interpreter_of_its_own(pytester, template, monkeypatch):
    command = pytester._getpytestargs()
    assert template.fits(command, os.environ)
    assert template.fits(command, {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "what a test has left that compiles"})
    assert not template.fits(("pytest",), os.environ)
    for name in ("PYTHONWARNINGS", "TORCH_LOGS", "OMP_NUM_THREADS"):
        assert not template.fits(command, {**os.environ, name: "3"})


def test_a_forked_run_ends_with_its_threads_and_with_what_was_registered(pytester, warm):
    """Other tests see its exit codes, and the signal that kills it."""
    pytester.makepyfile(
        """
        import atexit, threading
        from pathlib import Path

        def test_late():
            atexit.register(Path("at-exit").touch)
            threading.Timer(0.1, Path("thread").touch).start()
        """
    )
    assert pytester.runpytest_subprocess().ret == pytest.ExitCode.OK
    assert pytester.path.joinpath("at-exit").exists() and pytester.path.joinpath("thread").exists()
