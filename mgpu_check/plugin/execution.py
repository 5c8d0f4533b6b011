"""Run the body of a test in the right process: on ranks, in the node process, or here."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from typing import Any

import pytest

from mgpu_check.applications import is_packaged
from mgpu_check.asserts.known_defects import heard_by, reported_to
from mgpu_check.engine.world import NotPicklable
from mgpu_check.errors import AgentLost, RankFailure, RankHang
from mgpu_check.plugin import private_names
from mgpu_check.plugin.rank_messages import Logging, steps_to
from mgpu_check.plugin.ranks import abandoning
from mgpu_check.plugin.replacements import Replacements
from mgpu_check.plugin.report.replay import BLOB, blob_of_this, draws_on, is_final, keeping_steps
from mgpu_check.plugin.requirements import Needs
from mgpu_check.plugin.serialization import bare, by_value
from mgpu_check.plugin.session import FirstFailure, GpuSession
from mgpu_check.plugin.stash import SESSION
from mgpu_check.processes import channel
from mgpu_check.processes.pickling import ORIGINAL
from mgpu_check.torch_hooks.patches import replaced

BOUND_TO_PYTEST = frozenset(
    {"request", "monkeypatch", "capsys", "capfd", "capsysbinary", "capfdbinary", "caplog", "recwarn", "pytester"}
    | {"record_property", "record_testsuite_property", "record_xml_attribute", "ranks", "subtests"}
)
"""Fixtures that act on the pytest process; in another process they would have no effect, or a wrong one."""


class Absent(channel.Placeholder):
    """Placeholder for the fixtures `rank` and `gpus` in the pytest process: only a test's body gets their values."""

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
        return channel.Placeholder, (self.name, self.count)

    def _why(self) -> str:
        return (
            f"fixture {self.name!r} has a value only in the test's body, which runs in another process; "
            "the pytest process uses no device, so other fixtures cannot use it"
        )


@contextlib.contextmanager
def running(item: pytest.Function, needs: Needs, session: GpuSession) -> Iterator[None]:
    """Within the context, make a call of `item.obj` run the test in the process that `needs` names."""
    handle = getattr(item.obj, "hypothesis", None)
    holder, attribute = (item, "obj") if handle is None else (handle, "inner_test")
    original: Any = getattr(holder, attribute)
    with (
        by_value(session.test.modules),
        _settings_for_ranks(item),
        _each_example_for_itself() if is_packaged(item) else contextlib.nullcontext(),
        keeping_steps(),
        reported_to(session.test.met.append),
        heard_by(session.test.left_out.append),
    ):
        session.test.drawn = handle is not None
        body = original if needs.where == "parent" else _sent(original, item, needs, session)
        counted = _counted(body, session, drawn=handle is not None)
        setattr(counted, ORIGINAL, original)
        setattr(holder, attribute, counted)
        session.test.in_body = True
        try:
            yield
        finally:
            session.test.in_body = False
            setattr(holder, attribute, original)


def modules_of(item: pytest.Item) -> list[types.ModuleType]:
    """Return the modules that are pickled by value for a test."""
    module = getattr(item, "module", None)
    plugins = (plugin for plugin in item.config.pluginmanager.get_plugins() if isinstance(plugin, types.ModuleType))
    conftests = [plugin for plugin in plugins if (plugin.__file__ or "").endswith("conftest.py")]
    return [*(_home(module) if module is not None else ()), *conftests]


def _home(module: types.ModuleType) -> list[types.ModuleType]:
    """Return the test's module, and its top-level package if no other process could import it. With
    ``--import-mode=importlib``, or with tests beside an installed package, the package is only in `sys.modules`."""
    package = sys.modules.get(module.__name__.partition(".")[0])
    if package is None or package is module:
        return [module]
    spec = PathFinder.find_spec(package.__name__, sys.path)
    # A different package of the same name may be importable; "tests" is a common name.
    in_spec = spec is not None and set(package.__path__) <= set(spec.submodule_search_locations or ())
    return [module] if in_spec else [module, package]


def record_replacements(session: pytest.Session) -> None:
    """Record until the end of the run what fixtures replace in modules, because ranks must repeat it."""
    gpu_session = session.config.stash[SESSION]
    replacements = Replacements(lambda: gpu_session.test.modules)
    replacements.start()
    session.config.add_cleanup(replacements.end)
    gpu_session.changes = replacements.changes
    gpu_session.how_to_log = functools.partial(Logging.of, session.config)


def _sent(original: Callable[..., Any], item: pytest.Function, needs: Needs, session: GpuSession) -> Callable[..., Any]:
    """Wrap `original` so that each call runs it on the ranks or in the node process."""
    refused = BOUND_TO_PYTEST & set(private_names.argument_names(item))
    if refused:
        raise pytest.UsageError(
            f"fixture {min(refused)!r} acts on the pytest process, but this test runs in another one; "
            "remove it, or write a test with the fixture 'ranks' that calls ranks.run(...)"
        )
    pool = session.pool
    size = 0 if needs.where == "node" else needs.count or pool.devices
    pool.prepare(size, needs.backend, needs.host)
    try:
        function = pool.function(bare(original), reused=True)
    except NotPicklable as error:
        raise pytest.UsageError(str(error)) from None

    @functools.wraps(original)
    def sent(*args: Any, **kwargs: Any) -> Any:
        if needs.where == "node" and isinstance(kwargs.get("gpus"), Absent) and needs.count:
            kwargs["gpus"] = channel.Placeholder("gpus", needs.count)
        for name, value in kwargs.items():
            if draws_on(value):
                raise pytest.UsageError(
                    f"argument {name!r}: st.data() draws in the pytest process and cannot do so from a rank; "
                    "draw all values before the body, with st.composite or flatmap"
                )
        try:
            with abandoning(session):
                results = pool.call(
                    function, args, kwargs, size=size, backend=needs.backend, timeout=needs.timeout, host=needs.host
                )
        except NotPicklable as error:
            raise pytest.UsageError(f"{error}; create it in the test's body") from None
        # A test should return None. pytest and Hypothesis warn about any other value, such as a forgotten assertion.
        return next((result for result in results if result is not None), None)

    return sent


def _counted(body: Callable[..., Any], session: GpuSession, drawn: bool) -> Callable[..., Any]:
    @functools.wraps(body)
    def counted(*args: Any, **kwargs: Any) -> Any:
        try:
            result = body(*args, **kwargs)
        except RankHang as hang:
            # Hypothesis does not treat a BaseException as a failing example, so it would not print the example.
            shown = ", ".join(f"{n}={v!r}" for n, v in kwargs.items() if not isinstance(v, channel.Placeholder))
            if steps := steps_to(hang):
                shown = "\n".join(["", *steps])
            if drawn or steps:
                reason = "no example caused it" if isinstance(hang, AgentLost) else "every try would hang"
                hang.add_note(f"Failing test case (not shrunk, because {reason}): {shown}")
            if drawn:
                setattr(hang, BLOB, blob_of_this())
            raise
        except AssertionError as failure:
            if session.first_failure:
                raise FirstFailure(failure) from failure
            if drawn and isinstance(failure, RankFailure) and is_final():
                session.explain(failure)  # now, because the ranks keep only their last failure, and others may follow
            raise
        session.count_example()
        return result

    return counted


@contextlib.contextmanager
def _settings_for_ranks(item: pytest.Function) -> Iterator[None]:
    """Adapt the Hypothesis settings of `item` to code that runs in other processes.

    Hypothesis' own deadline of 200 ms is removed, because the first example may have to start the ranks. A deadline
    that the user has set stays; one of 200 ms is another object. The explain phase is removed, because it traces only
    this process.
    """
    function = item.function
    current = getattr(function, private_names.SETTINGS, None)
    if current is None:
        yield
        return
    from hypothesis import Phase, settings

    deadline = None if current.deadline is private_names.default_settings().deadline else current.deadline
    phases = tuple(phase for phase in current.phases if phase is not Phase.explain)
    # The replay line of a failure needs the blob.
    changed = settings(current, deadline=deadline, phases=phases, print_blob=True)
    with replaced(function, private_names.SETTINGS, changed):
        yield


@contextlib.contextmanager
def _each_example_for_itself() -> Iterator[None]:
    """Make Hypothesis draw each example independently.

    By default, five of six examples after the tenth are mutations of the previous one and keep its world size, dtype
    and layout (hypothesis/internal/conjecture/engine.py, generate_mutations_from, 6.170). A check with a few dozen
    examples would cover only a handful of each.
    """
    runner = private_names.runner()
    has_copies = hasattr(runner, private_names.COPIES)  # not in every version of Hypothesis
    copies = replaced(runner, private_names.COPIES, lambda runner, data: None)
    with copies if has_copies else contextlib.nullcontext():
        yield
