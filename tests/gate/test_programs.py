"""Right programs raise no alarm, and a flipped bit in one of their gradients does; by the benchmark of the gate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LONGEST = 900  # seconds; only what is broken lasts as long

WRONG = """

@program(mlp, vectors, divisible=True)
def summed_only(model, batch, rank):
    placed(model, rank).zero_grad()
    inputs, labels = shard(batch, rank)
    F.cross_entropy(model(inputs), labels).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
"""


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__")))


def measured(benchmarks: Path, *arguments: str) -> dict[str, Any]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MGPU_CHECK_", "PYTEST_")) and name != "CI"
    }
    out = benchmarks.parent / "figures.json"
    ran = subprocess.run(
        [sys.executable, str(benchmarks / "gate.py"), *arguments, "--json", str(out)],
        env=environment,
        cwd=benchmarks.parent,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_right_programs_raise_no_alarm(benchmarks):
    found = measured(benchmarks, "false-alarms", "--steps", "250")
    assert found["alarms"] == []
    assert len(found["of each"]) >= 20
    assert all(found["of each"].values()), found["of each"]


def test_a_wrong_program_raises_alarms(benchmarks):
    with (benchmarks / "programs" / "by_hand.py").open("a") as file:
        file.write(WRONG)
    found = measured(benchmarks, "false-alarms", "--steps", "8", "--programs", "summed_only", "metrics")
    assert {alarm["program"] for alarm in found["alarms"]} == {"summed_only"}


CHOSEN = ("ddp_of_any_size", "tensor_parallel", "data_parallel", "FullyShardedDataParallel", "gru")


def test_a_flipped_bit_of_the_largest_element_is_caught(benchmarks):
    found = measured(benchmarks, "bit-flips", "--flips", "0", "--programs", *CHOSEN)
    assert {name: rows["missed"] for name, rows in found.items()} == {name: [] for name in CHOSEN}
    assert all(rows["largest"][1] >= 3 for rows in found.values()), found


def test_the_lowest_bit_is_not_told_from_rounding(benchmarks):
    gate = benchmarks / "gate.py"
    gate.write_text(gate.read_text().replace("bit: int = 12", "bit: int = 0"))
    rows = measured(benchmarks, "bit-flips", "--flips", "0", "--programs", "ddp_of_any_size")["ddp_of_any_size"]
    assert rows["largest"][0] == 0, rows
    assert rows["largest"][1] >= 3, rows
