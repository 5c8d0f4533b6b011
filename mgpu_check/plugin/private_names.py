"""The private names of pytest and Hypothesis that the plugin uses.

All were checked with pytest 8.3.5 and 9.2.0, and with Hypothesis 6.130.0 and 6.170.17. The environments `oldest` and
`newest` of tox run the tests that need them. Names of Hypothesis are looked up late: this module does not import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest import assertion as assertion
from _pytest._code import ExceptionInfo as ExceptionInfo
from _pytest._code.code import ExceptionRepr as ExceptionRepr
from _pytest._code.code import ReprEntryNative as ReprEntryNative
from _pytest._code.code import ReprExceptionInfo as ReprExceptionInfo
from _pytest._code.code import ReprFileLocation as ReprFileLocation
from _pytest._code.code import ReprTraceback as ReprTraceback
from _pytest._code.code import Traceback as Traceback
from _pytest._code.code import TracebackEntry as TracebackEntry
from _pytest._io import TerminalWriter as TerminalWriter
from _pytest.assertion import util as util
from _pytest.assertion.rewrite import AssertionRewritingHook as AssertionRewritingHook
from _pytest.logging import LogCaptureHandler as LogCaptureHandler
from _pytest.unittest import TestCaseFunction as TestCaseFunction

SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute of a test function: its settings. Absent from a test that draws nothing."""

SEED = "_hypothesis_internal_use_seed"
"""Attribute of a test function: the seed that its source sets with `hypothesis.seed`."""

GENERATED_SEED = "_hypothesis_internal_use_generated_seed"
"""Attribute of a test function: the seed that Hypothesis chose for this run, after a failure."""

COPIES = "generate_mutations_from"  # method of `runner()`: it makes five of six examples mutations of the one before

OBSERVED: Mapping[str, Any] = {"observability_enabled": lambda: True, "TESTCASE_CALLBACKS": (None,)}
"""How Hypothesis decides whether an observer is present: in recent releases, and in older ones."""


def default_settings() -> Any:
    """Return the settings that hold where nothing is said. A user may register others under the name "default"."""
    from hypothesis import _settings, settings

    return getattr(_settings, "default", settings.get_profile("default"))


def runner() -> Any:
    """Return the class of Hypothesis that draws the examples of one test."""
    from hypothesis.internal.conjecture.engine import ConjectureRunner

    return ConjectureRunner


def encoded_example() -> str:
    """Return the example that is being tried, as `hypothesis.reproduce_failure` takes it."""
    from hypothesis.control import current_build_context
    from hypothesis.core import encode_failure

    return encode_failure(current_build_context().data.choices).decode()


def check_example(blob: str) -> None:
    """Raise an error of Hypothesis or of `zlib` if a text encodes no example."""
    from hypothesis.core import decode_failure

    decode_failure(blob.encode())


def ini_file_of(directory: Path, folder: Path) -> Path | None:
    """Return the ini file that pytest finds for tests in `folder`, if it is called in `directory`."""
    from _pytest.config.findpaths import locate_config

    return locate_config(directory, [folder])[1]


def argument_names(item: pytest.Function) -> Sequence[str]:
    return item._fixtureinfo.argnames


def fixture_names(item: pytest.Function) -> Sequence[str]:
    """Return the names of all fixtures that a test needs, also through others."""
    return item._fixtureinfo.names_closure


def fixture_function(item: pytest.Function, name: str) -> Any:
    """Return the function of the fixture that a test gets under a name; None for a parameter."""
    definitions = item._fixtureinfo.name2fixturedefs.get(name, ())
    return definitions[-1].func if definitions else None
