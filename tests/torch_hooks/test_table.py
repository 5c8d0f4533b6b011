"""Facts that other modules derive from the table of collectives."""

from __future__ import annotations

from mgpu_check.diagnosis import divergence
from mgpu_check.diagnosis.rules import collectives
from mgpu_check.gates.run import interventions
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, TRANSFERS


def named(kind: str) -> set[str]:
    return {name for name, row in COLLECTIVES.items() if row.kind == kind}


def test_each_collective_has_the_kind_of_its_transfer():
    assert named("reduction") == {"all_reduce", "all_reduce_coalesced", "reduce"}
    assert named("copy") == {"broadcast"}
    assert named("barrier") == {"barrier", "monitored_barrier"}
    assert {COLLECTIVES[name].does for name in named("parts")} == set(TRANSFERS) - {"all_reduce", "reduce", "broadcast"}
    assert {row.kind for row in COLLECTIVES.values()} - {row.does for row in COLLECTIVES.values()} == {
        "reduction",
        "parts",
        "copy",
    }


def test_rules_of_mistakes_follow_the_table():
    assert set(divergence._GIVES_ALL) == {"all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_single"}
    assert {"reduce", "gather", "gather_object"} <= collectives._TO_ROOT
    assert not collectives._TO_ROOT & {"all_gather", "scatter", "reduce_scatter", "broadcast"}
    assert {name for name, row in COLLECTIVES.items() if row.reduces} == {
        name for name in COLLECTIVES if name.startswith(("all_reduce", "reduce"))
    }


def test_results_are_found_by_the_parameters_of_the_table():
    assert set(interventions._OUTPUTS) == {
        "output",
        "output_tensor",
        "tensor_list",
        "output_tensor_list",
        "gather_list",
    }
