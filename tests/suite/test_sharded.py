"""The basis of checks of sharded tensors: the owner of each part, and numbers that low precision holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from mgpu_check.asserts import known_defects
from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.known_defects import Met, heard_by
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.sharded import dtensors
from mgpu_check.suite.sharded.fully_sharded import cast_by_hand


def test_a_module_that_is_cast_by_hand_gets_inputs_of_float32_in_each_step():
    module, findings = torch.nn.Linear(2, 2, dtype=torch.float64), Findings()
    optimizer = torch.optim.SGD(module.parameters())
    cast_by_hand(module, optimizer, Rank(1, 2, 1, 0, torch.device("cpu")), "a model", findings)
    module(torch.ones(1, 2))
    optimizer.step()
    assert not findings.found
    optimizer.step()
    module(torch.ones(1, 2).double())
    optimizer.step()
    assert [str(one) for one in findings.found] == [
        "a model, rank 1: its module was not called",
        "a model, rank 1: inputs of float32 arrived as float64",
    ]
    assert [one.ranks for one in findings.found] == [(1,), (1,)]


def test_an_operator_that_raises_is_named_and_ends_the_calls(monkeypatch):
    def refuse(x):
        raise ValueError("no such thing")

    def lack(x):
        raise NotImplementedError("Operator x does not have a sharding strategy registered.")

    def described(*functions):
        calls = [(name, function, [torch.ones(3)], (Shard(0),)) for name, function in functions]
        return list(dtensors._described(calls, None))

    named = "neg of (S(0)) raised ValueError: no such thing"
    assert described(("neg", refuse), ("abs", refuse)) == [named]
    assert "pad of (S(0)) raised NotImplementedError" in described(("pad", lack))[0]
    heard: list[Any] = []
    monkeypatch.setattr(dtensors, "torch_version", lambda: "2.12.1+cu130")
    with heard_by(heard.append):
        assert described(("interpolate", lack), ("neg", refuse)) == [named], "older versions lack it"
    assert heard == [("interpolate", "this torch does not have it for all placements")]
    monkeypatch.setattr(dtensors, "torch_version", lambda: "2.13.0")
    assert len(described(("interpolate", lack), ("neg", refuse))) == 1


def filled_without_a_sum(rank: Rank) -> tuple[list[str], list[Met]]:
    """Return what is wrong with a partial DTensor that is filled with 2 and 5, and the known defects that were met."""
    mesh = init_device_mesh("cuda", (rank.size,))
    met: list[Met] = []
    with pytest.MonkeyPatch.context() as patch, known_defects.reported_to(met.append):
        patch.setattr(DTensor, "clone", lambda x: x * 1)  # torch 2.12 and 2.13 sum in clone
        calls = [
            ("filled", lambda x, value=value: x.clone().fill_(value) + x, [torch.ones(2, 3)], (Partial(),))
            for value in (2.0, 5.0)
        ]
        return list(dtensors._described(calls, mesh)), met


@pytest.mark.gpus(2)
def test_a_partial_dtensor_that_is_filled_is_a_known_defect(ranks):
    for (known, unexplained), met in ranks.run(filled_without_a_sum):
        assert known is None and met == [Met("dtensor-fills-each-part", True)]
        assert "got 11, expected 6 ± 2.29e-05; all 6 elements differ" in unexplained


def test_each_operator_that_older_versions_lack_is_a_row():
    names = {name for name, _ in (*dtensors.OF_ONE, *dtensors.OF_ALIKE)}
    assert names.issuperset(name for lacking in dtensors._SINCE.values() for name in lacking)
