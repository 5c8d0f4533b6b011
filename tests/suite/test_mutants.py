"""Mutants change the live function, and only for a time (`benchmarks/mutants.py`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "mutants.py"
MODULE = "batches_of_this_test"
SOURCE = """
class Batches:
    def __len__(self):
        if self.whole:
            return self.rows // self.size
        return self.rows - self.size
"""


@pytest.fixture
def mutants(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("mutants", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / f"{MODULE}.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(module, "_files", lambda: {str(path): ("loading", MODULE)})
    return module


@pytest.fixture
def batches(mutants):
    made = importlib.import_module(MODULE).Batches()
    made.whole, made.rows, made.size = True, 8, 4
    return made


def test_a_planted_mutant_changes_a_method_until_it_is_removed(mutants, batches, tmp_path):
    (chosen,) = (mutant for mutant in mutants.mutants() if mutant.what == "self.rows // self.size by Mult")
    file = tmp_path / "mutant"
    file.write_bytes(mutants.compiled(chosen))
    with mutants.planted(str(file)):
        assert len(batches) == 32
    assert len(batches) == 2


def test_lines_that_a_process_executes_are_traced(mutants, batches, tmp_path):
    file = tmp_path / "lines"
    with mutants.traced(str(file)):
        len(batches)
    traced = {int(line.split()[1]) for line in file.read_text().splitlines()}
    executed = [m for m in mutants.mutants() if {*range(m.first, m.last + 1)} & traced]
    assert any("by Mult" in mutant.what for mutant in executed)
    assert not any("by Add" in mutant.what for mutant in executed), "the branch without whole batches"
