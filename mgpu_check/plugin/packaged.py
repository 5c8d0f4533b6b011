"""Recognize tests of the packages that come with this one, and the words that run them."""

from __future__ import annotations

import pytest

__all__ = ["SUITE", "command_of", "package_of"]

SUITE = "mgpu_check.suite"

_COMMANDS = {SUITE: (), "mgpu_check.acceptance": ("accept",)}
"""Packages of tests, with the words after `mgpu-check` that run them."""


def package_of(item: pytest.Item) -> str:
    """Return the package that has the test: `SUITE`, another one, or "" for a test of the user."""
    module = getattr(getattr(item, "module", None), "__name__", "")
    return next((package for package in _COMMANDS if module.startswith(f"{package}.")), "")


def command_of(package: str) -> tuple[str, ...]:
    """Return the words after `mgpu-check` that run a packaged suite."""
    return _COMMANDS[package]
