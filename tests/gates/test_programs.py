"""The benchmarks of gates: right programs raise no alarm, a flipped bit does, and planted mistakes change a result."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn import functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a module of the benchmarks, which are no package."""
    before = {*sys.modules}
    with monkeypatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("gate", "programs"):
            del sys.modules[name]


@pytest.fixture
def gate(benchmark_of: Callable[[str], Any]) -> Any:
    return benchmark_of("gate")


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


@pytest.mark.slow
@pytest.mark.gpus(4)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_flipped_bit_of_the_largest_element_is_caught(ranks, gate, name):
    rows = gate.bit_flips(ranks, [name], flips=0, seed=0)[name]
    assert rows["missed"] == []
    assert rows["largest"][1] >= 3, rows


@pytest.mark.slow
@pytest.mark.gpus(4)
def test_the_lowest_bit_is_not_told_from_rounding(ranks, gate, monkeypatch):
    monkeypatch.setattr(gate, "Flip", functools.partial(gate.Flip, bit=0))
    rows = gate.bit_flips(ranks, ["ddp_of_any_size"], flips=0, seed=0)["ddp_of_any_size"]
    assert rows["largest"][0] == 0, rows
    assert rows["largest"][1] >= 3, rows
