"""Shared by the tests of the examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_check import ScalingMismatch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reports", metavar="DIR", help="write there what the gate says of each broken twin")


@pytest.fixture
def refuted(request: pytest.FixtureRequest) -> Callable[[str, ScalingMismatch], str]:
    """``refuted(name, mismatch)``: what the gate takes the mistake for; with --reports the report is written to a
    file."""

    def keep(name: str, mismatch: ScalingMismatch) -> str:
        directory = request.config.getoption("--reports")
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
            Path(directory, f"{name}.txt").write_text(f"{mismatch}\n")
        return mismatch.mistakes[0] if mismatch.mistakes else ""

    return keep
