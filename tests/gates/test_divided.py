"""Steps on models that are divided among ranks: right ones hold, and wrong ones are refuted."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from mgpu_check.gates.gate_arguments import Program
from tests.gates import divided, divided_by_layer
from tests.gates.divided import MISTAKES
from tests.gates.single_cases import failure
from tests.gates.steps import variant

pytestmark = [
    pytest.mark.gpus(4),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),  # on one device
]


class Case(NamedTuple):
    step: type[divided.Step]
    mesh: dict[str, int]
    build: Any = divided.Mlp
    batch: Any = divided.rows
    returned_by: Any = None


BOTH = {"dp": 2, "tp": 2}
ONE = {"dp": 4}
NODES = {"replicate": 2, "shard": 2}
STAGES = ({"dp": 2, "pp": 2}, divided_by_layer.layers, divided_by_layer.batch, "last")
EXPERTS = ({"ep": 4}, divided_by_layer.Mixture, divided_by_layer.batch)
INTERLEAVED = {"schedule_class": ScheduleInterleaved1F1B, "per_rank": 2}
CASES = {
    "DTensor": Case(divided.TensorParallel, BOTH),
    "by hand": Case(divided.Megatron, BOTH),
    "vocabulary": Case(divided.VocabularyParallel, BOTH, divided.Words, divided.texts),
    "FSDP1": Case(divided.Sharded, ONE),
    "FSDP1 with originals": Case(variant(divided.Sharded, originals=True), ONE),
    "FSDP2": Case(divided.FullyShard, ONE),
    "HSDP": Case(divided.HybridShard, NODES),
    "FSDP2 x TP": Case(divided.FullyShardTensorParallel, BOTH),
    "flat": Case(divided.FlatShards, ONE),
    "GPipe": Case(divided_by_layer.Scheduled, *STAGES),
    "interleaved": Case(variant(divided_by_layer.Scheduled, **INTERLEAVED), *STAGES),
    "experts": Case(divided_by_layer.Experts, *EXPERTS),
    "experts slim": Case(divided_by_layer.SlimExperts, *EXPERTS),
}

SAMPLES = 16
"""Enough for each expert to get some."""
OFTEN = ("by hand", ("", divided.SCALED))
"""Slices that are found by their values. Models are divided by FSDP2 and DTensors each day in other tests."""


@pytest.mark.parametrize(
    ("name", "steps"), [OFTEN, *(pytest.param(name, ("", *MISTAKES), marks=pytest.mark.slow) for name in CASES)]
)
def test_right_steps_hold_and_each_mistake_shows(ranks, name, steps):
    case = CASES[name]
    for wrong in steps:
        step = functools.partial(case.step, wrong=wrong)
        program = Program(step, case.build, case.batch, returned_by=case.returned_by)
        failed = failure(ranks, program, 4, SAMPLES, steps=1 if wrong else 2, mesh=case.mesh)
        assert (failed is not None and failed.error is None) if wrong else failed is None, wrong
