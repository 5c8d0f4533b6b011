"""Choose the variants that a check runs: pairs of options, and the shapes of meshes.

Options are combined such that each pair of values of two options occurs: a covering array of strength two.
Most defects of options need one value, or two together (Kuhn, Wallace and Gallo, *Software fault interactions and
implications for software testing*, 2004).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Row = dict[str, Any]
_Place = tuple[str, int]
_DEFAULT = object()


def in_pairs(options: Mapping[str, Sequence[Any]], allowed: Callable[[_Row], bool] = lambda row: True) -> list[_Row]:
    """Return rows of options that together have each allowed pair of values. The same options give the same rows.

    The first value of an option is used where no pair is missing. `allowed` says whether options may occur together. It
    gets rows that lack options, too. Other options must have a value that each allowed row may be completed with.
    """
    if len(options) == 1:
        return [{name: value} for name, values in options.items() for value in values]
    places = [[(name, at) for at in range(len(values))] for name, values in options.items()]
    pairs = (pair for some, others in itertools.combinations(places, 2) for pair in itertools.product(some, others))
    missing = dict.fromkeys(pair for pair in pairs if allowed(_row_of(options, pair)))
    rows = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in options:
            if name not in chosen:
                able = [(name, at) for at in range(len(options[name]))]
                able = [choice for choice in able if allowed(_row_of(options, [*chosen.items(), choice]))]
                chosen |= [max(able, key=lambda choice: len(_with(choice, chosen, options) & missing.keys()))]
        for pair in itertools.combinations(((name, chosen[name]) for name in options), 2):
            missing.pop(pair, None)
        rows.append(_row_of(options, [(name, chosen[name]) for name in options]))
    return rows


def drawn_rows(
    options: Mapping[str, Sequence[Any]],
    allowed: Callable[[_Row], bool] = lambda row: True,
    *,
    seed: int,
    more: bool,
    share: int = 4,
) -> list[_Row]:
    """Return the rows of `in_pairs`: all with `more`, else `some_rows` of them."""
    rows = in_pairs(options, allowed)
    return rows if more else some_rows(rows, seed, share)


def some_rows(rows: Sequence[_Row], seed: int, share: int) -> list[_Row]:
    """Return every `share`-th row, from one that the seed selects, and few others, so that they have each value."""
    start = seed % min(share, len(rows))
    chosen, others = list(rows[start::share]), [row for at, row in enumerate(rows) if at % share != start]
    missing = _values(rows) - _values(chosen)
    while missing:
        chosen.append(max(others, key=lambda row: len(_values([row]) & missing)))
        missing -= _values(chosen)
    return chosen


def _values(rows: Sequence[_Row]) -> set[tuple[str, str]]:
    return {(name, repr(value)) for row in rows for name, value in row.items()}


def words_of(row: Mapping[str, Any], options: Mapping[str, Sequence[Any]]) -> str:
    """Return the values of a row that are not the first ones of their options, such as "a=2, b=True"."""
    chosen = [f"{name}={value}" for name, value in row.items() if value is not options[name][0]]
    return ", ".join(chosen) or "the first value of each option"


def _with(
    choice: _Place, chosen: Mapping[str, int], options: Mapping[str, Sequence[Any]]
) -> set[tuple[_Place, _Place]]:
    """Return the pairs of a place with those that are chosen, each in the order of the options."""
    order = {name: at for at, name in enumerate(options)}
    return {(old, choice) if order[old[0]] < order[choice[0]] else (choice, old) for old in chosen.items()}


def _row_of(options: Mapping[str, Sequence[Any]], places: Sequence[_Place]) -> _Row:
    return {name: options[name][at] for name, at in places}


def near_square(ranks: int) -> tuple[int, int]:
    """Return the sides of the mesh of `ranks` ranks that is closest to a square, the smaller side first."""
    side = max(side for side in range(1, ranks + 1) if ranks % side == 0 and side * side <= ranks)
    return side, ranks // side


def settings_in_pairs(values: Sequence[tuple[str, Any]], allowed: Callable[[_Row], bool]) -> list[_Row]:
    """Return settings of options: each value alone, then settings that together have each allowed pair of values.

    Args:
        values: options and values besides their default, the simplest first. A setting lacks what has its default.
        allowed: says whether a setting may be used.
    """
    options: dict[str, list[Any]] = {}
    for name, value in values:
        options.setdefault(name, []).append(value)

    def besides_defaults(row: _Row) -> _Row:
        return {name: value for name, value in row.items() if value is not _DEFAULT}

    choices = {name: [*chosen, _DEFAULT] for name, chosen in options.items()}  # the default where nothing else may be
    rows = map(besides_defaults, in_pairs(choices, lambda row: allowed(besides_defaults(row))))
    settings = [{name: value} for name, value in values]
    pairs_of = [(row, {*itertools.combinations(row.items(), 2)}) for row in rows]
    missing = set().union(*(pairs for _, pairs in pairs_of))
    while missing:  # without rows that only pairs with a default need
        row, pairs = max(pairs_of, key=lambda entry: len(entry[1] & missing))
        settings.append(row)
        missing -= pairs
    return [setting for setting in settings if allowed(setting)]


def fewest_options(setting: _Row, fails: Callable[[_Row], bool]) -> _Row:
    """Return the fewest options of a failing setting that still fail: without any one of them it does not."""
    for name in setting:
        fewer = {other: value for other, value in setting.items() if other != name}
        if fails(fewer):
            return fewest_options(fewer, fails)
    return setting
