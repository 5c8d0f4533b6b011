"""`mgpu-check selftest`: plant every fault, run the checks of its property, print who catches what."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator, Sequence

import pytest

from mgpu_check.cli.suite import asks_for_gpus, run
from mgpu_check.errors import RankDied, RankFailure, RankHang
from mgpu_check.faults.registry import PROPERTIES, Fault, all_faults
from mgpu_check.pytest_plugin.report.replay import CommandLine

__all__ = ["Selftest", "main"]

QUICK = "--quick"
_SHARE = 0.25  # of the examples that a check draws: enough to catch every fault, as the matrix shows
_PARAMETER = "planted_fault"
_CELL = "mgpu_check.cell"
CAUGHT, PASSED, SKIPPED, ERROR = "x", ".", "s", "e"


def main(argv: Sequence[str]) -> int:
    """Run the matrix of faults and checks; with `--quick`, each fault only for the checks that must catch it.

    Returns:
        0 if every check catches all faults that it must, there is one for each check, and every check passes without
        any; 1 if not; pytest's own exit code where the run itself did not work.
    """
    arguments = [argument for argument in argv if argument != QUICK]
    quick = len(arguments) < len(argv)
    if not asks_for_gpus(arguments):
        arguments = ["--gpus=4", "--simulate", *arguments]
    if not any(argument.partition("=")[0] == "--rank-timeout" for argument in arguments):
        arguments.append("--rank-timeout=20")
    plugin = Selftest(all_faults(), quick)
    line = ("selftest", QUICK) if quick else ("selftest",)
    code = run(arguments, [plugin, CommandLine(line, tuple(arguments))])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code
    return 0 if plugin.print_verdict() and code == pytest.ExitCode.OK else 1


class Selftest:
    """A pytest plugin that runs each check once without, and once with each, fault of its property.

    If `quick`, a check runs without a fault, and with those that it must catch.
    """

    def __init__(self, faults: dict[str, Fault], quick: bool = False) -> None:
        self.faults = faults
        self.quick = quick
        self.checks: dict[str, list[str]] = {name: [] for name in PROPERTIES}
        self.cells: dict[tuple[str, str], str] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        if config.getoption("dist", "no") != "no":
            raise pytest.UsageError(
                f"mgpu-check selftest: it plants faults in one process, and cannot share its tests with others: leave out "
                f"-n {config.getoption('numprocesses', None) or ''}".rstrip()
            )
        # Here, because pytest wants to see Hypothesis before anybody imports it.
        from mgpu_check.suite import budget

        budget.limit(_SHARE)

    def pytest_unconfigure(self) -> None:
        from mgpu_check.suite import budget

        budget.limit(None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        name = metafunc.module.__name__.rpartition(".test_")[2]
        mine = [fault for fault in self.faults.values() if fault.property == name]
        check = metafunc.definition.originalname
        names = [fault.name for fault in mine if check in fault.caught_by or not self.quick]
        metafunc.fixturenames.append(_PARAMETER)
        metafunc.parametrize(_PARAMETER, [None, *names], ids=["no fault", *names])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name, check = self._check_of(item)
            if check not in self.checks[name]:
                self.checks[name].append(check)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        from mgpu_check.pytest_plugin.stash import SESSION

        item.config.stash[SESSION].fault = _fault_of(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # The matrix is the table of this run.
        report.user_properties = [entry for entry in report.user_properties if entry[0] != "mgpu_check.property"]
        fault = _fault_of(item)
        if fault is None:
            return report
        key = fault, self._check_of(item)[1]
        if report.skipped:
            self.cells[key] = SKIPPED
        elif report.failed and report.when != "setup" and call.excinfo is not None:
            self.cells[key] = CAUGHT if _is_finding(call.excinfo.value) else ERROR
            report.outcome = "passed"  # of the check, which did what it is there for
            report.longrepr = None
            report.sections.clear()
            report.user_properties.append((_CELL, self.cells[key]))
        elif report.when == "call":
            self.cells[key] = PASSED
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        cell = str(dict(report.user_properties).get(_CELL, ""))
        return ("caught" if cell == CAUGHT else "no finding", cell, cell) if cell and report.when == "call" else None

    def _check_of(self, item: pytest.Item) -> tuple[str, str]:
        assert isinstance(item, pytest.Function)
        return item.module.__name__.rpartition(".test_")[2], item.originalname

    def print_verdict(self) -> bool:
        """Print the matrix, and what is wrong with it; whether nothing is."""
        for name in PROPERTIES:
            if self.checks[name]:
                self._print_matrix(name)
        caught = sum(cell == CAUGHT for cell in self.cells.values())
        print(
            f"\n{CAUGHT} caught, {PASSED} passed, {SKIPPED} skipped, {ERROR} an error that is no finding; {caught} of {len(self.cells)} pairs are caught"
        )
        wrong = [line for name in PROPERTIES if self.checks[name] for line in self._not_proven(name)]
        if not any(self.checks.values()):
            wrong.append("no check was run")
        for line in wrong:
            print(f"NOT PROVEN: {line}")
        counts = f"{len(self.faults)} faults, {sum(map(len, self.checks.values()))} checks"
        print(f"selftest: {counts}: " + ("every fault is caught, every check catches one" if not wrong else "FAILED"))
        sys.stdout.flush()
        return not wrong

    def _faults_of(self, name: str) -> list[Fault]:
        return [fault for fault in self.faults.values() if fault.property == name]

    def _print_matrix(self, name: str) -> None:
        """Print what came of each pair of check and fault of a property."""
        checks, faults = self.checks[name], self._faults_of(name)
        width = max(len(fault.name) for fault in faults)
        print(f"\n{name}")
        for number, check in enumerate(checks, 1):
            print(f"  {number:>2}  {check}")
        print(f"  {'':<{width}} {''.join(f'{number:>3}' for number in range(1, len(checks) + 1))}")
        for fault in faults:
            row = "".join(f"{self.cells.get((fault.name, check), ' '):>3}" for check in checks)
            print(f"  {fault.name:<{width}} {row}   {fault.summary}")

    def _not_proven(self, name: str) -> Iterator[str]:
        """Yield what the matrix of a property lacks."""
        checks, faults = self.checks[name], self._faults_of(name)
        for fault in faults:
            for check in fault.caught_by:
                if self.cells.get((fault.name, check), CAUGHT) != CAUGHT:
                    yield f"{check} does not catch the fault {fault.name}, which it must"
            if not any(self._caught(fault, check) for check in checks):
                yield f"no check of {name} catches the fault {fault.name}"
        for check in checks:
            if not any(self._caught(fault, check) for fault in faults):
                yield f"{check} catches no fault of {name}"

    def _caught(self, fault: Fault, check: str) -> bool:
        return self.cells.get((fault.name, check)) == CAUGHT


def _is_finding(error: BaseException) -> bool:
    """Return whether a check has reported something wrong, rather than broken down over the fault's own code."""
    if isinstance(error, BaseExceptionGroup):
        return any(_is_finding(part) for part in error.exceptions)
    if isinstance(error, RankFailure) and error.__cause__ is not None:
        return isinstance(error.__cause__, AssertionError)
    return isinstance(error, (RankDied, RankHang))


def _fault_of(item: pytest.Item) -> str | None:
    with contextlib.suppress(AttributeError):
        return item.callspec.params.get(_PARAMETER)  # type: ignore[attr-defined,no-any-return]
    return None
