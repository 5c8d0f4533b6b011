"""Recognize tests of the applications that come with this package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from mgpu_check.applications import Application, application_of


def suite_of(item: pytest.Item) -> Application | None:
    """Return the application that has the test; None for a test of the user."""
    return application_of(getattr(getattr(item, "module", None), "__name__", ""))


def is_packaged(item: pytest.Item) -> bool:
    """Return whether a test is a check of a packaged suite: what it runs is the application's, not the user's."""
    suite = suite_of(item)
    return suite is not None and suite.frames == "check"


def used_by_ranks(items: Iterable[pytest.Item]) -> list[str]:
    """Return the modules that ranks import for those of these tests that come with this package."""
    tests: dict[Application, list[Path]] = {}
    for item in items:
        if (suite := suite_of(item)) is not None:
            tests.setdefault(suite, []).append(item.path)
    return [module for suite, files in tests.items() for module in suite.modules_of_ranks(files)]
