"""Mutants of torch change the live function, and only for a time (`benchmarks/mutants.py`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch.utils.data import BatchSampler

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "mutants.py"


@pytest.fixture
def mutants(monkeypatch):
    spec = importlib.util.spec_from_file_location("mutants", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "AREAS", {"loading": "utils/data/sampler"})
    return module


def test_a_planted_mutant_changes_a_method_until_it_is_removed(mutants, tmp_path):
    (chosen,) = (
        mutant
        for mutant in mutants.mutants()
        if mutant.function == "BatchSampler.__len__" and mutant.what == "len(self.sampler) // self.batch_size by Mult"
    )
    sampler = BatchSampler(range(8), 4, drop_last=True)
    file = tmp_path / "mutant"
    file.write_bytes(mutants.compiled(chosen))
    with mutants.planted(str(file)):
        assert len(sampler) == 32
    assert len(sampler) == 2


def test_lines_that_a_process_executes_are_traced(mutants, tmp_path):
    file = tmp_path / "lines"
    with mutants.traced(str(file)):
        len(BatchSampler(range(8), 4, drop_last=True))
    traced = {int(line.split()[1]) for line in file.read_text().splitlines()}
    executed = [
        m for m in mutants.mutants() if m.function == "BatchSampler.__len__" and {*range(m.first, m.last + 1)} & traced
    ]
    assert any("by Mult" in mutant.what for mutant in executed)
    assert not any("by Sub" in mutant.what for mutant in executed), "the branch without drop_last"
