"""The applications of the core: packages beside it that say in a module ``application.py`` what the core must know.

The core runs without any of them, and names none.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, eq=False)
class Application:
    """What an application says of itself.

    Attributes:
        package: the package, in full.
        command: the words after ``mgpu-check`` that run a test of the package.
        frames: how its frames show in reports: "check", the code that a check runs and whose errors are findings;
            "engine", left out; "user", like the user's code.
        options: a dataclass of more options of pytest, made of `mgpu_check.settings.option_field`, with a method
            ``misuse(settings)`` that returns what does not fit together, or None; None for no options.
        modules_of_ranks: takes the files of tests of this package; returns the modules that their ranks import.
        asked_by: the option that makes pytest run the tests of this package beside those of the user; "" for none.
        advice: what a failed check may show besides wrong code, by whether the devices are simulated.
    """

    package: str
    command: tuple[str, ...] = ()
    frames: Literal["check", "engine", "user"] = "user"
    options: type[Any] | None = None
    modules_of_ranks: Callable[[Iterable[Path]], list[str]] = lambda tests: []
    asked_by: str = ""
    advice: Mapping[bool, str] = field(default_factory=dict)


@functools.cache
def applications() -> Mapping[str, Application]:
    """Return the applications that are installed, by the name of their folder."""
    folder = Path(__file__).parent
    folders = sorted(file.parent.name for file in folder.glob("*/application.py"))
    return {name: importlib.import_module(f"{__package__}.{name}.application").APPLICATION for name in folders}


def application_of(module: str) -> Application | None:
    """Return the application that has a module; None for a module of the user, or of the core."""
    return next((app for app in applications().values() if module.startswith(f"{app.package}.")), None)


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
