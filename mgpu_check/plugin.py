"""The pytest plugin: options, hooks and fixtures, and nothing else. Importing it imports neither torch nor Hypothesis."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from mgpu_check.errors import RankFailure
from mgpu_check.needs import SIZE_PARAMETER, Needs, needs_of, sizes_of
from mgpu_check.settings import OPTIONS, activate, resolve, unknown_variables

if TYPE_CHECKING:
    from mgpu_check.items import Absent
    from mgpu_check.session import GpuSession, Ranks

SESSION: pytest.StashKey[GpuSession] = pytest.StashKey()
NEEDS: pytest.StashKey[Needs] = pytest.StashKey()
MISUSE: pytest.StashKey[str] = pytest.StashKey()
FAILED: pytest.StashKey[bool] = pytest.StashKey()
WORKER_REPORT = "mgpu_check"


# Help texts: lower case, no full stop, the default last.
def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mgpu-check", "multi-GPU tests (mgpu-check)")
    group.addoption("--gpus", metavar="N|all", default=None, help=f"{OPTIONS['gpus'].help} (default: none)")
    group.addoption(
        "--simulate",
        metavar="cpu|cuda:I",
        nargs="?",
        const="cpu",
        default=None,
        help=f"{OPTIONS['simulate'].help}; proves code, never hardware (default: real GPUs; --simulate alone: cpu)",
    )
    group.addoption(
        "--rank-timeout", metavar="SECONDS", default=None, help=f"{OPTIONS['rank_timeout'].help} (default: 60)"
    )
    group.addoption(
        "--strict-gpus",
        action="store_const",
        const="true",
        default=None,
        help=f"{OPTIONS['strict_gpus'].help} (default: skip, with counts)",
    )
    for name, option in OPTIONS.items():
        parser.addini(name, f"{option.help}; the same as {option.flag}", default=None)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Let ``--simulate tests/`` mean what it looks like: the option's value is optional, and is no path."""
    alone = [
        index
        for index, argument in enumerate(args)
        if argument == "--simulate" and not re.fullmatch(r"cpu|cuda:\d+", "".join(args[index + 1 : index + 2]))
    ]
    if not alone:
        return
    for index in alone:
        args[index] = "--simulate=cpu"
    known = parser.parse_known_args(args, namespace=copy.copy(early_config.option))
    # pytest has set it since it parsed the arguments itself: without it, conftests above the root would be loaded.
    known.confcutdir = early_config.known_args_namespace.confcutdir
    early_config.known_args_namespace = known


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, backend=None, timeout=None): run this test on every rank of a world, once for each of the sizes "
        "(none given: on all GPUs)",
    )
    config.addinivalue_line("markers", "gpus(n): this test needs n GPUs in one process, and gets exactly those")
    for line in unknown_variables(os.environ):
        config.issue_config_time_warning(pytest.PytestConfigWarning(f"mgpu-check: {line}"), stacklevel=2)
    try:
        settings = resolve(
            {name: config.getoption(name, None) for name in OPTIONS},
            os.environ,
            {name: value for name in OPTIONS if (value := config.getini(name)) is not None},
        )
    except ValueError as error:
        raise pytest.UsageError(f"mgpu-check: {error}") from None
    activate(settings)
    from mgpu_check.session import GpuSession

    config.stash[SESSION] = GpuSession(settings)


def pytest_unconfigure(config: pytest.Config) -> None:
    activate(None)
    session = config.stash.get(SESSION, None)
    if session is not None:
        session.close()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    gpus = session.config.stash[SESSION]
    if not gpus.settings.asked or session.config.option.collectonly:
        return
    from mgpu_check.session import TooFewDevices

    # Under pytest-xdist, the process that hands out the tests has looked already; a worker looks only to count "all".
    if not hasattr(session.config, "workerinput") or gpus.settings.gpus is None:
        try:
            gpus.count_devices()
        except TooFewDevices as error:
            raise pytest.UsageError(f"mgpu-check: {error}") from None
        activate(gpus.settings)


def pytest_report_header(config: pytest.Config) -> str | None:
    session = config.stash[SESSION]
    return session.header() if session.settings.asked else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and len(mark.args) > 1:
        try:
            sizes = tuple(dict.fromkeys(sizes_of(mark)))
        except pytest.UsageError:
            return  # told as an error of this test, not of the whole collection
        metafunc.fixturenames.append(SIZE_PARAMETER)
        metafunc.parametrize(SIZE_PARAMETER, sizes, ids=[f"ranks={size}" for size in sizes])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        try:
            needs = needs_of(item)
        except pytest.UsageError as error:
            item.stash[MISUSE] = str(error)
            continue
        if needs is not None:
            item.stash[NEEDS] = needs


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to start up while pytest still sets up the first test."""
    gpus = session.config.stash[SESSION]
    wanted = any(NEEDS in item.stash for item in session.items)
    if wanted and gpus.settings.asked and not session.config.option.collectonly:
        gpus.pool.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if MISUSE in item.stash:
        pytest.fail(item.stash[MISUSE], pytrace=False)
    needs = item.stash.get(NEEDS, None)
    if needs is None:
        return
    session = item.config.stash[SESSION]
    lack = session.lack(needs.count)
    if lack and session.settings.strict_gpus:
        pytest.fail(f"{lack} (--strict-gpus)", pytrace=False)
    if lack:
        raise pytest.skip.Exception(lack, _use_item_location=True)
    session.begin_test(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    needs = pyfuncitem.stash.get(NEEDS, None)
    if needs is None:
        return (yield)
    from mgpu_check.items import running

    try:
        with running(pyfuncitem, needs, pyfuncitem.config.stash[SESSION]):
            return (yield)
    except pytest.UsageError as error:
        misuse = str(error)
    except RankFailure as error:
        mark = pyfuncitem.get_closest_marker("xfail")
        if mark is None or not mark.kwargs.get("raises") or error.__cause__ is None:
            raise
        raise error.__cause__ from None  # what was expected is the error of the rank
    pytest.fail(misuse, pytrace=False)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        if NEEDS in item.stash:
            item.config.stash[SESSION].end_test(failed=item.stash.get(FAILED, True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if NEEDS not in item.stash:
        return (yield)
    from mgpu_check.report import failures

    session = item.config.stash[SESSION]
    if call.when == "setup":
        failures.add_identity(item)
    if call.when == "call" or call.excinfo is not None:
        failures.add_output(item, session, call.when)
    if call.when == "call":
        item.stash[FAILED] = call.excinfo is not None
        failures.add_properties(item, session)
    report = yield
    failures.replace_traceback(item, report, call, session, in_parent=item.stash[NEEDS].where == "parent")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    gpus = session.config.stash[SESSION]
    gpus.finish()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[WORKER_REPORT] = {"deaths": gpus.deaths, "remarks": gpus.remarks}
    if gpus.deaths and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """An xdist worker has ended: what it has to tell is told by the process that prints."""
    told = getattr(node, "workeroutput", {}).get(WORKER_REPORT, {})
    session = node.config.stash[SESSION]
    session.deaths += told.get("deaths", [])
    session.remarks += told.get("remarks", [])


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from mgpu_check.report import summary

    summary.print_to(terminalreporter, config.stash[SESSION])


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """The ranks of this run: `ranks.run(fn, *args, size=None, timeout=None)` calls fn on each, results in rank order."""
    from mgpu_check.session import Ranks

    session = request.config.stash[SESSION]
    if lack := session.lack(0):
        pytest.skip(lack)  # asked for by `request.getfixturevalue`, which nobody sees before
    return Ranks(session.pool)


@pytest.fixture(scope="session")
def rank() -> Absent:
    """In a test marked `ranks`: the rank that runs the body: .index .size .local_index .node_index .device .group."""
    from mgpu_check.items import Absent

    return Absent("rank")


@pytest.fixture(scope="session")
def gpus() -> Absent:
    """A tuple of torch.device, cuda:0 to cuda:N-1. The test runs in the node process, which sees all of them."""
    from mgpu_check.items import Absent

    return Absent("gpus")
