"""Measure tests of PyTorch on forked ranks, beside their own harness: results of each test, and seconds of each file.

    python benchmarks/adapted.py path/to/pytorch/test/distributed test_c10d_object_collectives.py tensor/test_api.py

PyTorch's tests are not in its wheel: take a checkout of the version that is installed. They need ``expecttest``. Each
file runs in turns in its own harness and with ``--adapt-torch-tests``. Prints a table, and each test whose results
differ; ``--json FILE`` writes outcomes and seconds too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

OWN, ADAPTED = "own", "adapted"
OPTIONS = {OWN: [], ADAPTED: ["--adapt-torch-tests"]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of PyTorch's tests")
    parser.add_argument("files", nargs="+", help="test files, relative to the directory")
    parser.add_argument("-k", dest="pattern", default="", help="only tests that this expression of pytest selects")
    parser.add_argument("--repeat", type=int, default=1, help="times that each file runs in each harness (default: 1)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def outcomes(report: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit file."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}.{case.get('name')}"] = kinds[0] if kinds else "passed"
    return found


def measured(directory: Path, file: str, pattern: str, harness: str) -> dict[str, Any]:
    """Run a file, and return outcomes, seconds, and seconds of processor time of all processes."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider", f"--rootdir={directory}"]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, f"--junitxml={report}", "-k", pattern, *OPTIONS[harness]],
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, _, usage = os.wait4(process.pid, 0)
        return {
            "seconds": time.monotonic() - began,
            "processor": usage.ru_utime + usage.ru_stime,
            "outcomes": outcomes(report) if report.exists() else {},
        }


def differences(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a line for each test that has not the same outcome in all runs of both harnesses."""
    lines = []
    for test in sorted({test for run in [*runs[OWN], *runs[ADAPTED]] for test in run["outcomes"]}):
        own, adapted = ({run["outcomes"].get(test, "absent") for run in runs[harness]} for harness in (OWN, ADAPTED))
        if own != adapted or len(own) > 1:
            lines.append(f"{test}: own harness {', '.join(sorted(own))}; adapted {', '.join(sorted(adapted))}")
    return lines


def main() -> None:
    asked = arguments()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    lines: list[str] = []
    print("| file | results | own harness | adapted | ratio | processor: own | adapted | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for file in asked.files:
        runs: dict[str, list[dict[str, Any]]] = {OWN: [], ADAPTED: []}
        for _ in range(asked.repeat):
            for harness in (OWN, ADAPTED):
                runs[harness].append(measured(asked.directory, file, asked.pattern, harness))
        found[file] = runs
        if not all(run["outcomes"] for each in runs.values() for run in each):
            sys.exit(
                f"{file}: a harness ran no test of it; is it below {asked.directory}, and is expecttest installed?"
            )
        cells = [
            f"`{file}`",
            ", ".join(f"{n} {what}" for what, n in Counter(runs[OWN][0]["outcomes"].values()).items()),
        ]
        for kind in ("seconds", "processor"):
            own, adapted = (min(run[kind] for run in runs[harness]) for harness in (OWN, ADAPTED))
            cells += [f"{own:.1f} s", f"{adapted:.1f} s", f"{own / adapted:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        lines += [f"{file}: {line}" for line in differences(runs)]
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1))
    print("\n".join(["", *lines] if lines else ["", "each test has the same outcome in both harnesses"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
