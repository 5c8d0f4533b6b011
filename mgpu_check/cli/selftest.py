"""`mgpu-check selftest`: plant every fault, run the checks that must catch it, and print which check catches which
fault.

The results are a table of each pair of fault and check, and the verdict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mgpu_check.suite
from mgpu_check.cli.codes import WRONG_USAGE
from mgpu_check.cli.suite import asks_for_gpus, at_standard, command_line, files, misuse, refuse_workers, run
from mgpu_check.errors import RankDied, RankFailure, RankHang, UnexpectedError
from mgpu_check.plugin import private_names
from mgpu_check.plugin.serialization import Planting
from mgpu_check.plugin.session import FirstFailure
from mgpu_check.plugin.stash import FAILED, SESSION
from mgpu_check.processes.heap import importing
from mgpu_check.settings import activate, active
from mgpu_check.suite.common.faults.registry import FAULTS, PLANTER, PROPERTIES, Fault, all_faults
from mgpu_check.torch_hooks.patches import replaced

CAUGHT, PASSED, SKIPPED, ERROR = "x", ".", "s", "e"
ALONE = "X"  # in the table, in place of `CAUGHT`: caught by this check and by no other
_OF_SEEDS = 19, 20  # a check must catch each of its faults on at least 19 of 20 seeds


@dataclass
class PropertyMatrix:
    """The faults and checks of one property, and the outcomes of each pair that was tried.
    A `Selftest` makes one for each property, fills it while pytest collects and runs, and prints it at the end."""

    name: str
    faults: Sequence[Fault]
    checks: list[str] = field(default_factory=list)  # the checks that have run, in their order
    # (fault, check) -> the outcome of each try: `CAUGHT`, `PASSED`, `SKIPPED` or `ERROR`
    cells: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    complete: bool = True  # whether all faults of the property are planted, so that each check must catch at least one
    # pairs of (fault, check) that were deselected, as by ``-k``
    deselected: set[tuple[str, str]] = field(default_factory=set)
    # whether each fault is tried on all checks, so that each check must catch one that no other catches
    all_pairs: bool = False

    def add(self, fault: str, check: str, outcome: str) -> None:
        """Record the outcome of a try."""
        self.cells.setdefault((fault, check), []).append(outcome)

    def caught(self, fault: Fault, check: str) -> bool:
        """Return whether the check catches the fault; with several seeds, on at least 19 of 20."""
        tries = self.cells.get((fault.name, check), [])
        least, total = _OF_SEEDS
        return bool(tries) and tries.count(CAUGHT) * total >= least * len(tries)

    def caught_alone(self, fault: Fault, check: str) -> bool:
        """Return whether all checks of the property were tried on the fault, and only this check catches it."""
        all_tried = self.all_pairs and not any(fault.name == name for name, _ in self.deselected)
        return all_tried and [candidate for candidate in self.checks if self.caught(fault, candidate)] == [check]

    @property
    def pairs_caught(self) -> int:
        """Number of pairs whose check catches the fault."""
        return sum(self.caught(fault, check) for fault in self.faults for check in self.checks)

    @property
    def planted(self) -> Sequence[Fault]:
        """The faults that were planted: all except those deselected from every check."""
        tried = {fault for fault, _ in self.cells}
        left_out = {fault for fault, _ in self.deselected} - tried
        return [fault for fault in self.faults if fault.name not in left_out]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table: a row per planted fault, a column per check."""
        width = max((len(fault.name) for fault in self.planted), default=0)
        yield ""
        yield self.name
        for number, check in enumerate(self.checks, 1):
            yield f"  {number:>2}  {check}"
        yield f"  {'':<{width}} {''.join(f'{number:>3}' for number in range(1, len(self.checks) + 1))}"
        for fault in self.planted:
            row = "".join(f"{self._shown(fault, check):>3}" for check in self.checks)
            when = f" ({fault.condition})" if fault.condition else ""
            yield f"  {fault.name:<{width}} {row}   {fault.summary}{when}"

    def _shown(self, fault: Fault, check: str) -> str:
        """Return a cell: a letter for one try; for several tries, the number that caught the fault."""
        tries = self.cells.get((fault.name, check), [" "])
        if len(tries) > 1:
            return str(tries.count(CAUGHT))
        return ALONE if self.caught_alone(fault, check) else tries[0]

    def not_proven(self) -> Iterator[str]:
        """Yield a line for each missed fault, each fault that no check catches, and each check that catches no fault.
        If all pairs were tried, also for each check that catches no fault alone. Deselected pairs are ignored."""
        for fault in self.faults:
            if not set(self.checks) & set(fault.caught_by):
                continue
            partly = any((fault.name, check) in self.deselected for check in fault.caught_by)
            for check in fault.caught_by:
                tries = self.cells.get((fault.name, check))
                if tries and not self.caught(fault, check):
                    often = f" with {len(tries) - tries.count(CAUGHT)} of {len(tries)} seeds" if len(tries) > 1 else ""
                    yield f"{check} does not catch the fault {fault.name}, which it must{often}"
            if not partly and not any(self.caught(fault, check) for check in self.checks):
                yield f"no check of {self.name} catches the fault {fault.name}"
        deselected = {check for _, check in self.deselected}
        for check in self.checks if self.complete else ():
            if check in deselected:
                continue
            if not any(self.caught(fault, check) for fault in self.faults):
                yield f"{check} catches no fault of {self.name}"
            elif (
                self.all_pairs and not deselected and not any(self.caught_alone(fault, check) for fault in self.faults)
            ):
                yield f"{check} catches no fault of {self.name} that no other check catches"


def of_properties(
    faults: Mapping[str, Fault], chosen: set[str], *, all_pairs: bool = False
) -> dict[str, PropertyMatrix]:
    matrices = {}
    for name in PROPERTIES:
        all_of_it = [fault for fault in faults.values() if fault.property == name]
        selected = [fault for fault in all_of_it if fault.name in chosen]
        matrices[name] = PropertyMatrix(name, selected, complete=len(selected) == len(all_of_it), all_pairs=all_pairs)
    return matrices


_QUICK, _ALL_PAIRS, _SEEDS = "--quick", "--all-pairs", "--seeds"
_SHARE = 15  # `--quick` plants one fault in 15: enough to notice a broken check, in a fraction of the time
_PARAMETER = "planted_fault"
_CELL = "mgpu_check.cell"
_HELP = """\
usage: mgpu-check selftest [--quick] [--all-pairs] [--seeds=N] [--gpus=N] [--simulate] [pytest arguments]
                           [FILE[::CHECK] ...]

Plants each known fault, runs the checks that must catch it, and prints which check catches which fault. Also runs each
check without a fault. Without --gpus it simulates 4 GPUs. Without --gpu-level it plants faults at the level standard.
All arguments of pytest work, except -n: -k NAME, -x, ...

  --quick      plant the same 1/15 of the faults each time; skip checks without a fault to catch, and run the others
               without a fault at the level quick
  --all-pairs  try each fault on all checks of its property; require for each check a fault that no other check catches
  --seeds=N    try each pair with the seeds 0 to N-1; require that 19 of 20 catch the fault
  -k           run only pairs whose property, check or fault matches

exit codes:
  0 each check catches its faults   1 a fault is not caught, or a check fails without a fault   2 interrupted
  3 internal error   4 wrong usage   5 no test was run
"""


def main(argv: Sequence[str]) -> int:
    """Plant each fault for the checks that must catch it, and run every check without a fault; see ``--help``."""
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    ours = {_QUICK, _ALL_PAIRS}
    typed = arguments = [word for word in argv if word not in ours and not word.startswith(f"{_SEEDS}=")]
    own = tuple(word for word in argv if word not in arguments)
    seeds = [word.partition("=")[2] for word in own if word.startswith(_SEEDS)]
    if _SEEDS in arguments or any(not text.isdecimal() or int(text) < 1 for text in seeds):
        suffix = f"={seeds[-1]}" if seeds else ""
        print(f"mgpu-check selftest: {_SEEDS}{suffix}: give the number of seeds, such as {_SEEDS}=20", file=sys.stderr)
        return WRONG_USAGE
    if not asks_for_gpus(arguments):
        arguments = ["--gpus=4", "--simulate", *arguments]
    arguments = at_standard(arguments)
    if refused := misuse(arguments):
        print(f"mgpu-check selftest: {refused}", file=sys.stderr)
        return WRONG_USAGE
    with importing():  # of torch
        faults = all_faults()
    plugin = Selftest(faults, quick=_QUICK in own, all_pairs=_ALL_PAIRS in own, seeds=int(seeds[-1]) if seeds else 0)
    code = run(arguments, [plugin, command_line(("selftest", *own), arguments, typed)])
    if plugin.collects_only or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code
    return 0 if plugin.print_verdict() and code == pytest.ExitCode.OK else 1


@dataclass(frozen=True)
class _Try:
    """One run of a check. Without `fault`, no fault is planted; without `seed`, the seed of the whole run applies."""

    fault: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        return (self.fault or "no fault") + ("" if self.seed is None else f"-seed{self.seed}")


class Selftest:
    """A pytest plugin that runs each check without a fault, and with each fault that it must catch.

    `main` makes it and gives it to one run of pytest, whose hooks fill its matrices; `print_verdict` ends it.

    Without a fault, a check draws the number of examples of the level "quick". With a fault, it draws the number of the
    run's level, until the first example that fails. A `quick` run plants 1/15 of the faults; the choice depends only on
    their names. Checks without a fault to catch do not run then, and the others run without a fault at the level
    "quick". With `all_pairs`, each fault is tried on all checks of its property. `seeds` is the number of seeds to try
    each pair with; 0 for the seed of the run.
    """

    def __init__(
        self, faults: dict[str, Fault], *, quick: bool = False, all_pairs: bool = False, seeds: int = 0
    ) -> None:
        self.faults = faults
        self.chosen = {name for name in faults if not quick or zlib.crc32(name.encode()) % _SHARE == 0}
        self.quick, self.all_pairs, self.seeds, self.collects_only = quick, all_pairs, seeds, False
        self.matrices = of_properties(faults, self.chosen, all_pairs=all_pairs)
        self.out_of_reach: list[Fault] = []
        self._settings: dict[Any, Any] = {}

    @pytest.hookimpl(trylast=True)  # after the plugin, which makes the session
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[SESSION].preload += FAULTS
        self.collects_only = config.getoption("collectonly")
        refuse_workers(config, "mgpu-check selftest: the command plants faults in one process, and cannot use several")

    def pytest_collection(self) -> None:
        for matrix in self.matrices.values():
            reached = [fault for fault in matrix.faults if fault.least_gpus <= (active().gpus or 0)]
            self.out_of_reach += [fault for fault in matrix.faults if fault not in reached]
            matrix.faults = reached

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        name = metafunc.module.__name__.rpartition(".test_")[2]
        if name not in self.matrices:
            return  # a test of the user, which `pytest_collection_modifyitems` refuses
        check = metafunc.definition.originalname
        mine = [fault for fault in self.matrices[name].faults if self.all_pairs or check in fault.caught_by]
        drawn = getattr(metafunc.function, "is_hypothesis_test", False)
        seeds: Iterable[int | None] = range(self.seeds) if self.seeds and drawn else [None]
        tries = [_Try(fault.name, seed) for fault in mine for seed in seeds]
        if tries or not self.quick:
            tries.insert(0, _Try())
        metafunc.fixturenames.append(_PARAMETER)
        metafunc.parametrize(_PARAMETER, tries, ids=map(str, tries))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        foreign = [item for item in items if Path(mgpu_check.suite.__path__[0]) not in item.path.parents]
        if foreign:
            items.clear()  # pytest_collection_finish still gets them: _pytest/main.py, perform_collect, pytest 9.2
            raise pytest.UsageError(
                f"mgpu-check selftest: {foreign[0].path.name}::{foreign[0].name} is not a check of the packaged "
                f"suite, and no fault is planted for it: give options only, or one of {', '.join(files())}"
            )
        without = [item for item in items if _try_of(item) is None]  # an empty parameter set: nothing to run
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            tried = _try_of(item)
            if tried is not None and tried.fault is not None:
                name, check = _check_of(item)
                self.matrices[name].deselected.add((tried.fault, check))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name, check = _check_of(item)
            if check not in self.matrices[name].checks:
                self.matrices[name].checks.append(check)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        tried = _try_of(item)
        assert tried is not None
        session = item.config.stash[SESSION]
        session.fault = None if tried.fault is None else Planting(PLANTER, tried.fault)
        session.first_failure = tried.fault is not None
        self._draw(item, tried)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """With ``--quick``, run a check without a fault at the level "quick" in full, so with small tensors, too."""
        tried = _try_of(item)
        if self.quick and tried is not None and tried.fault is None:
            activate(dataclasses.replace(active(), gpu_level="quick"))

    def _draw(self, item: pytest.Item, tried: _Try) -> None:
        from hypothesis import Phase, settings

        from mgpu_check.oracles.strategies import at_level

        function: Any = getattr(item, "function", None)
        own_settings = self._settings.setdefault(function, getattr(function, private_names.SETTINGS, None))
        if own_settings is None:
            return
        few = at_level(own_settings, "quick") if tried.fault is None else own_settings
        setattr(function, private_names.SETTINGS, settings(few, phases=(Phase.explicit, Phase.generate)))
        setattr(function, private_names.SEED, tried.seed)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        tried = _try_of(item)
        planted = tried is not None and tried.fault is not None
        quick = replaced(item.config.option, "tbstyle", "value")  # the matrix shows no traceback
        with quick if planted and call.when != "setup" else contextlib.nullcontext():
            report = yield
        # Prevent the closing table: this run prints the matrix.
        report.user_properties = [entry for entry in report.user_properties if entry[0] != "mgpu_check.property"]
        if tried is None or tried.fault is None:
            return report
        outcome = None
        if report.skipped:
            outcome = SKIPPED
        elif report.failed and report.when != "setup" and call.excinfo is not None:
            outcome = CAUGHT if _is_finding(call.excinfo.value) else ERROR
            report.outcome = "passed"  # the check caught the fault, or its error is in the matrix
            report.longrepr = None
            report.sections.clear()
            report.user_properties.append((_CELL, outcome))
            if report.when == "call" and isinstance(call.excinfo.value, FirstFailure):
                item.stash[FAILED] = False  # the ranks can be reused, unless they are broken
        elif report.when == "call":
            outcome = PASSED
        if outcome is not None:
            name, check = _check_of(item)
            self.matrices[name].add(tried.fault, check, outcome)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
        if not isinstance(report, pytest.TestReport):
            return None
        cell = str(dict(report.user_properties).get(_CELL, ""))
        return ("caught" if cell == CAUGHT else "no finding", cell, cell) if cell and report.when == "call" else None

    def print_verdict(self) -> bool:
        """Print the matrix and everything that is not proven. Return whether everything is proven."""
        tried = [matrix for matrix in self.matrices.values() if matrix.checks]
        for matrix in tried:
            print("\n".join(matrix.lines()))
        caught, pairs = sum(matrix.pairs_caught for matrix in tried), sum(len(matrix.cells) for matrix in tried)
        alone = f"{ALONE} by this check alone, " if self.all_pairs and not self.seeds else ""
        how = f" by 19 of 20 of the seeds 0 to {self.seeds - 1}" if self.seeds else ""
        print(
            f"\n{CAUGHT} caught, {alone}{PASSED} passed, {SKIPPED} skipped, {ERROR} an error that is not a finding; "
            f"{caught} of {pairs} pairs are caught{how}"
        )
        failures = [line for matrix in tried for line in matrix.not_proven()]
        if not tried:
            failures.append("no check was run")
        for line in failures:
            print(f"NOT PROVEN: {line}")
        if self.out_of_reach:
            most = max(fault.least_gpus for fault in self.out_of_reach)
            fault_names = ", ".join(fault.name for fault in self.out_of_reach)
            hint = f"plant them with --gpus={most} --simulate"
            print(f"left out, because they occur in larger worlds only: {fault_names}; {hint}")
        planted, every = sum(len(matrix.planted) for matrix in tried), len(self.faults)
        fault_count = f"{every} faults" if planted == every else f"{planted} of {every} faults"
        counts = f"{fault_count}, {sum(len(matrix.checks) for matrix in tried)} checks"
        each = "every fault is caught" + ("" if self.quick else ", every check catches one")
        print(f"selftest: {counts}: " + (each if not failures else "FAILED"))
        sys.stdout.flush()
        return not failures


def _is_finding(error: BaseException) -> bool:
    """Return whether the error is a finding of the check, and not a crash in the planted fault's own code."""
    if isinstance(error, FirstFailure):
        return _is_finding(error.failure)
    if isinstance(error, BaseExceptionGroup):
        return any(_is_finding(nested) for nested in error.exceptions)
    if isinstance(error, (RankDied, RankHang)):
        return True
    if isinstance(error, RankFailure):
        return isinstance(error.__cause__, AssertionError) and not isinstance(error.__cause__, UnexpectedError)
    return isinstance(error, AssertionError)  # from a check that compares the ranks' results in the pytest process


def _check_of(item: pytest.Item) -> tuple[str, str]:
    assert isinstance(item, pytest.Function)
    return item.module.__name__.rpartition(".test_")[2], item.originalname


def _try_of(item: pytest.Item) -> _Try | None:
    callspec = getattr(item, "callspec", None)
    parameter = callspec.params.get(_PARAMETER) if callspec is not None else None
    return parameter if isinstance(parameter, _Try) else None
