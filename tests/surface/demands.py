"""Derive what the suite must draw: the options of each signature of torch."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from typing import NamedTuple

from tests.surface.names import SurfaceParameter, entries

CALLED = "called"
"""The class of each call, for the parameter ""."""

Call = tuple[str, str, str]
"""A function, one of its parameters, and a class of a value; the parameter "" has the class `CALLED`."""


class Variant(NamedTuple):
    """A class of values of a parameter; the first variant of each function is that it is called."""

    path: str
    parameter: str
    value: str


def matches(name: str, patterns: str) -> bool:
    """Return whether a name matches one of the patterns of `fnmatch`, which are separated by spaces."""
    return _compiled(patterns).match(name) is not None


@functools.cache
def _compiled(patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns.split(" "))))


def demanded() -> Iterator[tuple[Variant, ...]]:
    """Yield the variants of each function of the installed torch; the first is its call.

    Deprecated functions are left out.
    """
    for entry in entries():
        if not entry.deprecated:
            yield _variants(entry.path, entry.parameters)


def values_of(parameter: SurfaceParameter) -> list[str]:
    """Return the classes of values that a parameter must get."""
    return sorted(parameter.domain) or ["not the default"] * parameter.optional


def _variants(path: str, parameters: Sequence[SurfaceParameter]) -> tuple[Variant, ...]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = [Variant(path, "", CALLED)]
    for parameter in parameters:
        if parameter.kind not in several and not parameter.name.startswith("_"):
            found += [Variant(path, parameter.name, value) for value in values_of(parameter)]
    return tuple(found)
