"""Recognize tests of the packages that come with this one, and the words that run them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

SUITE = "mgpu_check.suite"

_COMMANDS = {SUITE: (), "mgpu_check.acceptance": ("accept",)}
"""Packages of tests, with the words after `mgpu-check` that run them."""

_NOT_OF_RANKS = re.compile(r"test_.*|.*strategies|faults")
"""Names of modules and folders of a property that only the pytest process imports, or only a rank with a fault."""


def package_of(item: pytest.Item) -> str:
    """Return the package that has the test: `SUITE`, another one, or "" for a test of the user."""
    module = getattr(getattr(item, "module", None), "__name__", "")
    return next((package for package in _COMMANDS if module.startswith(f"{package}.")), "")


def is_packaged(item: pytest.Item) -> bool:
    """Return whether a test is a check of the packaged suite."""
    return package_of(item) == SUITE


def command_of(package: str) -> tuple[str, ...]:
    """Return the words after `mgpu-check` that run a packaged suite."""
    return _COMMANDS[package]


def used_by_ranks(items: Iterable[pytest.Item]) -> list[str]:
    """Return the modules of the suite that ranks import for these tests."""
    return modules_of_ranks(item.path for item in items if is_packaged(item))


def modules_of_ranks(tests: Iterable[Path]) -> list[str]:
    """Return the modules that ranks import for these test files of the suite: those in the folders of their
    properties."""
    modules = []
    for folder in sorted({path.parent for path in tests}):
        for file in sorted(folder.rglob("*.py")):
            segments = file.relative_to(folder).with_suffix("").parts
            if not any(map(_NOT_OF_RANKS.fullmatch, segments)) and segments[-1] != "__init__":
                modules.append(".".join((SUITE, folder.name, *segments)))
    return modules
