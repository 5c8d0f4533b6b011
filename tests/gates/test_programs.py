"""Right programs raise no alarm, and a flipped bit in one of their gradients does; by the benchmark of the gate."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn import functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the benchmark, which is no part of a package; `programs` is beside it."""
    before = {*sys.modules}
    with monkeypatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("gate")
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("gate", "programs"):
            del sys.modules[name]


# One for each way to train on several ranks; the others differ from them in their models.
SOME = ["ddp_of_any_size", "sync_batch_norm", "ShardedOptimizer", "bfloat16_autocast", "tensor_parallel", "metrics"]


@pytest.mark.gpus(4)
def test_right_programs_raise_no_alarm(ranks, gate):
    found = gate.false_alarms(ranks, SOME, 8, seed=0)
    assert found["alarms"] == []
    assert all(found["of each"].values()), found["of each"]


@pytest.mark.slow
@pytest.mark.gpus(4)
def test_all_right_programs_raise_no_alarm(ranks, gate):
    found = gate.false_alarms(ranks, list(gate.PROGRAMS), 1000, seed=0)
    assert found["alarms"] == []
    assert len(found["of each"]) >= 20
    assert all(found["of each"].values()), found["of each"]


@pytest.mark.gpus(4)
def test_a_wrong_program_raises_alarms(ranks, gate, monkeypatch):
    def summed_only(model, batch, rank):
        model.to(rank.device).zero_grad()
        inputs, labels = (part[rank.index :: rank.size].to(rank.device) for part in batch)
        F.cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    wrong = dataclasses.replace(gate.PROGRAMS["metrics"], step=summed_only, divisible=True)
    monkeypatch.setitem(gate.PROGRAMS, "summed_only", wrong)
    alarms = gate.false_alarms(ranks, ["summed_only", "metrics"], 8, seed=0)["alarms"]
    assert {alarm["program"] for alarm in alarms} == {"summed_only"}


CHOSEN = ("ddp_of_any_size", "tensor_parallel", "data_parallel", "FullyShardedDataParallel", "gru")


@pytest.mark.gpus(4)
@pytest.mark.parametrize("name", [*CHOSEN[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in CHOSEN[1:])])
def test_a_flipped_bit_of_the_largest_element_is_caught(ranks, gate, name):
    rows = gate.bit_flips(ranks, [name], flips=0, seed=0)[name]
    assert rows["missed"] == []
    assert rows["largest"][1] >= 3, rows


@pytest.mark.gpus(4)
def test_the_lowest_bit_is_not_told_from_rounding(ranks, gate, monkeypatch):
    monkeypatch.setattr(gate, "Flip", functools.partial(gate.Flip, bit=0))
    rows = gate.bit_flips(ranks, ["ddp_of_any_size"], flips=0, seed=0)["ddp_of_any_size"]
    assert rows["largest"][0] == 0, rows
    assert rows["largest"][1] >= 3, rows


@pytest.mark.slow
def test_the_command_writes_its_figures(tmp_path):
    out = tmp_path / "figures.json"
    words = ["false-alarms", "--steps", "8", "--programs", "metrics", "--json", str(out)]
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gate.py"), *words],
        env={name: value for name, value in os.environ.items() if not name.startswith(("MGPU_CHECK_", "PYTEST_"))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(out.read_text())["of each"]["metrics"] >= 8
