"""Rules judge evidence, whoever brings it; the list says which goes before which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mgpu_check.mistakes import rules
from mgpu_check.mistakes.evidence import ByRank, Evidence, Factor, Sampler, Start
from mgpu_check.mistakes.rules.order import judged

START = Start("weight differs", "weight differs")
LOADS = ByRank([1, 0], "load_state_dict ran on rank 0")


@pytest.mark.parametrize(
    ("evidence", "mistakes"),
    [
        (Evidence(2), []),
        (Evidence(2, start=START), ["different-initialization"]),
        (Evidence(2, start=START, loads=ByRank([1, 1], "both")), ["different-initialization"]),
        (Evidence(2, start=START, loads=LOADS), ["restored-on-one-rank"]),
        (Evidence(2, loads=LOADS), []),
        (Evidence(2, loads=LOADS, parted="ranks part ways"), ["restored-on-one-rank"]),
        (Evidence(2, decisions=[ByRank([3, 3], "same"), ByRank([1, 2], "rates")]), ["decision-per-rank"]),
        (Evidence(2, factor=Factor(2.0, 1e-2, "all is")), ["world-size-factor"]),
        (Evidence(2, factor=Factor(0.25, 1e-2, "all is", (1, -1, 2, -2))), ["world-size-factor"]),
        (Evidence(2, factor=Factor(0.25, 1e-2, "all is", (1, -1, 2, -2)), micro_batches=4), ["accumulation-factor"]),
        (Evidence(2, factor=Factor(2.0, 1e-2, "all is", ())), []),
        (Evidence(2, factor=Factor(3.0, 1e-2, "all is"), normalizes="bn"), ["batch-statistics-per-rank"]),
        (Evidence(2, surplus="2 samples came again"), []),
        (Evidence(2, surplus="2 samples came again", samplers=[Sampler(7, 2, True)]), []),
        (Evidence(2, surplus="2 samples came again", samplers=[Sampler(7, 2, False)]), ["padding-counted"]),
        (Evidence(2, gradients_apart="own", normalizes="bn"), ["gradients-not-synchronized", "batch-statistics-per-rank"]),
    ],
)  # fmt: skip
def test_evidence_is_judged_by_its_data(evidence, mistakes):
    assert [finding.mistake for finding in judged(evidence, 3)] == mistakes


def test_each_rule_is_in_the_list():
    directory = Path(rules.__file__).parent
    listed = {
        node.attr
        for node in ast.walk(ast.parse((directory / "order.py").read_text()))
        if isinstance(node, ast.Attribute)
    }
    written = {
        node.name
        for path in directory.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and path.stem != "order"
    }
    assert written - listed == set()
