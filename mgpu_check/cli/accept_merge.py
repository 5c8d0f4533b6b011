"""`mgpu-check accept merge a.json b.json ...`: join the reports of many nodes into one."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from mgpu_check.acceptance.report import text
from mgpu_check.acceptance.report.files import check_paths, write
from mgpu_check.acceptance.report.merge import merge
from mgpu_check.acceptance.report.values import read
from mgpu_check.acceptance.report.view import headline
from mgpu_check.acceptance.run_report import EXIT_CODES, RunReport
from mgpu_check.cli.codes import INTERNAL_ERROR, Parser
from mgpu_check.option_values import ACCEPTANCE_SUFFIXES

_EPILOG = """\
exit codes: the worst verdict counts: 1 a node is REJECTED; 5 a node is SUSPECT: slower than at least two others with
the same GPU model and software, which agree; 2 a node is INCONCLUSIVE; 0 all nodes are ACCEPTED; 3 internal error;
4 wrong usage.
A GPU that a later report has in another host makes its old node INCONCLUSIVE.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-check accept merge",
        usage="mgpu-check accept merge FILE.json FILE.json ... [--report=FILE.html|.json|.prom]",
        description="Join the JSON reports of many nodes into one, and name the nodes that differ from the others.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE.json", help="a report of `mgpu-check accept --report=FILE.json`"
    )
    parser.add_argument(
        "--report",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help=f"write a report of all nodes; the suffix is the format: {', '.join(ACCEPTANCE_SUFFIXES)}; can be given "
        "several times",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Join the reports of `argv`, write the result, and return the exit code of the worst verdict."""
    parser = _parser()
    given = parser.parse_args(list(argv))
    try:
        check_paths(given.report)
        reports: dict[str, RunReport] = {}
        for path in given.files:
            if str(path) in reports:
                raise ValueError(f"{path} is given twice; give the report of each node once")
            reports[str(path)] = read(path)
        report = merge(reports, shlex.join(["mgpu-check", "accept", "merge", *argv]))
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(text.lines(report)))
    for path in given.report:
        try:
            write(path, report)
        except OSError as error:
            print(f"mgpu-check accept merge: {path} cannot be written: {error.strerror}")
            return INTERNAL_ERROR
    print(headline(report))
    return EXIT_CODES[report.verdict.kind]
