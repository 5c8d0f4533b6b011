"""Torch does not require NumPy, and neither do the gates."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.slow
def test_gates(run, pytester, monkeypatch):
    package = pytester.mkdir("elsewhere").joinpath("numpy")
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise ModuleNotFoundError('No module named numpy', name='numpy')\n")
    path = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    # A new interpreter, because the template of forked runs has imported NumPy.
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name in ("without_numpy", "loading"):
        shutil.copy(PROGRAMS / f"{name}.py", pytester.path / f"test_{name}.py")
    result = run("--gpus=2", "--simulate", "--rank-timeout=60")
    result.assert_outcomes(passed=5, failed=1)
    # Errors of ranks say in pytest's report what the gate was at.
    result.stdout.fnmatch_lines(["*ZeroDivisionError*", "while checking the loader at world size 1, 2 epochs"])
