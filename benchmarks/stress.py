"""Run thousands of tests with random faults on one pool, and see that nothing is lost: ``python benchmarks/stress.py``.

Each test has a random world size, duration and fault, drawn from ``--seed``, and it is known before what its verdict
must be. The last line says what came of it; the exit code is 0 only if nothing is wrong: no result missing or
another's, no verdict but the expected one, no process left over, and file descriptors and memory as before.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pool import RankPool
from mgpu_check.errors import RankDied, RankFailure, RankHang

TIMEOUT, SHORT_TIMEOUT = 60.0, 0.5
WARM_UP = 100
MOST_MEGABYTES = 16
"""Memory may grow by so much over the whole run, which is less than 10 kB for each of 2,000 tests."""
GONE_WITHIN = 10.0


@dataclass(frozen=True)
class Fault:
    """The event on one rank.

    Attributes:
        weight: how often it is drawn.
        error: what is raised, None where the test passes.
        text: a regular expression for its first line, with the rank and the world size in braces.
        left: what is said to be left behind.
        timeout: seconds.
    """

    weight: int
    error: type[BaseException] | tuple[type[BaseException], ...] | None = None
    text: str = ""
    left: str = ""
    timeout: float = TIMEOUT


FAULTS = {
    "none": Fault(60),
    "raises": Fault(6, RankFailure, "rank {culprit} of {size} raised ValueError: planted"),
    "sys.exit": Fault(3, RankFailure, "rank {culprit} of {size} raised SystemExit: 3"),
    "returns what cannot be pickled": Fault(
        3, RankFailure, "rank {culprit} of {size} raised TypeError: the result, of type lock"
    ),
    "exits with 0": Fault(3, RankDied, "rank {culprit} of {size} died: exit code 0"),
    "exits with 7": Fault(3, RankDied, "rank {culprit} of {size} died: exit code 7"),
    "SIGKILL": Fault(3, RankDied, "rank {culprit} of {size} died: signal SIGKILL"),
    "SIGSEGV": Fault(3, RankDied, "rank {culprit} of {size} died: signal SIGSEGV"),
    "sleeps": Fault(2, RankHang, "rank {culprit} of {size} did not finish", timeout=SHORT_TIMEOUT),
    "SIGSTOP": Fault(2, RankHang, "rank {culprit} of {size} did not finish", timeout=SHORT_TIMEOUT),
    # Gloo makes of it what it likes, but never a result; alone, a rank differs from none.
    "another collective": Fault(2, (RankFailure, RankHang), timeout=SHORT_TIMEOUT),
    "leaves a thread": Fault(2, left="threads that still run"),
    "leaves a child": Fault(2, left="processes that still run: sleep"),
    "leaves an orphan": Fault(2, left="processes that still run: "),  # perhaps it is a shell yet
    "leaves a group": Fault(2),
    "leaves another state": Fault(3),
    "prints 2 MB": Fault(2),
}


@dataclass(frozen=True)
class Test:
    """A drawn test."""

    number: int
    fault: str
    size: int
    culprit: int
    seconds: float


def draw(number: int, randomness: random.Random, gpus: int) -> Test:
    (fault,) = randomness.choices(list(FAULTS), [fault.weight for fault in FAULTS.values()])
    size = randomness.randint(1, gpus)
    seconds = randomness.choice((0.0, 0.0, 0.0, randomness.uniform(0, 0.02)))
    return Test(number, fault, size, randomness.randrange(size), seconds)


def body(rank: Any, test: Test) -> Any:
    """Run a test on each rank, and return the numbers of test and rank."""
    import os
    import time

    import torch
    import torch.distributed as dist

    assert "LEFT" not in os.environ, "the environment of an earlier test"
    assert torch.get_default_dtype() is torch.float32, "the default dtype of an earlier test"
    total = torch.full((64,), float(test.number))
    dist.all_reduce(total)
    if rank.index == test.culprit:
        time.sleep(test.seconds)
        if (result := happen(test.fault)) is not None:
            return result
    elif test.fault == "another collective":
        dist.all_reduce(total)
    if test.fault == "leaves a group":
        dist.new_group([0])
    dist.barrier()
    return test.number, rank.index, float(total[0])


def happen(fault: str) -> object:
    """The fault, on the rank that has it."""
    import ctypes
    import os
    import signal
    import subprocess
    import sys
    import threading
    import time

    import torch
    import torch.distributed as dist

    if fault == "raises":
        raise ValueError("planted")
    if fault == "sys.exit":
        sys.exit(3)
    if fault == "returns what cannot be pickled":
        dist.barrier()
        return threading.Lock()
    if fault.startswith("exits"):
        os._exit(int(fault[-1]))
    if fault in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "SIGSEGV":
        ctypes.string_at(0)
    if fault == "sleeps":
        time.sleep(3600)
    if fault == "another collective" and dist.get_world_size() > 1:
        dist.broadcast(torch.ones(64), dist.get_rank())
    if fault == "leaves a thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if fault == "leaves a child":
        subprocess.Popen(["sleep", "3600"])
    if fault == "leaves an orphan":
        subprocess.run(["sh", "-c", "setsid sleep 3600 &"], check=True)
    if fault == "leaves another state":
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)
        signal.setitimer(signal.ITIMER_REAL, 30)
    if fault == "prints 2 MB":
        print("x" * 2_000_000)
    return None


class Stress:
    """A pool under stress, and the account of what went wrong."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.pool = RankPool(LocalLauncher(simulate="cpu"), gpus, "cpu", TIMEOUT)
        (self.server,) = self.pool.run(os.getppid, size=1)
        self.lost: list[str] = []
        self.wrong: list[str] = []
        self.orphans: list[str] = []

    def run(self, test: Test) -> None:
        """One test, as a pytest run would do it."""
        fault = FAULTS[test.fault]
        self.pool.begin_test()
        # The deadline is for what a test does, and not for the start of its ranks.
        self.pool.prepare(test.size)
        results: list[Any] | None = None
        error: BaseException | None = None
        left: list[str] = []
        try:
            results = self.pool.run(body, test, size=test.size, timeout=fault.timeout)
        except (RankFailure, RankHang) as raised:
            error = raised
        try:
            left = self.pool.end_test(failed=error is not None)
        except (RankFailure, RankHang) as raised:
            self.wrong.append(f"{test}: at its end: {raised}")
        self.judge(test, results, error, left)

    def judge(self, test: Test, results: list[Any] | None, error: BaseException | None, left: list[str]) -> None:
        fault = FAULTS[test.fault]
        expected = None if test.fault == "another collective" and test.size == 1 else fault.error
        if expected is None:
            if error is not None:
                self.wrong.append(f"{test}: {type(error).__name__}: {error}")
            elif results != [(test.number, rank, float(test.number * test.size)) for rank in range(test.size)]:
                self.lost.append(f"{test}: {results}")
        else:
            text = fault.text.format(culprit=test.culprit, size=test.size)
            if not isinstance(error, expected) or not re.match(text, str(error)):
                self.wrong.append(f"{test}: {type(error).__name__}: {error}")
        if not any(fault.left in line for line in left or [""]) or (left and not fault.left):
            self.wrong.append(f"{test}: left behind {left}")

    def look_for_orphans(self) -> None:
        """Processes below the fork server that are no ranks."""
        ranks = {process.pid for _, world in self.pool._worlds for process in world.processes.values()}
        deadline = time.monotonic() + GONE_WITHIN
        while found := [pid for pid in _descendants(self.server) if pid not in ranks]:
            if time.monotonic() > deadline:
                self.orphans += [f"{_name(pid)} ({pid})" for pid in found]
                return
            os.sched_yield()

    def measure(self) -> dict[str, float]:
        """Open files, and resident memory in MB, of this process and the fork server, while there are no ranks."""
        self.pool.begin_test()
        for size in range(1, self.gpus + 1):
            self.pool.prepare(size)
        self.pool.end_test(failed=True)
        return {
            "files": _files(os.getpid()),
            "memory": _memory(os.getpid()),
            # But for standard output and error of each rank that is there, which it keeps from filling the disk.
            "files of the fork server": _files(self.server) - 2 * len(_children(self.server)),
            "memory of the fork server": _memory(self.server),
        }


def _descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        try:
            one = todo.pop()
            some = _children(one)
        except OSError:
            continue
        found += some
        todo += some
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _files(pid: int) -> float:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tests", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: 1)")
    parser.add_argument("--gpus", type=int, default=4, help="simulated devices, the largest world size (default: 4)")
    arguments = parser.parse_args()
    randomness = random.Random(arguments.seed)
    stress = Stress(arguments.gpus)
    kinds: Counter[str] = Counter()
    for number in range(WARM_UP):
        stress.run(draw(number, randomness, arguments.gpus))
    before = stress.measure()
    started = time.monotonic()
    for number in range(arguments.tests):
        test = draw(number, randomness, arguments.gpus)
        kinds[test.fault] += 1
        stress.run(test)
        if number % 100 == 99:
            stress.look_for_orphans()
            print(f"{number + 1} tests, {time.monotonic() - started:.0f} s", file=sys.stderr)
    seconds = time.monotonic() - started
    after = stress.measure()
    stress.look_for_orphans()
    stress.pool.close()

    print(", ".join(f"{fault}: {kinds[fault]}" for fault in FAULTS))
    for line in (*stress.lost, *stress.wrong, *stress.orphans):
        print(line)
    grown = [name for name in before if after[name] - before[name] > (MOST_MEGABYTES if "memory" in name else 0)]
    flat = ", ".join(
        f"{name} {before[name]:.0f} -> {after[name]:.0f}{' MB' if 'memory' in name else ''}" for name in before
    )
    print(
        f"{arguments.tests} tests on 1 to {arguments.gpus} ranks in {seconds:.0f} s, seed {arguments.seed}: "
        f"lost results {len(stress.lost)}, wrong verdicts {len(stress.wrong)}, orphans {len(stress.orphans)}; {flat}"
    )
    return 1 if stress.lost or stress.wrong or stress.orphans or grown else 0


if __name__ == "__main__":
    sys.exit(main())
