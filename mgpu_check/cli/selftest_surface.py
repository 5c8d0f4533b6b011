"""`mgpu-check selftest --surface`: run the suite, record which calls of torch it makes, and print what is never
drawn."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from mgpu_check.asserts.surface import heard_by
from mgpu_check.cli.codes import WRONG_USAGE
from mgpu_check.cli.suite import command_line, run
from mgpu_check.plugin.planting import Planting
from mgpu_check.plugin.report.progress import Progress
from mgpu_check.suite.surface.report import SurfaceRecord, report

FLAG = "--surface"


def main(arguments: Sequence[str], typed: Sequence[str], file: str) -> int:
    """Run the suite, print the table of its surface, and return pytest's exit code, or 1 if a variant is undrawn.

    Args:
        arguments: those of pytest.
        typed: the command line without the flag.
        file: the record to continue and to rewrite; "" for none.
    """
    path = Path(file)
    try:
        record = SurfaceRecord.read(path) if file and path.exists() else SurfaceRecord()
    except ValueError as error:
        print(f"mgpu-check selftest: {FLAG}={file}: {error}", file=sys.stderr)
        return WRONG_USAGE
    word = f"{FLAG}={file}" if file else FLAG
    code = run(arguments, [Progress(), Surface(record), command_line(("selftest", word), arguments, typed)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code
    if file:
        record.write(path)
    text, undrawn = report(record)
    print(text, flush=True)
    return code or int(undrawn > 0)


class Surface:
    """A pytest plugin that records on all ranks which calls of torch the checks make."""

    def __init__(self, record: SurfaceRecord) -> None:
        self.record = record

    def pytest_configure(self, config: pytest.Config) -> None:
        if config.getoption("dist", "no") != "no":
            raise pytest.UsageError(
                f"mgpu-check selftest: {FLAG} records in one process, and cannot use several: leave out -n"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        from mgpu_check.plugin.stash import SESSION
        from mgpu_check.suite.surface.recorder import RECORDING

        item.config.stash[SESSION].fault = Planting(RECORDING, "")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        with heard_by(self.record.add):
            return (yield)
