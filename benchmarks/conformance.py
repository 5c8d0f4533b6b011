"""How much of a test file of PyTorch passes, unmodified, on a simulated node.

    mgpu-check simulate --gpus=2 -- benchmarks/conformance.py path/to/pytorch/test/distributed/test_data_parallel.py

PyTorch's tests are not in its wheel: take a checkout of the version that is installed. They need ``expecttest``. Any
file of ``unittest`` tests will do. Failures and skips are grouped by their cause, the last line of the error.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import importlib
import io
import json
import re
import signal
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path


class TookTooLong(BaseException):
    """Not an Exception: what a test expects to fail must not swallow it."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a test file of PyTorch")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose id this regular expression finds")
    parser.add_argument("--seconds", type=int, default=120, help="time of each test (default: 120)")
    parser.add_argument("--json", type=Path, help="keep outcome, cause and seconds of each test in this file")
    parser.add_argument("-v", dest="verbose", action="store_true", help="print each traceback")
    return parser.parse_args()


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        else:
            yield test


def cause(text: str) -> str:
    """The last line of a traceback that begins a message, with numbers that differ from run to run left out."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    first = [
        line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt|TookTooLong|Failed|Skip)\b", line)
    ]
    line = first[-1] if first else lines[-1] if lines else "?"
    return re.sub(r"0x[0-9a-f]+", "0x…", line)[:160]


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TookTooLong(f"after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(test: unittest.TestCase, seconds: int) -> tuple[str, str]:
    """Its outcome, and the text that says why it did not pass."""
    gc.collect()  # what the last test has left is in no figure of this one
    result = unittest.TestResult()
    try:
        with limited(seconds), contextlib.redirect_stdout(io.StringIO()):
            test(result)
    except TookTooLong as late:
        return "failed", f"TookTooLong: {late}"
    if result.skipped:
        return "skipped", f"Skip: {result.skipped[0][1]}"
    wrong = [*result.failures, *result.errors]
    if wrong:
        return "failed", wrong[0][1]
    return "passed", ""


def main() -> int:
    options = arguments()
    sys.argv[1:] = []  # PyTorch's tests read the command line
    sys.path.insert(0, str(options.file.resolve().parent))
    module = importlib.import_module(options.file.stem)
    vars(module).pop("load_tests", None)  # refuses classes of a module that is not the running script
    found = []
    for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if not re.search(options.pattern, test.id()):
            continue
        start = time.perf_counter()
        outcome, text = run(test, options.seconds)
        if options.verbose and outcome == "failed":
            print(f"--- {test.id()}\n{text}", flush=True)
        found.append((test.id(), outcome, cause(text) if text else "", round(time.perf_counter() - start, 2)))
    if options.json:
        keys = ("test", "outcome", "cause", "seconds")
        options.json.write_text(json.dumps([dict(zip(keys, row, strict=True)) for row in found], indent=1) + "\n")
    for outcome in ("failed", "skipped"):
        causes = collections.Counter(why for _, how, why, _ in found if how == outcome)
        for why, count in causes.most_common():
            names = [name.rpartition(".")[2] for name, how, other, _ in found if (how, other) == (outcome, why)]
            print(f"{outcome} {count:4}  {why}\n              {', '.join(names[:4])}{' …' if count > 4 else ''}")
    counts = collections.Counter(how for _, how, _, _ in found)
    ran = counts["passed"] + counts["failed"]
    share = f"{100 * counts['passed'] / ran:.1f} %" if ran else "-"
    print(
        f"{options.file.name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped; "
        f"{share} of those that ran passed, {sum(row[3] for row in found):.0f} s"
    )
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
