"""Measure the engine and the harnesses of others in one run on one machine: ``python benchmarks/engine.py [WORD ...]``.

Measures the rows whose name has one of the words; all rows without a word. All rows run in turns, ``--repeat`` times.
A figure is the median of the turns, in seconds. ``--json FILE`` writes the figures too. The harnesses of others need
``pip install expecttest mpi4py mpich pytest-isolate-mpi mpi-pytest``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harnesses import CONFTEST, HARNESSES, Harness

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


# Of all runs: imports are kept warm for runs in one directory.
_DIRECTORY = tempfile.TemporaryDirectory()


class Run:
    """One run of pytest on one generated test file, by default with all installed plugins.

    Args:
        before: words before the command.
        hooks: more of the conftest.
        plugin: the only plugin that pytest loads.
    """

    def __init__(
        self, source: str, *arguments: str, before: list[str] | None = None, hooks: str = "", plugin: str | None = None
    ) -> None:
        directory = Path(_DIRECTORY.name)
        for file in directory.glob("log*"):
            file.unlink()
        (directory / "conftest.py").write_text(CONFTEST + hooks)
        (directory / "test_it.py").write_text(source)
        log = directory / "log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MGPU_CHECK_")}
        environment |= {"BENCH_LOG": str(log), "BENCH_PID": str(os.getpid())}
        if plugin is not None:
            environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": plugin}
        command = [*(before or []), sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
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


def measured(harness: Harness) -> dict[str, float]:
    """Return the time of the first test (with the start of pytest), of each further one, and of the end of the run.

    Processor time is that of all processes of the run: on a busy machine it is more exact than
    seconds.
    """
    source = harness.source.format(count=harness.count)

    def run_with(arguments: tuple[str, ...]) -> Run:
        return Run(source, *arguments, before=harness.before(), hooks=harness.hooks, plugin=harness.plugin).passed()

    if harness.warm_up:
        run_with(harness.warm_up)
    run = run_with(harness.arguments)
    ends = run.times("end")
    assert len(ends) >= harness.count, run.output
    before, after = (entry["seconds"] for entry in run.events if entry["event"] == "processors")
    figures = {
        "first": ends[0] - run.started,
        "further": (ends[-1] - ends[0]) / (len(ends) - 1),
        "of processors": (after - before) / (len(ends) - 1),
        "teardown": run.ended - ends[-1],
    }
    if harness.warm_up:
        del figures["of processors"]  # the ranks are no descendants of the run
    return figures


def import_torch() -> dict[str, float]:
    started = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return {"seconds": time.time() - started}


def suite() -> dict[str, float]:
    """Return the seconds of the checks of the packaged suite at the level quick, their set-up and teardown included."""
    command = [sys.executable, "-m", "mgpu_check", "--gpus=4", "--simulate", "--gpu-level=quick"]
    others = [word for name in ("pytest_isolate_mpi", "mpi-pytest") for word in ("-p", f"no:{name}")]
    started = time.time()
    run = subprocess.run([*command, "-vv", "--durations=0", *others], capture_output=True, text=True, check=False)
    ended = time.time()
    if run.returncode != 0:
        raise SystemExit(f"the packaged suite failed:\n{run.stdout}{run.stderr}")
    checks: dict[str, float] = {}
    for seconds, name in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(.+)$", run.stdout, re.MULTILINE):
        checks[name] = checks.get(name, 0.0) + float(seconds)
    longest = sorted(checks, key=lambda name: checks[name])[:-6:-1]
    return {
        "seconds": ended - started,
        "checks": len(checks),
        "median": statistics.median(checks.values()),
        "mean": statistics.mean(checks.values()),
        **{name.rpartition("::")[2]: checks[name] for name in longest},
    }


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


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def compared(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return what the goals are about: the first test as a ratio to `import torch`, further ones as ratios to ours."""
    lines = []
    for name in (name for name in HARNESSES if name in figures):
        parts = []
        if alone := figures.get("import torch"):
            parts.append(f"first test {figures[name]['first'] / alone['seconds']:.2f} x import torch")
        if ours := figures.get("mgpu-check"):
            parts.append(f"further test {figures[name]['further'] / ours['further']:.1f} x ours")
        if ours and "of processors" in figures[name]:
            parts.append(f"its processor time {figures[name]['of processors'] / ours['of processors']:.1f} x ours")
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="measure the rows whose name has one of the words")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="turns (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    measures: dict[str, Callable[[], dict[str, float]]] = {"import torch": import_torch}
    measures |= {name: (lambda harness=harness: measured(harness)) for name, harness in HARNESSES.items()}
    measures |= {
        "example": examples,
        "shrink": shrink,
        "killed": killed,
        **{f"{size} ranks": (lambda size=size: ranks(size)) for size in (4, 16, 64)},
        "packaged suite": suite,
    }
    for name, harness in HARNESSES.items():
        if missing := harness.missing():
            print(f"{name}: not measured, because {' and '.join(missing)} cannot be imported")
            del measures[name]
    words = options.words or [""]
    chosen = {name: measure for name, measure in measures.items() if any(word in name for word in words)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for turn in range(options.repeat):
        for name, measure in chosen.items():
            runs[name].append(measure())
            print(f"turn {turn + 1}: {name}", file=sys.stderr)
    figures = {name: median(results) for name, results in runs.items()}
    for name, row in figures.items():
        print(f"{name:<44} " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    for line in compared(figures):
        print(line)
    if options.json:
        Path(options.json).write_text(json.dumps({"medians": figures, "turns": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
