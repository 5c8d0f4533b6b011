"""``mgpu-check accept lint FILE...``: check the thresholds in baselines and tables of floors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mgpu_check.acceptance.lint import lint, lint_floors
from mgpu_check.acceptance.skus import TABLE, packaged_floors
from mgpu_check.cli.codes import RIGHT, WRONG, WRONG_USAGE, Parser

_DESCRIPTION = (
    "Find thresholds that no node can miss, or that every node misses: wrong units; floors of zero, for a PCIe "
    "generation below the card's, or far below the data sheet; too few repeats; sizes with low bandwidth; baselines "
    "of a defective node."
)
_EPILOG = """\
FILE is a baseline (--record-baseline of mgpu-check accept) or a table of floors. Without FILE, the table of this
package is checked.

exit codes: 0 nothing found; 1 something found, one line each; 4 a file cannot be read, or is neither.
"""


def main(argv: Sequence[str]) -> int:
    """Check the files, and print one line per finding.

    Args:
        argv: the arguments after ``mgpu-check accept lint``.

    Returns:
        The exit code.
    """
    parser = Parser(
        prog="mgpu-check accept lint",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path)
    files: list[Path] = parser.parse_args(argv).files
    remarks = [] if files else lint_floors(packaged_floors())
    unread = False
    for file in files:
        try:
            remarks += lint(file)
        except ValueError as error:
            unread = True
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
    for remark in remarks:
        print(remark)
    what = f"{len(files)} files" if len(files) > 1 else str(files[0]) if files else TABLE
    print(f"{what}: {f'{len(remarks)} found' if remarks else 'could not all be read' if unread else 'nothing found'}")
    return WRONG_USAGE if unread else WRONG if remarks else RIGHT
