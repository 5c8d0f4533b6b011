"""`mgpu-check accept history DIR`: show each GPU over the reports of a directory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mgpu_check.acceptance.report.history import history, lines
from mgpu_check.acceptance.report.values import encoded
from mgpu_check.cli.codes import RIGHT, UNDECIDED, WRONG, Parser

_EPILOG = """\
exit codes: 0 no GPU got worse; 1 a GPU got worse: it became slower and the others of its model did not, an error
counter grew faster than allowed, or the last report accuses it and the one before does not; 2 undecided: a file could
not be read, or too few other GPUs show whether one became slower; 4 wrong usage, or no report.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-check accept history",
        description="Follow each GPU by serial number over the JSON reports in a directory and those below it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a directory of JSON reports")
    parser.add_argument("--json", action="store_true", help="print the history as JSON")
    parser.add_argument("--gpu", metavar="SERIAL", help="show only the GPU with this serial number or UUID")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    given = parser.parse_args(list(argv))
    try:
        found = history(given.directory)
        if given.gpu and not any(given.gpu in (gpu.key, gpu.uuid) for gpu in found.gpus):
            raise ValueError(f"--gpu={given.gpu}: no report has this serial number or UUID")
    except ValueError as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps({"format": "mgpu-check history", "version": 1, **encoded(found)}, indent=1))
    else:
        print("\n".join(lines(found, given.gpu or "")))
    if found.have("worse"):
        return WRONG
    return UNDECIDED if found.broken or found.have("undecided") else RIGHT
