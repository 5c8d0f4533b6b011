"""Pytest hooks of the acceptance: start and end its run, begin a section of the log for each test, and report the
verdict."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from mgpu_check.acceptance.application import APPLICATION
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.plan import CHECKS, Plan, Selection, soak_of
from mgpu_check.acceptance.report.progress import Live
from mgpu_check.acceptance.report.summary import headline, lines
from mgpu_check.acceptance.run import Run
from mgpu_check.acceptance.run_report import EXIT_CODES, RunReport
from mgpu_check.acceptance.verdict import LOCALISATION_SECONDS
from mgpu_check.devices.observations import Observation
from mgpu_check.option_values import depth_of
from mgpu_check.plugin.ranks import Ranks
from mgpu_check.plugin.report.replay import Invocation
from mgpu_check.plugin.stash import INVOCATION, SESSION
from mgpu_check.processes.child_processes import EndOnRequest
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.settings import OPTIONS

RUN: pytest.StashKey[Run] = pytest.StashKey()
REPORT: pytest.StashKey[RunReport] = pytest.StashKey()
SEEN: pytest.StashKey[str] = pytest.StashKey()

ENDING = EndOnRequest()

_HERE = Path(__file__).parent
_MOST_LINES = 8
_TOGETHER = "an acceptance uses all GPUs at once, and runs in one process: leave -n out"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "glance(only): the level glance has this check; with only=True no other has")
    ENDING.begin()


def pytest_collection(session: pytest.Session) -> None:
    """Start the fork server of simulated GPUs, which imports torch, while pytest imports the checks."""
    gpu_session = session.config.stash[SESSION]
    if gpu_session.settings.simulate == "cpu" and gpu_session.settings.gpus and not session.config.option.collectonly:
        gpu_session.pool.start()


def pytest_unconfigure() -> None:
    ENDING.end()


def _check_of(item: pytest.Item) -> str:
    return item.path.stem.removeprefix("test_")


def _ours(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if _HERE in item.path.parents]


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest, ranks: Ranks) -> Node:
    """Give a check all GPUs of the run."""
    run = request.config.stash.get(RUN, None)
    if run is None:
        pytest.fail(f"mgpu-check: {_TOGETHER}", pytrace=False)
    assert run.node is not None
    return run.node


@pytest.fixture(autouse=True)
def _some_gpu_answers(node: Node) -> None:
    """Skip the remaining tests when all GPUs are lost: the verdict already names them and the missing checks."""
    if not node.numbers:
        pytest.skip("no GPU answers any more")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    config = session.config
    gpu_session = config.stash[SESSION]
    worker = hasattr(config, "workerinput")
    if config.option.collectonly or worker or not _ours(session.items) or not gpu_session.settings.asked:
        return (yield)
    try:
        plan = Plan.of(gpu_session.settings)
        run = Run(gpu_session, plan, _command(config), _seed(config), Selection.of(config, _HERE))
    except ValueError as error:
        raise pytest.UsageError(f"mgpu-check: {error}") from None
    config.stash[RUN] = run
    checks = {item.nodeid: _check_of(item) for item in _ours(session.items)}
    run.selected = set(checks.values())
    soak = run.plan.soak
    live = Live(config.pluginmanager.get_plugin("terminalreporter"), checks, {"soak": soak} if soak else None)
    config.pluginmanager.register(live, "mgpu_check_live")
    run.log.on_added = live.heard
    result: object = None
    stopped: BaseException | None = None
    try:
        live.phase("inventory of the GPUs")
        run.start()
        try:
            result = yield
        except session.Failed as failed:
            # pytest ends its loop so for -x and --maxfail (_pytest/main.py, pytest_runtestloop, pytest 9.2). The
            # failures so far are still repeated, and the exception is raised again after that.
            stopped = failed
        if any(run.log.failed_calls()):
            live.phase("second looks at failures", LOCALISATION_SECONDS[depth_of(run.plan.level)])
        run.look_again()
    except BaseException:
        run.interrupted = True
        run.ended_by = ENDING.by
        raise
    finally:
        ENDING.hold_off()
        live.end()
        run.end()
    if stopped is not None:
        raise stopped
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the checks by `CHECKS`: the most informative per second first, health last, because it covers all the
    others.

    Deselect the soak unless it was requested, and what the level does not have.
    """
    settings = config.stash[SESSION].settings

    def is_wanted(item: pytest.Item) -> bool:
        check = _check_of(item)
        if check == "soak":
            return soak_of(settings) is not None
        marked = item.get_closest_marker("glance")
        return marked is not None if settings.gpu_level == "glance" else not (marked and marked.kwargs.get("only"))

    left_out = [item for item in _ours(items) if not is_wanted(item)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    order = {f"test_{check}": index for index, check in enumerate(CHECKS)}
    items.sort(key=lambda item: order.get(item.path.stem, 0) if _HERE in item.path.parents else 0)


def _seed(config: pytest.Config) -> int | None:
    """Return the Hypothesis seed, or None if it is not a number."""
    # Hypothesis keeps a text that is no integer as its seed (_hypothesis_pytestplugin.py, Hypothesis 6.170).
    text = str(config.getoption("--hypothesis-seed", None))
    return int(text) if text.isdecimal() else None


def _command(config: pytest.Config) -> str:
    """Return the user's command line without the options that select checks."""
    invocation = config.stash.get(INVOCATION, None) or Invocation.of(config)
    words = invocation.command_for(APPLICATION)
    if not any(word.startswith(OPTIONS["gpu_level"].flag) for word in words):  # the default of plain pytest is another
        words.append(f"{OPTIONS['gpu_level'].flag}={config.stash[SESSION].settings.gpu_level}")
    return shlex.join(words)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Begin a section of the log for the test, and fail the test if an observation in it failed."""
    run = pyfuncitem.config.stash.get(RUN, None)
    if run is None or not _ours([pyfuncitem]):
        return (yield)
    section = run.log.begin(_check_of(pyfuncitem), pyfuncitem.name)
    try:
        result = yield
    finally:
        section.ended = run.log.now()
        if run.node is not None:
            run.node.mark(section.check, section.test)
    if section.failed:
        pyfuncitem.stash[SEEN] = "\n".join(_lines(section.failed))
        pytest.fail(pyfuncitem.stash[SEEN], pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the failed observations only. The verdict says how to repeat the whole check with the seed of the run."""
    report = yield
    run = item.config.stash.get(RUN, None)
    if run is None or not report.failed or not _ours([item]):
        return report
    if failure_text := item.stash.get(SEEN, ""):
        report.longrepr = failure_text
    elif item.name not in run.broken:
        run.broken.append(item.name)
    return report


def _lines(failed: list[Observation]) -> list[str]:
    groups = grouped((str(entry.subject), entry) for entry in failed)
    lines = []
    for subject, entries in groups[:_MOST_LINES]:
        case = f" ({entries[0].case})" if entries[0].case else ""
        lines.append(f"{subject}: {entries[0].seen}{case}" + (f"; and {len(entries) - 1} more" if entries[1:] else ""))
    if len(groups) > _MOST_LINES:
        lines.append(f"and {len(groups) - _MOST_LINES} more subjects")
    return lines


def _report(config: pytest.Config, run: Run) -> RunReport:
    if REPORT not in config.stash:
        config.stash[REPORT] = run.report()
    return config.stash[REPORT]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Set the exit code to that of the verdict, if the run reached one, and print the verdict as the last line.

    A launcher such as torchrun replaces the exit code by its own.
    """
    config = session.config
    run = config.stash.get(RUN, None)
    if run is None:
        return (yield)
    report = _report(config, run)
    if not run.interrupted and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = EXIT_CODES[report.verdict.kind]
    result = yield
    if (terminal := config.pluginmanager.get_plugin("terminalreporter")) is not None:
        terminal.write_line(headline(report))
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash.get(RUN, None)
    if run is None:
        return
    report = _report(config, run)
    terminalreporter.section("acceptance")
    for line in lines(report):
        terminalreporter.line(line)
    for line in run.write(report):
        terminalreporter.line(line)
