"""`python -m tests.surface`: run the suite, record which calls of torch it makes, and print what is never drawn."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from mgpu_check.cli.codes import WRONG_USAGE
from mgpu_check.cli.suite import asks_for_gpus, at_standard, command_line, misuse, run
from mgpu_check.plugin.report.terminal import Progress
from mgpu_check.plugin.serialization import Planting
from mgpu_check.plugin.stash import SESSION
from tests.surface.recorder import written_to
from tests.surface.report import RECORD, SurfaceRecord, report

_RECORD = "--record"
_HELP = f"""\
usage: python -m tests.surface [{_RECORD}=FILE] [--gpus=N] [--simulate] [pytest arguments] [FILE[::CHECK] ...]

Runs the suite, records its calls of torch, and lists the functions and options that no check draws. Without --gpus it
simulates 4 GPUs. Without --gpu-level it runs at the level standard. All arguments of pytest work, except -n.

  {_RECORD}=FILE  continue the record in FILE, and rewrite it; default: {RECORD.name} beside this file

exit codes:
  0 all variants are drawn, or left out for a reason   1 a variant is undrawn, or a check fails   2 interrupted
  3 internal error   4 wrong usage   5 no test was run
"""


def main(argv: Sequence[str]) -> int:
    """Run the suite, print the table of its surface, and return pytest's exit code, or 1 if a variant is undrawn."""
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    typed = arguments = [word for word in argv if word.partition("=")[0] != _RECORD]
    records = [word for word in argv if word not in arguments]
    path = Path(records[-1].partition("=")[2]) if records else RECORD
    if not asks_for_gpus(arguments):
        arguments = ["--gpus=4", "--simulate", *arguments]
    arguments = at_standard(arguments)
    try:
        record = SurfaceRecord.read(path) if path.is_file() else SurfaceRecord()
        refused = misuse([*arguments, *records], {_RECORD: RECORD.name})
    except ValueError as error:
        refused = f"{_RECORD}={path}: {error}"
    if refused:
        print(f"tests.surface: {refused}", file=sys.stderr)
        return WRONG_USAGE
    with tempfile.TemporaryDirectory(prefix="surface-") as directory:
        plugins = [Progress(), Surface(Path(directory)), command_line((), arguments, typed)]
        code = run(arguments, plugins)
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return code
        record.add(written_to(Path(directory)))
    record.write(path)
    text, undrawn = report(record)
    print(text, flush=True)
    return code or int(undrawn > 0)


class Surface:
    """A pytest plugin that records on all ranks which calls of torch the checks make.

    Args:
        directory: where the ranks write their calls.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def pytest_configure(self, config: pytest.Config) -> None:
        if config.getoption("dist", "no") != "no":
            raise pytest.UsageError("tests.surface: it records in one process, and cannot use several: leave out -n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        item.config.stash[SESSION].fault = Planting("tests.surface.recorder:recording", str(self.directory))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
