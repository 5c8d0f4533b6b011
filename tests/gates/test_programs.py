"""Right programs raise no alarm, and a flipped bit in one of their gradients does; by the benchmark of the gate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

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


@pytest.fixture
def measured(run: Callable[..., pytest.RunResult], benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``benchmarks/gate.py`` measures: its test, run as its command does, but in a run that need not import torch."""

    def measured(what: str, **arguments: object) -> dict[str, Any]:
        out = benchmarks.parent / "figures.json"
        asked = {"what": what, "programs": None, "seed": 0, "out": str(out), **arguments}
        monkeypatch.setenv("BENCH_GATE", json.dumps(asked))
        result = run(
            "--gpus=4", "--simulate", "-o", f"pythonpath={benchmarks}", f"{benchmarks / 'gate.py'}::test_measure"
        )
        result.assert_outcomes(passed=1)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures

    return measured


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_right_programs_raise_no_alarm(measured, steps):
    found = measured("false-alarms", steps=steps)
    assert found["alarms"] == []
    assert len(found["of each"]) >= 20
    assert all(found["of each"].values()), found["of each"]


def test_the_command_tells_the_alarms_of_a_wrong_program(benchmarks, tmp_path):
    with (benchmarks / "programs" / "by_hand.py").open("a") as file:
        file.write(WRONG)
    out = tmp_path / "figures.json"
    words = ["false-alarms", "--steps", "8", "--programs", "summed_only", "metrics", "--json", str(out)]
    ran = subprocess.run(
        [sys.executable, str(benchmarks / "gate.py"), *words],
        env={name: value for name, value in os.environ.items() if not name.startswith(("MGPU_CHECK_", "PYTEST_"))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    alarms = json.loads(out.read_text())["alarms"]
    assert {alarm["program"] for alarm in alarms} == {"summed_only"}


CHOSEN = ("ddp_of_any_size", "tensor_parallel", "data_parallel", "FullyShardedDataParallel", "gru")


@pytest.mark.parametrize("chosen", [CHOSEN[:3], pytest.param(CHOSEN[3:], marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_largest_element_is_caught(measured, chosen):
    found = measured("bit-flips", flips=0, programs=chosen)
    assert {name: rows["missed"] for name, rows in found.items()} == {name: [] for name in chosen}
    assert all(rows["largest"][1] >= 3 for rows in found.values()), found


def test_the_lowest_bit_is_not_told_from_rounding(measured, benchmarks):
    gate = benchmarks / "gate.py"
    gate.write_text(gate.read_text().replace("bit: int = 12", "bit: int = 0"))
    rows = measured("bit-flips", flips=0, programs=["ddp_of_any_size"])["ddp_of_any_size"]
    assert rows["largest"][0] == 0, rows
    assert rows["largest"][1] >= 3, rows
