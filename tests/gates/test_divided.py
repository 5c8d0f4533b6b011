"""The gate for steps on models that are divided among ranks: right steps pass, and wrong ones are refuted."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest

from mgpu_check import ScalingMismatch, assert_step_scales
from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario, size_of
from mgpu_check.gates.search.trials import Trials
from tests.gates import divided, divided_by_layer
from tests.gates.divided import MISTAKES

pytestmark = [
    pytest.mark.gpus(4),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),  # on one device
]


class Case(NamedTuple):
    step: type[divided.Step]
    mesh: dict[str, int]
    build: Any = divided.Mlp
    batch: Any = divided.rows
    options: dict[str, Any] = {}


BOTH = {"dp": 2, "tp": 2}
ONE = {"dp": 4}
NODES = {"replicate": 2, "shard": 2}
STAGES = ({"dp": 2, "pp": 2}, divided_by_layer.layers, divided_by_layer.batch, {"returned_by": "last"})
EXPERTS = ({"ep": 4}, divided_by_layer.Mixture, divided_by_layer.batch)
CASES = {
    "DTensor": Case(divided.TensorParallel, BOTH),
    "by hand": Case(divided.Megatron, BOTH),
    "by hand in place": Case(divided.MegatronInPlace, BOTH),
    "fused": Case(divided.FusedAttention, BOTH, divided.Attention, divided.sequences),
    "fused in place": Case(divided.FusedAttentionInPlace, BOTH, divided.Attention, divided.sequences),
    "vocabulary": Case(divided.VocabularyParallel, BOTH, divided.Words, divided.texts),
    "FSDP1": Case(divided.Sharded, ONE),
    "FSDP1 with originals": Case(divided.ShardedWithOriginals, ONE),
    "FSDP1 in nodes": Case(divided.ShardedInNodes, NODES),
    "FSDP2": Case(divided.FullyShard, ONE),
    "HSDP": Case(divided.HybridShard, NODES),
    "FSDP2 x TP": Case(divided.FullyShardTensorParallel, BOTH),
    "flat": Case(divided.FlatShards, ONE),
    "GPipe": Case(divided_by_layer.Scheduled, *STAGES),
    "interleaved": Case(divided_by_layer.Interleaved, *STAGES),
    "pipeline by hand": Case(divided_by_layer.HandedOn, *STAGES),
    "experts": Case(divided_by_layer.Experts, *EXPERTS),
    "experts slim": Case(divided_by_layer.SlimExperts, *EXPERTS),
    "experts of Megatron": Case(divided_by_layer.MegatronExperts, *EXPERTS),
}

SAMPLES = 16
"""Enough for each expert to get some."""
QUICK = ("FSDP2 x TP", "GPipe")
"""Shards of slices, and stages. What ranks hold is found out in other ways by the others."""


def trials(ranks: Any, case: Case, wrong: str) -> Trials:
    step = functools.partial(case.step, wrong=wrong)
    program = Program(step, case.build, case.batch, returned_by=case.options.get("returned_by"))
    return Trials(ranks, program, frozenset(KINDS), None, case.step.__name__)


def scenario(case: Case, steps: int = 1) -> Scenario:
    mesh = tuple(case.mesh.items())
    return Scenario(size_of(mesh), SAMPLES, steps, mesh=mesh)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_right_steps_hold_and_each_mistake_shows(ranks, name):
    case = CASES[name]
    right = trials(ranks, case, "")
    assert right.run(scenario(case, steps=2)) is None
    right.finish([scenario(case).place], {})
    for wrong in MISTAKES:
        failed = trials(ranks, case, wrong).run(scenario(case))
        assert failed is not None and failed.error is None, wrong


def gate(ranks: Any, name: str, wrong: str = "", **options: Any) -> None:
    """Few cases: the least that shows what is shown here."""
    case = CASES[name]
    few = {"build": case.build, "batch": case.batch, "meshes": [case.mesh], "sizes": [SAMPLES], "max_examples": 3}
    assert_step_scales(ranks, functools.partial(case.step, wrong=wrong), **{**few, **case.options, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_gate_passes_right_steps(ranks, name):
    gate(ranks, name, sizes=[8, SAMPLES], max_examples=12)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", MISTAKES)
@pytest.mark.parametrize("name", CASES)
def test_the_gate_refutes_wrong_steps(ranks, name, wrong):
    with pytest.raises(ScalingMismatch):
        gate(ranks, name, wrong)
