"""Measure the engine against torch's own harnesses, in one run on one machine: ``python benchmarks/engine.py``.

Prints a table; ``--json FILE`` writes the figures too. Needs `expecttest`, which torch's harnesses import. A figure is
the median over ``--repeat`` runs, in seconds; those of a run that are compared come from the same minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Every test file is run in a directory with this conftest: it writes down when each test began and ended.
CONFTEST = """
import json, os, pathlib, time

def note(**what):
    with open(os.environ["BENCH_LOG"], "a") as file:
        file.write(json.dumps({"time": time.time(), **what}) + "\\n")

def processor_time(pid):
    threads = [*pathlib.Path(f"/proc/{pid}/task").iterdir()]
    own = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    return own + sum(processor_time(child) for thread in threads for child in (thread / "children").read_text().split())

ends = []

def pytest_collection_finish(session): ends[:] = [item.nodeid for item in session.items[:1] + session.items[-1:]]
def pytest_runtest_logstart(nodeid): note(event="start", test=nodeid.rpartition("::")[2])
def pytest_runtest_logfinish(nodeid):
    note(event="end", test=nodeid.rpartition("::")[2])
    if nodeid in ends: note(event="processors", seconds=processor_time(os.getpid()))
def pytest_runtest_logreport(report):
    if report.failed: note(event="failed", test=report.nodeid.rpartition("::")[2])
"""

TRIVIAL = """
    x = torch.ones(3) * (%s + 1)
    dist.all_reduce(x)
    assert x[0] == 10
"""

OURS = (
    """
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(4)
@pytest.mark.parametrize("i", range({count}))
def test_all_reduce(rank, i):
"""
    + TRIVIAL % "rank.index"
)

SPAWNED = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestSpawned(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def body(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 4), rank=self.rank, world_size=4)
        x = torch.ones(3) * (self.rank + 1)
        dist.all_reduce(x)
        assert x[0] == 10

for i in range({count}):
    setattr(TestSpawned, f"test_all_reduce_{{i:02d}}", lambda self: self.body())
"""

CONTINUOUS = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TestContinuous(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls): return "gloo"

    @classmethod
    def device_type(cls): return "cpu"

    def body(self):
        x = torch.ones(3) * (self.rank + 1)
        dist.all_reduce(x)
        assert x[0] == 10

for i in range({count}):
    setattr(TestContinuous, f"test_all_reduce_{{i:02d}}", lambda self: self.body())
"""

EXAMPLES = """
import json, os, time, pytest, torch, torch.distributed as dist
from hypothesis import Phase, given, settings, strategies as st

COUNT = 300

def loop(rank):
    dist.barrier()
    started = time.perf_counter()
    for i in range(COUNT):
        x = torch.full((i % 64,), float(rank.index))
        dist.all_reduce(x)
    return (time.perf_counter() - started) / COUNT

def test_loop(ranks):
    ranks.run(loop)
    with open(os.environ["BENCH_LOG"], "a") as file:
        file.write(json.dumps({"event": "loop", "seconds": max(ranks.run(loop))}) + "\\n")

@pytest.mark.ranks
@settings(max_examples=COUNT, phases=[Phase.generate])
@given(n=st.integers(0, 64), v=st.integers(-1000, 1000))
def test_examples(rank, n, v):
    x = torch.full((n,), float(v))
    dist.all_reduce(x)
    if rank.index == 0:
        with open(os.environ["BENCH_LOG"] + ".count", "a") as file:
            file.write("x")

@settings(max_examples=COUNT, phases=[Phase.generate])
@given(n=st.integers(0, 64), v=st.integers(-1000, 1000))
def test_hypothesis_alone(n, v):
    pass
"""

SHRINK = """
import os, pytest, torch, torch.distributed as dist
from hypothesis import given, settings, strategies as st

@pytest.mark.ranks(4)
@settings(max_examples=1000)
@given(rows=st.integers(0, 64), columns=st.integers(0, 64), v=st.integers(-1000, 1000), flip=st.booleans())
def test_shrink(rank, rows, columns, v, flip):
    if rank.index == 0:
        with open(os.environ["BENCH_LOG"] + ".count", "a") as file:
            file.write("x")
    x = torch.full((rows, columns), float(v))
    dist.all_reduce(x)
    assert not (rows > 11 and columns > 7 and v > 100 and flip)
"""

KILLED = """
import json, os, signal, time, pytest, torch.distributed as dist

def note(event):
    with open(os.environ["BENCH_LOG"], "a") as file:
        file.write(json.dumps({"time": time.time(), "event": event}) + "\\n")

@pytest.mark.ranks(4)
def test_warm(rank):
    dist.barrier()

@pytest.mark.ranks(4)
def test_killed(rank):
    dist.barrier()
    if rank.index == 3:
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.ranks(4)
def test_next(rank):
    dist.barrier()
    if rank.index == 0:
        note("next")
"""


class Run:
    """One pytest process on one generated test file."""

    def __init__(self, source: str, *arguments: str) -> None:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "conftest.py").write_text(CONFTEST)
            (directory / "test_it.py").write_text(source)
            log = directory / "log"
            environment = {k: v for k, v in os.environ.items() if not k.startswith("MGPU_CHECK_")}
            environment["BENCH_LOG"] = str(log)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
            self.started = time.time()
            ran = subprocess.run(
                command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=900
            )
            self.ended = time.time()
            self.code, self.output = ran.returncode, ran.stdout + ran.stderr
            self.events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            counted = Path(f"{log}.count")
            self.count = len(counted.read_text()) if counted.exists() else 0

    def times(self, event: str) -> list[float]:
        return [entry["time"] for entry in self.events if entry["event"] == event]

    def seconds(self, test: str) -> float:
        begin, end = (
            next(entry["time"] for entry in self.events if entry["event"] == event and entry["test"] == test)
            for event in ("start", "end")
        )
        return end - begin

    def passed(self) -> Run:
        if self.code != 0:
            raise SystemExit(f"the benchmark's own tests failed:\n{self.output}")
        return self


def harness(source: str, count: int, *arguments: str) -> dict[str, float]:
    """Return the time of the first test (with the start of pytest), of each further one, and of the end of the run.

    Processor time is that of all processes of the run: on a busy machine it is more exact than
    seconds.
    """
    run = Run(source.format(count=count), *arguments).passed()
    ends = run.times("end")
    before, after = (entry["seconds"] for entry in run.events if entry["event"] == "processors")
    return {
        "first": ends[0] - run.started,
        "further": (ends[-1] - ends[0]) / (len(ends) - 1),
        "of processors": (after - before) / (len(ends) - 1),
        "teardown": run.ended - ends[-1],
    }


def median(measure: Callable[[], dict[str, float]], repeat: int) -> dict[str, float]:
    runs = [measure() for _ in range(repeat)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def examples() -> dict[str, float]:
    run = Run(EXAMPLES, "--gpus=4", "--simulate").passed()
    loop = next(entry["seconds"] for entry in run.events if entry["event"] == "loop")
    drawing = run.seconds("test_hypothesis_alone") / 300
    example = run.seconds("test_examples") / run.count
    return {"bare loop": loop, "example": example, "of that, Hypothesis": drawing, "ratio": example / loop}


def shrink() -> dict[str, float]:
    run = Run(SHRINK, "--gpus=4", "--simulate", "--hypothesis-seed=1", "-k", "shrink")
    assert run.times("failed"), run.output
    return {"seconds": run.seconds("test_shrink"), "executions": run.count}


def killed() -> dict[str, float]:
    run = Run(KILLED, "--gpus=4", "--simulate")
    (at,), (following,) = run.times("killed"), run.times("next")
    return {"seconds": following - at}


def ranks(size: int) -> dict[str, float]:
    """Start of a world whose fork server is up, and the private memory of each rank after a collective."""
    from mgpu_check.engine.launcher import LocalLauncher
    from mgpu_check.engine.pool import RankPool

    pool = RankPool(LocalLauncher(simulate="cpu"), slots=size, simulate="cpu", timeout=60.0)
    try:
        pool.run(os.getpid, size=1)
        started = time.perf_counter()
        pool.prepare(size)
        up = time.perf_counter() - started
        memory = pool.run(_private_memory)
        return {"start": up, "MB per rank": statistics.median(memory) / 1e6}
    finally:
        pool.close()


def _private_memory() -> int:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3))
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each figure (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--no-peers", action="store_true", help="leave torch's own harnesses out: they take minutes")
    options = parser.parse_args()
    repeat = options.repeat
    figures: dict[str, dict[str, float]] = {}
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "mgpu-check": lambda: harness(OURS, 40, "--gpus=4", "--simulate"),
    }
    if not options.no_peers:
        measures["MultiProcContinuousTest"] = lambda: harness(CONTINUOUS, 40, "-W", "ignore")
        measures["MultiProcessTestCase"] = lambda: harness(SPAWNED, 3, "-W", "ignore")
    measures |= {
        "example": examples,
        "shrink": shrink,
        "killed": killed,
        **{f"{size} ranks": (lambda size=size: ranks(size)) for size in (4, 16, 64)},
    }
    for name, measure in measures.items():
        figures[name] = median(measure, repeat)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in figures[name].items())
        print(f"{name:<24} {shown}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
