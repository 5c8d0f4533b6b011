"""Measure the trace of a run: its size, and the time that recording adds.

``python benchmarks/traces.py [--steps=20] [--runs=3]`` trains a model of 10.5 million parameters with Adam on one CPU device,
plain and recorded, in turns. Times are those of the processor, from the first step to the last.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys, time
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(*(m for _ in range(10) for m in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
x, y = torch.randn(256, 1024), torch.randn(256, 1024)
begin = time.process_time()
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
with open("seconds", "a") as file:
    print(time.process_time() - begin, file=file)
"""


def main() -> None:
    """Print a line for each amount of values, as medians over the runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    kinds = {"plain": None, "digests": "0", "values": "256MB"}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    told: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "train.py").write_text(SCRIPT)
        for _ in range(given.runs):
            for kind, values in kinds.items():
                command = [sys.executable, "train.py", str(given.steps)]
                if values is not None:
                    words = ["--gpus=1", "--no-rounding", f"--values={values}", "--out=a.trace", "--", "train.py"]
                    command = [sys.executable, "-m", "mgpu_check", "record", *words, str(given.steps)]
                done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
                seconds[kind].append(float(Path(directory, "seconds").read_text().split()[-1]))
                found = re.search(r"a\.trace, ([\d,]+) bytes", done.stdout)
                told[kind] = found[1] if found else ""
    base = statistics.median(seconds["plain"])
    for kind, own in seconds.items():
        middle = statistics.median(own)
        print(
            json.dumps(
                {"run": kind, "seconds": round(middle, 2), "ratio": round(middle / base, 2), "bytes": told[kind]}
            )
        )


if __name__ == "__main__":
    main()
