"""Options of the benchmark of public scripts."""

from __future__ import annotations

from pathlib import Path


def pytest_addoption(parser):
    for name in ("checkouts", "packages"):
        parser.addoption(f"--{name}", type=Path, help=f"directory of the {name} of public scripts")
