"""Which tests run in another process, in which one, and how they get there."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from mgpu_check.errors import RankHang
from mgpu_check.ranks import protocol
from mgpu_check.ranks.pool import CannotTravel
from mgpu_check.ranks.transport import ORIGINAL
from mgpu_check.session import GpuSession, abandoning
from mgpu_check.shipping import bare, by_value

__all__ = ["SIZE_PARAMETER", "Absent", "Needs", "needs_of", "running", "sizes_of"]

SIZE_PARAMETER = "world_size_of_ranks"
"""The parameter by which a test with several sizes in its `ranks` mark becomes one test per size."""

BOUND_TO_PYTEST = frozenset(
    {"request", "monkeypatch", "capsys", "capfd", "capsysbinary", "capfdbinary", "caplog", "recwarn", "pytester"}
    | {"record_property", "record_testsuite_property", "record_xml_attribute", "ranks", "subtests"}
)
"""Fixtures that act on the pytest process; in another one they would be silent, or wrong."""


class Absent(protocol.Placeholder):
    """What the fixtures `rank` and `gpus` are in the pytest process: something that only a test's body can have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self._why()} (asked for .{name})")

    def __getitem__(self, index: object) -> Any:
        raise TypeError(self._why())

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(self._why())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.name)  # in Hypothesis' "test_x(rank=rank, n=3)"

    def __reduce__(self) -> tuple[Any, ...]:
        return protocol.Placeholder, (self.name, self.count)

    def _why(self) -> str:
        return (
            f"fixture {self.name!r} has its value in the test's body only, which runs in another process; "
            "the pytest process touches no device, so other fixtures cannot use it"
        )


@dataclass(frozen=True)
class Needs:
    """What a test asks for.

    Attributes:
        where: "ranks" and "node" say where its body runs; "parent" is a test that calls `ranks.run` itself.
        count: devices it needs; 0 for all there are.
    """

    where: Literal["ranks", "node", "parent"]
    count: int
    backend: str | None = None
    timeout: float | None = None


def sizes_of(mark: pytest.Mark) -> tuple[int, ...]:
    """The world sizes of a `ranks` mark, empty for all devices.

    Raises:
        pytest.UsageError: an argument is wrong.
    """
    unknown = mark.kwargs.keys() - {"backend", "timeout"}
    if unknown:
        raise pytest.UsageError(
            f"mark ranks: unknown argument {unknown.pop()!r}; it takes sizes, backend= and timeout="
        )
    return tuple(_count("ranks", size) for size in mark.args)


def _count(mark: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise pytest.UsageError(f"mark {mark}: {value!r} is not a number of devices; write whole numbers of at least 1")
    return value


def needs_of(item: pytest.Item) -> Needs | None:
    """What `item` asks for, None where it is none of ours.

    Raises:
        pytest.UsageError: its marks and fixtures contradict each other.
    """
    if not isinstance(item, pytest.Function):
        return None
    arguments = set(item._fixtureinfo.argnames)
    ranks_mark, gpus_mark = item.get_closest_marker("ranks"), item.get_closest_marker("gpus")
    if not (ranks_mark or gpus_mark or arguments & {"rank", "gpus", "ranks"}):
        return None
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
    if (ranks_mark or gpus_mark or "gpus" in arguments) and _no_plain_function(item):
        raise pytest.UsageError(
            "the marks 'ranks' and 'gpus' and the fixture 'gpus' are for plain test functions and methods of plain "
            "classes, not for coroutines, generators or unittest.TestCase"
        )
    if ranks_mark is not None:
        sizes = sizes_of(ranks_mark)
        size: Any = item.callspec.params.get(SIZE_PARAMETER, 0) if hasattr(item, "callspec") else 0
        return Needs(
            "ranks", size or (sizes[0] if sizes else 0), ranks_mark.kwargs.get("backend"), _timeout(ranks_mark)
        )
    count = 0
    if gpus_mark is not None:
        if len(gpus_mark.args) != 1 or gpus_mark.kwargs:
            raise pytest.UsageError("mark gpus: it takes one argument, the number of devices: @pytest.mark.gpus(2)")
        count = _count("gpus", gpus_mark.args[0])
    return Needs("parent" if "ranks" in arguments else "node", count)


def _timeout(mark: pytest.Mark) -> float | None:
    timeout = mark.kwargs.get("timeout")
    if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0):
        raise pytest.UsageError(f"mark ranks: timeout={timeout!r} is not valid; write a number of seconds above 0")
    return timeout


def _no_plain_function(item: pytest.Function) -> bool:
    function = item.function
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
        or type(item).__name__ == "TestCaseFunction"
    )


@contextlib.contextmanager
def running(item: pytest.Function, needs: Needs, session: GpuSession) -> Iterator[None]:
    """For the time of the context, calling `item.obj` runs the test where it belongs."""
    modules = [item.module, *_conftests(item.config)]
    handle = getattr(item.obj, "hypothesis", None)
    original: Any = item.obj if handle is None else handle.inner_test
    with by_value(modules), _settings_for_ranks(item):
        body = original if needs.where == "parent" else _sent(original, item, needs, session)
        counted = _counted(body, session, drawn=handle is not None)
        setattr(counted, ORIGINAL, original)
        if handle is None:
            item.obj = counted
        else:
            handle.inner_test = counted
        try:
            yield
        finally:
            if handle is None:
                item.obj = original
            else:
                handle.inner_test = original


def _conftests(config: pytest.Config) -> list[types.ModuleType]:
    return [
        plugin
        for plugin in config.pluginmanager.get_plugins()
        if isinstance(plugin, types.ModuleType) and (plugin.__file__ or "").endswith("conftest.py")
    ]


def _sent(
    original: Callable[..., Any], item: pytest.Function, needs: Needs, session: GpuSession
) -> Callable[..., None]:
    """`original`, sent to the processes where it belongs at each call."""
    refused = BOUND_TO_PYTEST & set(item._fixtureinfo.argnames)
    if refused:
        raise pytest.UsageError(
            f"fixture {min(refused)!r} acts on the pytest process, but this test runs in another one; "
            "do without it, or write a test with the fixture 'ranks' that calls ranks.run(...)"
        )
    pool = session.pool
    size = 0 if needs.where == "node" else needs.count or pool.devices
    pool.prepare(size, needs.backend)
    try:
        function = pool.function(bare(original))
    except CannotTravel as error:
        raise pytest.UsageError(str(error)) from None

    @functools.wraps(original)
    def sent(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        if needs.where == "node" and "gpus" in kwargs and needs.count:
            kwargs["gpus"] = protocol.Placeholder("gpus", needs.count)
        for name, value in kwargs.items():
            if type(value).__name__ == "DataObject" and type(value).__module__.startswith("hypothesis."):
                raise pytest.UsageError(
                    f"argument {name!r}: st.data() draws in the pytest process and cannot do so from a rank; "
                    "draw everything before, with st.composite or flatmap"
                )
        try:
            with abandoning():
                pool.call(function, args, kwargs, size=size, backend=needs.backend, timeout=needs.timeout)
        except CannotTravel as error:
            raise pytest.UsageError(f"{error}; make it in the test's body") from None

    return sent


def _counted(body: Callable[..., Any], session: GpuSession, drawn: bool) -> Callable[..., Any]:
    @functools.wraps(body)
    def counted(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            result = body(*args, **kwargs)
        except RankHang as hang:
            if drawn:
                # Hypothesis does not see a BaseException as a failing example, and would print none.
                shown = ", ".join(f"{n}={v!r}" for n, v in kwargs.items() if not isinstance(v, protocol.Placeholder))
                hang.add_note(f"Failing test case (not shrunk, because every try would hang): {shown}")
            raise
        session.count_example()
        return result

    return counted


@contextlib.contextmanager
def _settings_for_ranks(item: pytest.Function) -> Iterator[None]:
    """Adapt the Hypothesis settings of `item` to code that runs in other processes.

    The default deadline of 200 ms is lifted: it is for functions, and the first example on ranks may start them. One
    that the user has set, to whatever else, holds. The explain phase goes: it traces lines of this process, and could
    only ever explain the engine.
    """
    function = item.function
    current = getattr(function, "_hypothesis_internal_use_settings", None)
    if current is None:
        yield
        return
    from hypothesis import Phase, settings

    deadline = current.deadline
    if deadline == settings.get_profile("default").deadline:
        deadline = None
    phases = tuple(phase for phase in current.phases if phase is not Phase.explain)
    function._hypothesis_internal_use_settings = settings(current, deadline=deadline, phases=phases)
    try:
        yield
    finally:
        function._hypothesis_internal_use_settings = current
