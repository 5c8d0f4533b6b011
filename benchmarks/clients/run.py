"""Run the clients: ``python benchmarks/clients/run.py [--only=WORD]... [--list]``; exit code 0 if every verdict is
right.

Each script runs on two simulated GPUs under `mgpu-check simulate` and `mgpu-check compare`, and what they train goes
through the gate. A table shows which verdicts are right, and after how many seconds. Clients and gates of packages that
are not installed are left out, and counted.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clients import CLIENTS, GATES, MODELS, Client, Expected, Gate

HERE = Path(__file__).parent
OURS = [sys.executable, "-m", "mgpu_check"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
PYTEST_INI = "[pytest]\npythonpath = .\naddopts = -p no:cacheprovider --import-mode=importlib\n"
LONGEST = 900.0  # seconds, for a client that hangs
SIMULATED = {0: "runs", 1: "fails"}
EXAMINED = {0: "equal in each way", 1: "differs"}
COMPARED = {0: "equal", 1: "differs", 2: "not comparable"}


@dataclass(frozen=True)
class Done:
    """A verdict, what is wrong with it (nothing: it is right), and the seconds that it took."""

    said: str
    wrong: str
    seconds: float

    def __str__(self) -> str:
        return f"{'WRONG' if self.wrong else 'right'} {self.seconds:5.0f} s"

    @property
    def cell(self) -> str:
        """In a table."""
        return f"{f'WRONG: {self.wrong}' if self.wrong else self.said}, {self.seconds:.0f} s"


def environment() -> dict[str, str]:
    """Without what this run was given: no GPU, no launcher, no connections, one thread for each rank."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MGPU_CHECK_", "PYTEST_", "CUDA_VISIBLE"))}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def call(command: Sequence[str], directory: Path, longest: float = LONGEST) -> tuple[int, str, float]:
    began = time.monotonic()
    try:
        ran = subprocess.run(
            command, cwd=directory, env=environment(), capture_output=True, text=True, check=False, timeout=longest
        )
    except subprocess.TimeoutExpired:
        return -1, f"it was ended after {longest:g} s", time.monotonic() - began
    return ran.returncode, ran.stdout + ran.stderr, time.monotonic() - began


def verdict(
    expected: Expected, command: Sequence[str], directory: Path, quiet: bool, names: Mapping[int, str] = SIMULATED
) -> Done:
    """Run `command`, and judge what it says.

    Args:
        quiet: do not print the output of what is wrong.
        names: what an exit code is called in the table.
    """
    code, text, seconds = call(command, directory)
    wrong = []
    if code != expected.code:
        wrong.append(f"exit code {code} instead of {expected.code}")
    wrong += [f"{words!r} is not said" for words in expected.words if words not in text]
    wrong += [f"{words!r} is said" for words in expected.never if words in text]
    if wrong and not quiet:
        print(f"--- {' '.join(command[2:])}\n{text}\n---", flush=True)
    name = names.get(expected.code, f"exit code {expected.code}")
    said = f"{name}: {expected.words[0]}" if expected.words and expected.code else name
    return Done(said, "; ".join(wrong), seconds)


def simulated(client: Client, directory: Path, quiet: bool) -> Done:
    arguments = client.arguments if client.simulated is None else client.simulated
    launch = TORCHRUN if client.launched else []
    command = [*OURS, "simulate", "--gpus=2", "--", *launch, client.script, *arguments]
    return verdict(client.simulate, command, directory, quiet)


def compared(client: Client, directory: Path, quiet: bool) -> Done:
    options = ["--gpus=2", "--simulate", "--timeout=120", *client.options]
    command = [*OURS, "compare", *options, "--", client.script, *client.arguments]
    return verdict(client.compare, command, directory, quiet, COMPARED)


def examined(target: str, directory: Path, quiet: bool) -> Done:
    options = ["--gpus=2", "--simulate", "--ways=ddp,fsdp2,tp,tp-layers,ep", "--time=10m", "-k", "not options"]
    return verdict(MODELS[target], [*OURS, "model", target, *options], directory, quiet, EXAMINED)


def gated(chosen: Sequence[Gate], directory: Path, quiet: bool) -> dict[str, Done]:
    """Return the gate's result for each test, by its name, from one run of pytest for each file and number of GPUs."""
    done: dict[str, Done] = {}
    for file, gpus in dict.fromkeys((gate.file, gate.gpus) for gate in chosen):
        together = [gate for gate in chosen if (gate.file, gate.gpus) == (file, gpus)]
        done |= gated_together(together, directory, quiet)
    return done


def gated_together(chosen: Sequence[Gate], directory: Path, quiet: bool) -> dict[str, Done]:
    file, gpus = chosen[0].file, chosen[0].gpus
    report = directory / f"{file}-{gpus}.xml"
    tests = [f"test_{file}.py::{gate.test}" for gate in chosen]
    command = [*OURS, "pytest", "-q", f"--gpus={gpus}", "--simulate", f"--junitxml={report}", *tests]
    _, text, _ = call(command, directory, LONGEST * len(tests))
    if not report.exists():
        return {gate.test: Done("", f"pytest has left no report: {text[-2000:]}", 0.0) for gate in chosen}
    cases = {case.get("name"): case for case in ET.parse(report).iter("testcase")}
    done = {gate.test: judged(gate, cases.get(gate.test)) for gate in chosen}
    if any(one.wrong for one in done.values()) and not quiet:
        print(text, flush=True)
    return done


def judged(gate: Gate, case: ET.Element | None) -> Done:
    """Compare the result of one test in pytest's report with the expected one."""
    if case is None:
        return Done("", "it was not run", 0.0)
    named = [p.get("value") or "" for p in case.iter("property") if p.get("name") == "mgpu_check.mistakes"]
    mistake = named[0].split()[0] if named else ""
    text = "".join(part.text or "" for tag in ("failure", "error", "skipped") for part in case.iter(tag))
    right = mistake == gate.mistake and gate.words in text and bool(text) == bool(gate.mistake or gate.words)
    said = f"fails: {gate.mistake or gate.words}" if gate.mistake or gate.words else "passes"
    wrong = (
        ""
        if right
        else f"the gate {f'says {mistake!r}' if mistake else 'fails' if text else 'passes'}, and not: {said}"
    )
    return Done(said, wrong, float(case.get("time") or 0))


def table(scripts: Mapping[str, tuple[Done, Done]], gates: Mapping[str, Done]) -> Iterator[str]:
    """In Markdown: a row for each client, with the gate on what it trains, and one for each gate of none."""
    yield "| client | `simulate` | `compare` | the gate |"
    yield "|---|---|---|---|"
    of = {gate.of: gates[gate.test] for gate in GATES if gate.test in gates}
    for name, (one, two) in scripts.items():
        yield f"| {name} | {one.cell} | {two.cell} | {of[name].cell if name in of else ''} |"
    for gate in GATES:
        if gate.test in gates and gate.of not in scripts:
            yield f"| {gate.of or gate.test} | | | {gates[gate.test].cell} |"


def installed(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="WORD",
        help="clients and gates with WORD in their names; repeatable; default: all of them",
    )
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--quiet", action="store_true", help="do not print the output of what is wrong")
    given = parser.parse_args()
    words = given.only or [""]
    clients = [client for client in CLIENTS if any(word in client.name for word in words)]
    gates = [gate for gate in GATES if any(word in gate.test for word in words)]
    models = [target for target in MODELS if any(word in target for word in words)]
    if given.list:
        print("\n".join([client.name for client in CLIENTS] + [gate.test for gate in GATES] + [*MODELS]))
        return 0
    if not clients and not gates and not models:
        parser.error(
            f"--only: no client, gate or model has {' or '.join(words)} in its name; --list prints all of them"
        )
    missing = {one.name: one.package for one in clients if not installed(one.package)}
    missing |= {one.test: one.package for one in gates if not installed(one.package)}
    missing |= {target: target.partition(":")[0] for target in models if not installed(target.partition(":")[0])}
    scripts: dict[str, tuple[Done, Done]] = {}
    tests: dict[str, Done] = {}
    with tempfile.TemporaryDirectory(prefix="mgpu-check-clients-") as made:
        directory = Path(made)
        for program in (HERE / "programs").glob("*.py"):
            is_test = program.name.startswith("gates")
            shutil.copy(program, directory / (f"test_{program.name}" if is_test else program.name))
        (directory / "pytest.ini").write_text(PYTEST_INI)
        print(f"  {'client':<28} {'simulate':<15} compare", flush=True)
        for client in clients:
            if client.name not in missing:
                one, two = simulated(client, directory, given.quiet), compared(client, directory, given.quiet)
                scripts[client.name] = one, two
                print(f"  {client.name:<28} {one}   {two}", flush=True)
        if there := [gate for gate in gates if gate.test not in missing]:
            print("\n  gate", flush=True)
            tests = gated(there, directory, given.quiet)
        tests |= {target: examined(target, directory, given.quiet) for target in models if target not in missing}
        for name, done in tests.items():
            print(f"  {name:<28} {done}   {done.said}", flush=True)
    print("", *table(scripts, tests), "", sep="\n")
    wrong = {f"{name}, simulate": one.wrong for name, (one, _) in scripts.items() if one.wrong}
    wrong |= {f"{name}, compare": two.wrong for name, (_, two) in scripts.items() if two.wrong}
    wrong |= {name: done.wrong for name, done in tests.items() if done.wrong}
    for name, why in wrong.items():
        print(f"WRONG: {name}: {why}")
    for name, package in missing.items():
        print(f"left out: {name}: {package} is not installed")
    print(
        f"{len(scripts)} clients, {len(tests)} gates and models, {len(missing)} left out, {len(wrong)} verdicts wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
