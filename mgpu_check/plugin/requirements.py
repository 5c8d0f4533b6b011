"""Read the requirements of a test from its marks and fixtures.

Must be cheap: it runs for every test of every repository.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from mgpu_check.devices.inventory import WorldSize, spread
from mgpu_check.plugin.private_names import TestCaseFunction, fixture_function, fixture_names

OUR_FIXTURES = frozenset({"rank", "ranks", "gpus"})

SIZE_PARAMETER = "world_size_of_ranks"
"""The parameter that turns a test with several sizes in its `ranks` mark into one test per size."""

HOST_PARAMETER = "host_of_gpus"  # the parameter that turns a test in one process into one test per host


@dataclass(frozen=True)
class Needs:
    """The requirements of a test."""

    # the processes that run its body: "ranks", "node", or "parent" for a test that calls `ranks.run` itself
    where: Literal["ranks", "node", "parent"]
    count: int  # number of devices; 0 for all
    backend: str | None = None
    timeout: float | None = None
    host: int = 0  # host of its process, for "node"
    least: int = 0  # minimum number of devices, for a test that gets all


NEEDS: pytest.StashKey[Needs] = pytest.StashKey()  # of an item: its requirements


def placements(sizes: Sequence[int], per_host: Sequence[int]) -> dict[str, int]:
    """Return world sizes by test id. A size that fits on one host, and on several, gets two ids: within and across.
    `per_host`: number of devices of each host; empty on one machine."""
    counts: dict[str, int] = {}
    for size in sizes:
        within = next((host for host, count in enumerate(per_host) if count >= size), None)
        if within is None or size < 2 or len(per_host) < 2:
            counts[f"ranks={size}"] = size
            continue
        counts[f"ranks={size}-within"] = WorldSize([size if host == within else 0 for host in range(len(per_host))])
        counts[f"ranks={size}-across"] = spread(size, per_host)
    return counts


def sizes_of(mark: pytest.Mark) -> tuple[int, ...]:
    """Return the world sizes of a `ranks` mark, empty for all devices; raise `pytest.UsageError` if one is wrong."""
    unknown = mark.kwargs.keys() - {"backend", "timeout"}
    if unknown:
        raise pytest.UsageError(
            f"mark ranks: unknown argument {unknown.pop()!r}; it takes sizes, backend= and timeout="
        )
    return tuple(_count("ranks", size) for size in mark.args)


def in_one_process(item: pytest.Item) -> bool:
    """Return whether a test runs in the process that sees all devices of a host."""
    mark = item.get_closest_marker("gpus")
    return "gpus" in getattr(item, "fixturenames", ()) or (mark is not None and bool(mark.args))


def _count(mark: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise pytest.UsageError(f"mark {mark}: {value!r} is not a number of devices; write whole numbers of at least 1")
    return value


def needs_of(item: pytest.Item) -> Needs | None:
    """Return the requirements of `item`, None without ours; raise `pytest.UsageError` for contradictory ones."""
    if not isinstance(item, pytest.Function):
        return None
    # Not parameters, nor fixtures of the user with the same names.
    arguments = {
        name
        for name in OUR_FIXTURES.intersection(fixture_names(item))
        if getattr(fixture_function(item, name), "__module__", "") == "mgpu_check.plugin.plugin"
    }
    ranks_mark, gpus_mark = item.get_closest_marker("ranks"), item.get_closest_marker("gpus")
    if not (ranks_mark or gpus_mark or arguments):
        return None
    _check_combination(item, arguments, ranks_mark, gpus_mark)
    if ranks_mark is not None:
        sizes = sizes_of(ranks_mark)
        size = _parameter(item, SIZE_PARAMETER) or (sizes[0] if sizes else 0)
        return Needs("ranks", size, ranks_mark.kwargs.get("backend"), _timeout(ranks_mark))
    count, least = (0, 0) if gpus_mark is None else _counts(gpus_mark)
    if gpus_mark is not None and "timeout" in gpus_mark.kwargs and "ranks" in arguments:
        raise pytest.UsageError("mark gpus: timeout= is for the fixture 'gpus'; with 'ranks' write ranks.run(timeout=)")
    return Needs(
        "parent" if "ranks" in arguments else "node",
        count,
        timeout=None if gpus_mark is None else _timeout(gpus_mark),
        host=_parameter(item, HOST_PARAMETER),
        least=least,
    )


def _check_combination(
    item: pytest.Function, arguments: set[str], ranks_mark: pytest.Mark | None, gpus_mark: pytest.Mark | None
) -> None:
    if ranks_mark is None and "rank" in arguments:
        raise pytest.UsageError("fixture 'rank' exists in tests that run on ranks; mark the test @pytest.mark.ranks(2)")
    if ranks_mark is not None and (gpus_mark is not None or arguments & {"gpus", "ranks"}):
        raise pytest.UsageError(
            "a test marked 'ranks' runs on every rank and has only its own device; "
            "it cannot use the fixtures 'gpus' or 'ranks', or the mark 'gpus'"
        )
    if "ranks" in arguments and "gpus" in arguments:
        raise pytest.UsageError(
            "a test runs either in the node process (fixture 'gpus') or starts ranks ('ranks'), not both"
        )
    unsuited: tuple[Callable[[object], bool], ...]
    unsuited = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    is_plain = not isinstance(item, TestCaseFunction) and not any(unsuits(item.function) for unsuits in unsuited)
    if (ranks_mark or gpus_mark or "gpus" in arguments) and not is_plain:
        raise pytest.UsageError(
            "the marks 'ranks' and 'gpus' and the fixture 'gpus' are for plain test functions and methods of plain "
            "classes, not for coroutines, generators or unittest.TestCase"
        )


def _counts(mark: pytest.Mark) -> tuple[int, int]:
    """Return the exact and the minimum number of devices of a ``gpus`` mark; 0 for the one that it does not give."""
    others = mark.kwargs.keys() - {"timeout"}
    if not mark.args and others == {"least"}:
        return 0, _count("gpus", mark.kwargs["least"])
    if len(mark.args) == 1 and not others:
        return _count("gpus", mark.args[0]), 0
    raise pytest.UsageError(
        "mark gpus: it takes one argument: the number of devices, @pytest.mark.gpus(2); or the minimum number, for "
        "a test that gets all devices, @pytest.mark.gpus(least=2)"
    )


def _parameter(item: pytest.Function, name: str) -> int:
    """Return the value of a parameter that this plugin has added to the test; 0 if it has not."""
    value: Any = item.callspec.params.get(name, 0) if hasattr(item, "callspec") else 0
    return int(value)


def _timeout(mark: pytest.Mark) -> float | None:
    timeout = mark.kwargs.get("timeout")
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < math.inf:
        raise pytest.UsageError(
            f"mark {mark.name}: timeout={timeout!r} is not valid; write a finite number of seconds above 0"
        )
    return timeout
