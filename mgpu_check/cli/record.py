"""``mgpu-check record --gpus=4 --out=a.trace -- train.py --args``: write the trace of a run, for comparisons."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from mgpu_check.cli import simulate
from mgpu_check.cli.codes import INTERRUPTED, Parser
from mgpu_check.cli.compare import write_recorded
from mgpu_check.cli.run_options import add_run_options, counted, plan_of, script_command, writable
from mgpu_check.compare.comparison import ScriptComparison
from mgpu_check.compare.traces.files import INSTALL, installed
from mgpu_check.compare.traces.recording import RunRecording

_USAGE = (
    "mgpu-check record --out=FILE.trace [--gpus=N] [--simulate[=cpu|cuda:I]] [--steps=N] [--timeout=SECONDS]\n"
    "                         [--fresh-directory] [--values=SIZE] [--no-rounding] [--fake-data[=PLAN]]\n"
    "                         -- script.py [args...]\n"
    "       mgpu-check record [...] -- -m module [args...]"
)
_EPILOG = """\
exit codes:
  0 recorded   1 the script fails or hangs   2 the script is not repeatable, or makes no optimizer step
  3 internal error of mgpu-check   4 wrong usage   130 interrupted
Compare two traces with: mgpu-check compare A.trace B.trace.
"""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_VALUES = 256 * 10**6


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+) ?(|KB|MB|GB)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give bytes, or a number with KB, MB or GB: 256MB")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size and not installed():
        raise argparse.ArgumentTypeError(f"values need safetensors, not installed here; do: {INSTALL}; or give 0")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-check record",
        usage=_USAGE,
        description="Run an unchanged training script on N ranks, and write a trace of its parameters, gradients, "
        "optimizer states, losses and batches at each step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_options(parser, "record")
    add = parser.add_argument
    add("--out", type=writable, metavar="FILE", help="the trace to write; an existing file is replaced")
    text = "keep values of gradients and parameters, of the first steps, up to this size (default: 256MB); requires "
    add("--values", type=_size, metavar="SIZE", help=text + INSTALL)
    text = "do not run the script once more to measure what rounding moves"
    add("--no-rounding", action="store_true", help=text)
    return parser


def main(argv: Sequence[str]) -> int:
    """Record the script of `argv`, and return the exit code: see ``--help``."""
    parser = _parser()
    try:
        own, program = simulate.split_program(argv, parser)
        options = parser.parse_args(own)
        command = script_command(program, parser)
        if options.out is None:
            parser.error("--out is missing: give the trace to write, as in --out=a.trace")
        count = counted(options, command, [options.gpus], parser)
        default = _VALUES if installed() else 0
        values = options.values if options.values is not None else default
        plan = plan_of(options, program, command, count)
        print(f"mgpu-check record: {plan.shown}: {options.gpus} rank{'s' * (options.gpus > 1)}{plan.note}", flush=True)
        if options.values is None and not values:
            print(f"  values are not recorded without safetensors: {INSTALL}", flush=True)
        recording = RunRecording(options.out.name, ScriptComparison(plan), values, rounding=not options.no_rounding)
        with plan.fake or nullcontext():
            return write_recorded(recording, options.out)
    except KeyboardInterrupt:
        print("mgpu-check record: interrupted; all processes are ended", file=sys.stderr)
        return INTERRUPTED
