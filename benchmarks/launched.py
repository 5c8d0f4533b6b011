"""Measure runs that torchrun has launched on this host: ``python benchmarks/launched.py [PROCESSES[xRANKS] ...]``.

The default is ``2 4 8 8x4 8x16``: that many launched processes, each with one simulated rank or several. It prints for
each run:

- the seconds and the processor time of all processes, from the start of torchrun to the end of the first collective;
- the private memory of each kind of process after it.

A run is ended if less than ``--spare`` GiB of memory would be left.
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
from pathlib import Path
from typing import Any

TEST = """
import json, os, pathlib, time, pytest, torch, torch.distributed as dist

def children(pid):
    threads = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]

def tree(pid):
    yield pid
    for child in children(pid):
        yield from tree(child)

def described(pid):
    process = pathlib.Path(f"/proc/{pid}")
    sizes = dict(line.split(":") for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(size.split()[0]) / 1000 for name, size in sizes.items()}
    stat = (process / "stat").read_text().rpartition(")")[2].split()
    return {
        "parent": int(stat[1]),
        "children": len(children(pid)),
        "command": (process / "cmdline").read_text().split("\\0"),
        "private": sizes["Private_Clean"] + sizes["Private_Dirty"],
        "proportional": sizes["Pss"],
        "threads": int(stat[17]),
        "processor": sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK"),
    }

@pytest.mark.ranks
def test_all_reduce(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()
    now = time.time()
    dist.barrier()
    if rank.index == 0:
        pids = tree(int(os.environ["BENCH_PID"]))
        found = {pid: described(pid) for pid in pids}
        pathlib.Path(os.environ["BENCH_LOG"]).write_text(json.dumps({"time": now, "processes": found}))
    dist.barrier()
"""


def kinds(processes: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return which of the run's processes each one is: its place in the tree, whose root is torchrun."""
    found: dict[str, str] = {}
    for pid, facts in processes.items():  # parents go before their children
        above = found.get(str(facts["parent"]), "")
        if not above:
            found[pid] = "torchrun"
        elif above == "torchrun":
            found[pid] = "agent"
        elif above == "agent":
            found[pid] = "driver" if "pytest" in facts["command"] and facts["children"] == 0 else "fork server"
        else:
            found[pid] = "rank"
    return found


def measure(launched: int, each: int, spare: float) -> str:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "test_it.py").write_text(TEST)
        log = directory / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launched}"]
        command += ["-m", "mgpu_check", "pytest", f"--gpus={launched * each}", "--simulate", "--rank-timeout=300"]
        code = "import os, sys; os.environ['BENCH_PID'] = str(os.getpid()); os.execv(sys.argv[1], sys.argv[1:])"
        started = time.time()
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command, "-p", "no:cacheprovider"],
            cwd=directory,
            env={**os.environ, "BENCH_LOG": str(log), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        least = available()
        while process.poll() is None and least > spare:
            time.sleep(0.1)
            least = min(least, available())
        if process.poll() is None:
            process.terminate()
            process.wait()
            return f"ended, because only {least:.1f} GiB were left"
        output = process.communicate()[0]
        if process.returncode or not log.exists():
            raise SystemExit(f"the run failed:\n{output}")
        noted = json.loads(log.read_text())
    processes = noted["processes"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for pid, kind in kinds(processes).items():
        groups.setdefault(kind, []).append(processes[pid])
    parts = [
        f"first collective {noted['time'] - started:.1f} s",
        f"processors {sum(one['processor'] for one in processes.values()):.1f} s",
        f"all memory {sum(one['proportional'] for one in processes.values()) / 1000:.2f} GB",
    ]
    for kind, found in groups.items():
        private = statistics.median(one["private"] for one in found)
        threads = statistics.median(one["threads"] for one in found)
        parts.append(f"{len(found)} {kind}: {private:.0f} MB, {threads:.0f} threads")
    return "; ".join(parts)


def available() -> float:
    """Return the GiB of memory that this host has left."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=["2", "4", "8", "8x4", "8x16"], metavar="PROCESSES[xRANKS]")
    parser.add_argument("--spare", type=float, default=3.0, metavar="GIB", help="memory to leave (default: 3)")
    options = parser.parse_args()
    for run in options.runs:
        launched, _, each = run.partition("x")
        print(f"{run:>6}: {measure(int(launched), int(each or 1), options.spare)}", flush=True)


if __name__ == "__main__":
    main()
