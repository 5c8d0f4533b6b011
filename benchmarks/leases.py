"""Measure leases of devices: ``python benchmarks/leases.py``.

Measured are the cost of one, the delay of a handover, and the time of a suite of small tests with 1, 2 and 4 workers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mgpu_check.devices.leases import DeviceLeases

SUITE = """
import time
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range({count}))
def test_small(rank, i):
    time.sleep({device_time})  # as long as the device would compute, and leave the processor alone
    x = torch.ones(3) * (rank.index + 1)
    dist.all_reduce(x)
    assert x[0] == 3
"""


def cost(count: int, of: int = 8, repeat: int = 2000) -> float:
    """Return the seconds to lease and return `count` free devices."""
    with tempfile.TemporaryDirectory() as directory:
        leases = DeviceLeases([f"gpu{i}" for i in range(of)], Path(directory))
        times = []
        for _ in range(repeat):
            begun = time.perf_counter()
            leases.take(count, "a test").give_back()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def handover(repeat: int = 100) -> tuple[float, float]:
    """Seconds from the moment that a device is given back until another process, which waits for it, has it."""
    gaps = []
    with tempfile.TemporaryDirectory() as directory:
        leases = DeviceLeases(["gpu0"], Path(directory))
        for _ in range(repeat):
            held = leases.take(1)
            theirs, ours = os.pipe()
            if os.fork() == 0:
                leases.take(1)
                os.write(ours, repr(time.perf_counter()).encode())
                os._exit(0)
            while not list(Path(directory).glob("ticket-*")):
                time.sleep(0.002)
            time.sleep(0.05)  # it waits for some time, as it would for a test
            begun = time.perf_counter()
            held.give_back()
            gaps.append(float(os.read(theirs, 100)) - begun)
            os.wait()
            os.close(theirs)
            os.close(ours)
    return statistics.median(gaps), max(gaps)


def suite(workers: int, device_time: float, count: int) -> float:
    """Seconds that pytest runs for 40 small tests, from its start to its end."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "test_suite.py").write_text(SUITE.format(count=count, device_time=device_time))
        arguments = ["-q", "-p", "no:cacheprovider", "--gpus=8", "--simulate", f"-n{workers}"]
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], cwd=directory, check=True, stdout=subprocess.DEVNULL
        )
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each suite; the median counts")
    repeat = parser.parse_args().repeat
    print(f"{os.cpu_count()} cores")
    for count in (1, 2, 8):
        print(f"lease and give back {count} of 8 devices: {cost(count) * 1e3:.2f} ms")
    median, longest = handover()
    print(f"from giving back to the next holder: {median * 1e3:.1f} ms, at most {longest * 1e3:.1f} ms")
    for device_time in (0.0, 0.5):
        for workers in (0, 1, 2, 4):
            seconds = statistics.median(suite(workers, device_time, 40) for _ in range(repeat))
            print(f"40 tests of 2 ranks, {device_time:g} s each, -n{workers}: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
