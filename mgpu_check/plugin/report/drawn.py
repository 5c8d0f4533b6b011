"""Summarise the drawn values of a check in a line: dtypes, ranges of sizes, layouts, ..."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SHOWN = 3
"""Words of one kind that are named, so that the line stays short; for more words, the count follows."""
_LONGEST = 24
_SILENT = frozenset({"seed"})
_WORDS = 1000  # kept per kind: bounds the memory of a check that draws texts


class Drawn:
    """The drawn values of a check, by the names of its arguments and of the fields of specs.

    Specs are plain values: dataclasses, tuples, words and numbers. A shape counts by its number of elements.
    """

    def __init__(self) -> None:
        self._words: dict[str, dict[str, None]] = {}
        self._numbers: dict[str, tuple[float, float]] = {}
        self._different: set[int] = set()
        self._examples = 0

    def add(self, arguments: Mapping[str, Any]) -> None:
        """Record the arguments of an example."""
        leaves = tuple(_leaves("", arguments))
        self._examples += 1
        self._different.add(hash(leaves))
        self._note(leaves)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Record the cases that an example covers besides its arguments."""
        self._note(_leaves("", facts))

    def _note(self, leaves: Iterable[tuple[str, str | float]]) -> None:
        for name, value in leaves:
            if not name or name in _SILENT:
                continue
            if isinstance(value, str):
                words = self._words.setdefault(name, {})
                if len(words) < _WORDS:
                    words[value] = None
            else:
                least, most = self._numbers.get(name, (value, value))
                self._numbers[name] = min(least, value), max(most, value)

    def __str__(self) -> str:
        """Return the summary, such as "dtype float32 float16 bool (10), elements 0 to 1,048,576"; "" without values."""
        parts = [_of_words(name, list(words)) for name, words in self._words.items()]
        parts += [_of_numbers(name, least, most) for name, (least, most) in self._numbers.items()]
        if parts and self._examples > 2 * len(self._different):
            parts.append(f"only {len(self._different)} different")
        return ", ".join(parts)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str | float]]:
    """Yield the words and numbers in a plain value, each with the name of its innermost argument or field."""
    if isinstance(value, str):
        yield name, value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
    elif isinstance(value, bool):
        yield name, "yes" if value else "no"
    elif isinstance(value, (int, float)):
        if math.isfinite(value):
            yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(key if isinstance(key, str) else name, one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.repr:
                yield from _leaves(field.name, getattr(value, field.name, None))
    elif isinstance(value, (tuple, list, set, frozenset)):
        if name == "shape" and all(isinstance(size, int) for size in value):
            yield "elements", math.prod(value)
            return
        for one in value:
            yield from _leaves(name, one)


def _of_words(name: str, words: list[str]) -> str:
    shown = " ".join(words[:_SHOWN])
    return f"{_spoken(name)} {shown}" + (f" ({len(words)})" if len(words) > _SHOWN else "")


def _of_numbers(name: str, least: float, most: float) -> str:
    if least == most:
        return f"{_spoken(name)} {least:,}"
    return f"{_spoken(name)} {least:,} to {most:,}"


def _spoken(name: str) -> str:
    return name.replace("_", " ")
