"""Run the clients: ``python benchmarks/clients/run.py [--only=WORD] [--list]``; exit code 0 if every verdict is right.

Each script runs on two simulated GPUs under `mgpu-check simulate` and `mgpu-check compare`, and what they train goes through the
gate. A table tells which verdicts are right, and in how many seconds. Clients of packages that are not installed are
left out, and counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clients import CLIENTS, GATES, Client, Expected

HERE = Path(__file__).parent
OURS = [sys.executable, "-m", "mgpu_check"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
PYTEST_INI = "[pytest]\npythonpath = .\naddopts = -p no:cacheprovider --import-mode=importlib\n"
LONGEST = 900.0  # seconds, for a client that hangs


@dataclass(frozen=True)
class Done:
    """A verdict, what is wrong with it (nothing: it is right), and the seconds that it took."""

    wrong: str
    seconds: float

    def __str__(self) -> str:
        return f"{'WRONG' if self.wrong else 'right'} {self.seconds:5.0f} s"


def environment() -> dict[str, str]:
    """Without what this run was given: no GPU, no launcher, no hub, one thread for each rank."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MGPU_CHECK_", "PYTEST_", "CUDA_VISIBLE"))}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def call(command: Sequence[str], directory: Path) -> tuple[int, str, float]:
    began = time.monotonic()
    try:
        ran = subprocess.run(
            command, cwd=directory, env=environment(), capture_output=True, text=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return -1, f"it was ended after {LONGEST:g} s", time.monotonic() - began
    return ran.returncode, ran.stdout + ran.stderr, time.monotonic() - began


def verdict(expected: Expected, command: Sequence[str], directory: Path, quiet: bool) -> Done:
    code, text, seconds = call(command, directory)
    wrong = []
    if code != expected.code:
        wrong.append(f"exit code {code} instead of {expected.code}")
    wrong += [f"{words!r} is not said" for words in expected.words if words not in text]
    wrong += [f"{words!r} is said" for words in expected.never if words in text]
    if wrong and not quiet:
        print(f"--- {' '.join(command[2:])}\n{text}\n---", flush=True)
    return Done("; ".join(wrong), seconds)


def simulated(client: Client, directory: Path, quiet: bool) -> Done:
    arguments = client.arguments if client.simulated is None else client.simulated
    launch = TORCHRUN if client.launched else []
    command = [*OURS, "simulate", "--gpus=2", "--", *launch, client.script, *arguments]
    return verdict(client.simulate, command, directory, quiet)


def compared(client: Client, directory: Path, quiet: bool) -> Done:
    options = ["--gpus=2", "--simulate", "--timeout=120", *client.options]
    return verdict(
        client.compare, [*OURS, "compare", *options, "--", client.script, *client.arguments], directory, quiet
    )


def gates(directory: Path, only: str, quiet: bool) -> dict[str, str]:
    """What is wrong with the verdict of the gate on each test; nothing where it is right."""
    report = directory / "gates.xml"
    names = [name for name in GATES if only in name]
    tests = [f"test_gates.py::{name}" for name in names]
    command = [*OURS, "pytest", "-q", "--gpus=2", "--simulate", f"--junitxml={report}", *tests]
    _, text, _ = call(command, directory)
    if not report.exists():
        return dict.fromkeys(names, f"pytest has left no report: {text[-2000:]}")
    found = {}
    for case in ET.parse(report).iter("testcase"):
        said = [p.get("value") or "" for p in case.iter("property") if p.get("name") == "mgpu_check.mistakes"]
        failed = case.find("failure") is not None or case.find("error") is not None
        mistake = said[0].split()[0] if said else ("failed otherwise" if failed else "")
        if case.find("skipped") is None:
            found[case.get("name") or ""] = (mistake, float(case.get("time") or 0))
    wrong = {}
    for name in names:
        if name not in found:
            continue
        mistake, seconds = found[name]
        right = mistake == GATES[name]
        print(f"  {name:<28} {Done('' if right else 'x', seconds)}   {mistake or 'passes'}", flush=True)
        if not right:
            wrong[name] = f"the gate says {mistake or 'nothing'!r} instead of {GATES[name] or 'nothing'!r}"
    if wrong and not quiet:
        print(text, flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="clients and gates with WORD in their names")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--quiet", action="store_true", help="do not print the output of what is wrong")
    given = parser.parse_args()
    chosen = [client for client in CLIENTS if given.only in client.name]
    if given.list:
        print("\n".join([client.name for client in CLIENTS] + list(GATES)))
        return 0
    wrong: dict[str, str] = {}
    missing = [client for client in chosen if client.package and importlib.util.find_spec(client.package) is None]
    with tempfile.TemporaryDirectory(prefix="mgpu-check-clients-") as made:
        directory = Path(made)
        for program in (HERE / "programs").glob("*.py"):
            shutil.copy(program, directory / ("test_gates.py" if program.name == "gates.py" else program.name))
        (directory / "pytest.ini").write_text(PYTEST_INI)
        print(f"  {'client':<24} {'simulate':<15} compare", flush=True)
        for client in chosen:
            if client in missing:
                continue
            one, two = simulated(client, directory, given.quiet), compared(client, directory, given.quiet)
            print(f"  {client.name:<24} {one}   {two}", flush=True)
            wrong |= {
                f"{client.name}, {what}": done.wrong
                for what, done in (("simulate", one), ("compare", two))
                if done.wrong
            }
        print("\n  gate", flush=True)
        wrong |= gates(directory, given.only, given.quiet) if any(given.only in name for name in GATES) else {}
    for name, why in wrong.items():
        print(f"WRONG: {name}: {why}")
    for client in missing:
        print(f"left out: {client.name}: {client.package} is not installed")
    print(f"{len(chosen) - len(missing)} clients, {len(missing)} left out, {len(wrong)} verdicts wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
