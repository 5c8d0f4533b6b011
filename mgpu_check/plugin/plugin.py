"""The pytest plugin: only options, hooks and fixtures. Importing it imports neither torch nor Hypothesis."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mgpu_check.applications import applications, used_by_ranks
from mgpu_check.errors import NO_IMPORT, RankFailure, StartupFailure
from mgpu_check.option_values import ARITHMETIC_VARIABLE, parse_arithmetic
from mgpu_check.plugin.device_leases import TooFewDevices
from mgpu_check.plugin.harnesses import Adapting
from mgpu_check.plugin.launch import is_launched, over, wrong_launch
from mgpu_check.plugin.private_names import TestCaseFunction
from mgpu_check.plugin.replacements import watching
from mgpu_check.plugin.requirements import (
    HOST_PARAMETER,
    NEEDS,
    SIZE_PARAMETER,
    in_one_process,
    needs_of,
    placements,
    sizes_of,
)
from mgpu_check.plugin.stash import FAILED, INVOCATION, MISUSE, SESSION, TOLD, WATCHED
from mgpu_check.settings import OPTIONS, Settings, activate, all_options, resolve, unknown_variables
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.version import without_torch

if TYPE_CHECKING:
    from mgpu_check.plugin.execution import Absent
    from mgpu_check.plugin.ranks import Ranks
    from mgpu_check.plugin.report.replay import Invocation


_VALUES = {"--simulate": r"cpu|cuda:\d+", "--gpu-keep-warm": r"\d+(\.\d*)?"}
"""Options whose value may be left out, and the form of a value."""


def complete_values(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Parse ``--simulate tests/`` as ``--simulate=cpu tests/``: the value of such an option is never a path."""
    alone = [
        index
        for index, argument in enumerate(args)
        if argument in _VALUES and not re.fullmatch(_VALUES[argument], "".join(args[index + 1 : index + 2]))
    ]
    if not alone:
        return
    for index in alone:
        args[index] += "=" + OPTIONS[args[index][2:].replace("-", "_")].command_line["const"]
    namespace = parser.parse_known_args(args, namespace=copy.copy(early_config.option))
    # pytest sets this after it has parsed the arguments (_pytest/config/__init__.py, before it calls
    # pytest_load_initial_conftests, 9.2). Without it, conftests above the root would be loaded.
    namespace.confcutdir = early_config.known_args_namespace.confcutdir
    early_config.known_args_namespace = namespace


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Run functions on ranks: `ranks.run(fn, *args, size=None)` calls fn on each and returns the results in rank order.

    Also takes `timeout=`, `devices=` and `environment=`.
    """
    from mgpu_check.plugin.ranks import Ranks

    session = request.config.stash[SESSION]
    if lack := session.lack(0):
        from mgpu_check.plugin.report import outcomes

        outcomes.add_lack(request._pyfuncitem, lack)
        pytest.skip(lack)  # here, because `request.getfixturevalue` is not known at collection
    return Ranks(session)


@pytest.fixture(scope="session")
def rank() -> Absent:
    """Give a test marked `ranks` the rank that runs its body: .index .size .local_index .node_index .device .group."""
    from mgpu_check.plugin.execution import Absent

    return Absent("rank")


@pytest.fixture(scope="session")
def gpus() -> Absent:
    """Give a test its GPUs, a tuple of torch.device, cuda:0 to cuda:N-1.

    The test runs in the node process, which sees all of them.
    """
    from mgpu_check.plugin.execution import Absent

    return Absent("gpus")


WORKER_REPORT = "mgpu_check"
WORKER_DEVICES = "mgpu_check_devices"


# Help texts: lower case, no full stop, the default last.
def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mgpu-check", "multi-GPU tests (mgpu-check)")
    for name, option in all_options().items():
        text = f"{option.help} (default: {option.default})"
        group.addoption(option.flag, default=None, help=text, **option.command_line)
        parser.addini(name, f"{option.help}; the same as {option.flag}", default=None)
    group.addoption(
        "--gpu-replay",
        metavar="EXAMPLE",
        default=None,
        help="run the one selected property with this example only; copy the value from the end of a failure's report",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    early_config.stash[WATCHED] = ExitStack()
    early_config.stash[WATCHED].enter_context(watching())
    early_config.add_cleanup(early_config.stash[WATCHED].close)
    complete_values(early_config, parser, args)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, backend=None, timeout=None): run this test on every rank of a world, once per size "
        "(default: on all GPUs)",
    )
    config.addinivalue_line(
        "markers",
        "gpus(n, least=n): this test needs n GPUs in one process, and gets exactly n; with least=n it needs n and "
        "gets all",
    )
    for line in unknown_variables(os.environ):
        config.issue_config_time_warning(pytest.PytestConfigWarning(f"mgpu-check: {line}"), stacklevel=2)
    try:
        settings = resolve(
            {name: config.getoption(name, None) for name in all_options()},
            os.environ,
            {name: value for name in all_options() if (value := config.getini(name)) is not None},
            # From the `mgpu-check` command that has called pytest, if any.
            next((p.origin_of for p in config.pluginmanager.get_plugins() if hasattr(p, "origin_of")), str),
        )
    except ValueError as error:
        raise pytest.UsageError(f"mgpu-check: {error}") from None
    activate(settings)
    _export_arithmetic(config, settings)
    _add_tests_of_applications(config, settings)
    if not settings.asked and WATCHED in config.stash:
        config.stash[WATCHED].close()
    from mgpu_check.plugin.session import GpuSession, register

    config.stash[SESSION] = GpuSession(settings)
    register(config, config.stash[SESSION])
    config.pluginmanager.register(Adapting(config.stash[SESSION]))


def _export_arithmetic(config: pytest.Config, settings: Settings) -> None:
    """Let every process of the run find the arithmetic of its simulated devices, until the run ends."""
    before, text = os.environ.get(ARITHMETIC_VARIABLE), str(settings.simulate_arithmetic)
    if settings.simulate and text != str(parse_arithmetic(before or "")):
        os.environ[ARITHMETIC_VARIABLE] = text
        config.add_cleanup(functools.partial(os.environ.__setitem__, ARITHMETIC_VARIABLE, before or ""))


def _add_tests_of_applications(config: pytest.Config, settings: Settings) -> None:
    """Let pytest collect the tests of applications that an option asks for, in the process of the user's tests."""
    for name, application in applications().items():
        if application.options is None or not application.asked_by:
            continue
        chosen = getattr(settings.of(application.options), application.asked_by)
        folder = Path(__file__).parents[1] / name
        if not chosen or any(word.startswith((application.package, str(folder))) for word in config.args):
            continue
        flag = all_options()[application.asked_by].flag
        if not settings.asked:
            raise pytest.UsageError(f"{flag}: say how many devices to use, such as --gpus=4")
        if config.getoption("dist", "no") != "no" or hasattr(config, "workerinput"):
            raise pytest.UsageError(f"{flag}: its tests run in one process; leave out -n, or run it on its own")
        config.args.append(str(folder))


def _where(item: pytest.Item) -> str | None:
    return item.stash[NEEDS].where if NEEDS in item.stash else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the user's command line, and the devices, to an xdist worker before it starts."""
    node.workerinput[WORKER_REPORT] = dataclasses.asdict(_invocation(node.config))
    session = node.config.stash[SESSION]
    if session.settings.asked and node.gateway.spec.popen:
        node.workerinput[WORKER_DEVICES] = session.hand_over()


def _invocation(config: pytest.Config) -> Invocation:
    if INVOCATION not in config.stash:
        from mgpu_check.plugin.report import replay

        worker_report = getattr(config, "workerinput", {}).get(WORKER_REPORT)
        config.stash[INVOCATION] = (
            replay.Invocation.of(config) if worker_report is None else replay.Invocation.rebuilt(worker_report)
        )
    return config.stash[INVOCATION]


def pytest_unconfigure(config: pytest.Config) -> None:
    activate(None)
    session = config.stash.get(SESSION, None)
    if session is not None:
        session.close()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    gpu_session = session.config.stash[SESSION]
    if session.config.getoption("usepdb", False) and session.config.pluginmanager.has_plugin("pdbinvoke"):
        from mgpu_check.plugin.report.failures import PostMortem

        own = session.config.pluginmanager.unregister(name="pdbinvoke")
        session.config.pluginmanager.register(PostMortem(own, _where), "pdbinvoke")
    if not gpu_session.settings.asked or session.config.option.collectonly:
        return
    from mgpu_check.devices.leases import LeaseError
    from mgpu_check.plugin.report import terminal

    if problem := without_torch() or wrong_launch(os.environ):
        raise pytest.UsageError(f"mgpu-check: {problem}")
    gpu_session.on_wait = functools.partial(terminal.tell, session.config)
    # Under pytest-xdist, the controller has already counted the devices.
    worker_input = getattr(session.config, "workerinput", None)
    try:
        gpu_session.find_keeper()
        if worker_input is None:
            gpu_session.count_devices()
        else:
            gpu_session.take_over(worker_input.get(WORKER_DEVICES), worker_input["testrunuid"])
    except (TooFewDevices, LeaseError, StartupFailure) as error:
        raise pytest.UsageError(f"mgpu-check: {error}") from None
    activate(gpu_session.settings)
    if worker_input is None and session.config.pluginmanager.has_plugin("dsession"):
        if is_launched():
            raise pytest.UsageError("mgpu-check: -n is for one machine, but a launcher has started the ranks; omit -n")
        gpu_session.close()  # because the workers start their own processes


def pytest_report_header(config: pytest.Config) -> str | None:
    session = config.stash[SESSION]
    return session.header() if session.settings.asked else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    hosts = metafunc.config.stash[SESSION].settings.per_host
    if mark is not None and (len(mark.args) > 1 or (mark.args and len(hosts) > 1)):
        try:
            sizes = placements(sizes_of(mark), hosts)
        except pytest.UsageError:
            return  # `needs_of` reports it as an error of this test, not of the whole collection
        metafunc.fixturenames.append(SIZE_PARAMETER)
        metafunc.parametrize(SIZE_PARAMETER, list(sizes.values()), ids=list(sizes))
    elif len(hosts) > 1 and in_one_process(metafunc.definition):
        metafunc.fixturenames.append(HOST_PARAMETER)
        metafunc.parametrize(HOST_PARAMETER, range(len(hosts)), ids=[f"host={host}" for host in range(len(hosts))])


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
    """Apply ``--gpu-replay``, and start the ranks in the background, while pytest sets up the first test.

    ``--gpu-replay`` makes the one selected property run a single example. If some test needs ranks, also start to
    record what fixtures replace in modules, because ranks must repeat it. With ``--collect-only``, do nothing. Raises
    `pytest.UsageError`: ``--gpu-replay`` does not fit the selected tests. In an xdist worker, each test fails
    instead.
    """
    gpu_session = session.config.stash[SESSION]
    if session.config.getoption("gpu_replay") and not session.config.option.collectonly:
        from mgpu_check.plugin.report import replay

        misuse = replay.apply_replay(session.config.getoption("gpu_replay"), session.items)
        if misuse is not None and not hasattr(session.config, "workerinput"):
            raise pytest.UsageError(misuse)
        if misuse is not None:
            for item in session.items:
                item.stash[MISUSE] = misuse  # because a usage error in an xdist worker would look like a crash
    wanted = any(NEEDS in item.stash for item in session.items)
    if wanted and gpu_session.settings.asked and not session.config.option.collectonly:
        from mgpu_check.plugin.execution import record_replacements
        from mgpu_check.plugin.session import started

        gpu_session.preload += used_by_ranks(session.items)
        started(gpu_session.pool.start)
        record_replacements(session)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if MISUSE in item.stash:
        pytest.fail(item.stash[MISUSE], pytrace=False)
    needs = item.stash.get(NEEDS, None)
    session = item.config.stash[SESSION]
    if not session.settings.asked and needs is None:
        return
    from mgpu_check.plugin.session import adopt, begin

    session.on_ranks = functools.partial(adopt, item, session)
    session.forget_test()
    if needs is None:
        return
    if item.config.getoption("trace", False) and needs.where != "parent":
        from mgpu_check.plugin.report.failures import REFUSED_TRACE

        pytest.fail(REFUSED_TRACE, pytrace=False)
    lack = session.lack(needs.count or needs.least, needs.host if needs.where == "node" else None)
    if lack and session.settings.strict_gpus:
        pytest.fail(f"{lack} (--strict-gpus)", pytrace=False)
    if lack:
        from mgpu_check.plugin.report import outcomes

        outcomes.add_lack(item, lack)
        raise pytest.skip.Exception(lack, _use_item_location=True)
    begin(item, needs, session)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    needs, session = pyfuncitem.stash.get(NEEDS, None), pyfuncitem.config.stash[SESSION]
    if needs is None:
        with replaced(session.test, "in_body", True):
            return (yield)
    from mgpu_check.plugin.execution import running

    try:
        with running(pyfuncitem, needs, session):
            return (yield)
    except pytest.UsageError as error:
        misuse = str(error)
    except BaseException as error:
        replays = pyfuncitem.config.getoption("gpu_replay") and session.test.examples
        if replays and type(error).__name__ == "DidNotReproduce":
            return True  # Hypothesis raises an error if the example passes, but for a replay that is the good case
        if not isinstance(error, RankFailure):
            raise
        mark = pyfuncitem.get_closest_marker("xfail")
        if mark is None or not mark.kwargs.get("raises") or error.__cause__ is None:
            raise
        pyfuncitem.stash[TOLD] = error
        raise error.__cause__ from None  # xfail(raises=...) expects the error of the rank
    pytest.fail(misuse, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if NEEDS not in item.stash or not isinstance(item, TestCaseFunction):
        return (yield)
    from mgpu_check.plugin.execution import running  # unittest does not call `pytest_pyfunc_call`

    with running(item, item.stash[NEEDS], item.config.stash[SESSION]):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        session = item.config.stash[SESSION]
        session.on_ranks = lambda: None
        if NEEDS in item.stash:
            activate(session.settings)
            session.end_test(failed=item.stash.get(FAILED, True))
            if reason := over():
                item.session.shouldfail = f"mgpu-check: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if NEEDS not in item.stash:
        return (yield)
    from mgpu_check.plugin.report import failures, outcomes, replay

    session = item.config.stash[SESSION]
    # unittest catches errors itself. pytest fetches them from the item in this hook (_pytest/unittest.py, 9.2).
    caught = call.excinfo or next(iter(getattr(item, "_excinfo", None) or ()), None)
    error = caught.value if caught is not None else None
    if call.when == "call" and item.stash.get(TOLD, None) is not None:
        error, item.stash[TOLD] = item.stash[TOLD], None
    replay.take_blobs(error)
    if call.when == "setup":
        needs = item.stash[NEEDS]
        several = needs.where == "node" and len(session.settings.per_host) > 1
        outcomes.add_identity(item, needs.host if several else None)
    if call.when == "call" or error is not None:
        failures.add_output(item, session.output(), call.when)
        outcomes.add_usage(item, session)
    if call.when == "call":
        item.stash[FAILED] = error is not None
    if error is not None and not item.config.option.fulltrace:
        failures.hide_engine(error)
    if isinstance(error, StartupFailure) and error.cause == NO_IMPORT:
        item.session.shouldfail = "mgpu-check: no rank can start, because an import fails"
    report = yield
    if report.outcome == "failed":
        if call.excinfo is not None and error is not None and error is not call.excinfo.value:
            call.excinfo = pytest.ExceptionInfo.from_exception(error)
        failures.replace_traceback(item, report, call, session, in_parent=item.stash[NEEDS].where == "parent")
        lines = replay.lines_for(item, _invocation(item.config), error, item.config.getoption("gpu_replay"))
        if item.config.option.tbstyle != "line":
            failures.add_replay(report, lines)
        outcomes.add_failure(item, error, lines, session.settings.simulate is not None)
        report.user_properties = list(item.user_properties)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    gpu_session = session.config.stash[SESSION]
    gpu_session.finish(interrupted=session.exitstatus == pytest.ExitCode.INTERRUPTED)
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        if gpu_session.notes.interrupted:
            from mgpu_check.plugin.report import terminal

            # Here, because the controller no longer listens.
            terminal.tell(session.config, gpu_session.notes.interrupted)
        output[WORKER_REPORT] = dataclasses.asdict(gpu_session.notes)
    if gpu_session.notes.deaths and output is None:
        from mgpu_check.plugin.report import failures

        failures.add_idle_case(session.config, gpu_session.notes.deaths)
    if gpu_session.notes.deaths and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Collect the remarks of an xdist worker that has ended, for the summary in this process."""
    node.config.stash[SESSION].notes.add(getattr(node, "workeroutput", {}).get(WORKER_REPORT, {}))


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    if report.when != "call" or report.outcome != "passed" or not getattr(report, "user_properties", None):
        return None  # a quick exit, because most tests have no known defects
    from mgpu_check.plugin.report import outcomes

    return ("KNOWN", "k", "KNOWN") if outcomes.defects_met(report)[0] else None


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from mgpu_check.plugin.report import terminal

    terminal.print_summary(terminalreporter, config.stash[SESSION])
