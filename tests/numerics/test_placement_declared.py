"""Placements that a user or a library declares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from mgpu_check.numerics.placement import by_attributes, by_user

SHAPES = {"up.weight": (8, 6), "layers.3.weight": (4, 4), "bias": (5,)}
PLACE = {"": (3, 4), "dp": (1, 2), "tp": (1, 2)}
"""Of rank 3 in a mesh of 2 x 2."""


def positions(spec: Any, name: str = "up.weight") -> list[int] | None:
    found = by_user({name: spec}, name, None, PLACE, SHAPES)
    assert found is not None
    (one,) = found
    return None if one.at is None else one.at.tolist()


def rows(*which: int) -> list[int]:
    return [row * 6 + column for row in which for column in range(6)]


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        (0, rows(6, 7)),
        (Shard(0), rows(6, 7)),
        (-2, rows(6, 7)),
        ({"tp": 0}, rows(4, 5, 6, 7)),
        ({"tp": Shard(0), "dp": Replicate()}, rows(4, 5, 6, 7)),
        ({"dp": None, "tp": 0}, rows(4, 5, 6, 7)),
        ({"dp": 0, "tp": 0}, rows(6, 7)),
        ({"dp": 0, "tp": 1}, [row * 6 + column for row in (4, 5, 6, 7) for column in (3, 4, 5)]),
        ("whole", None),
        (Replicate(), None),
        (slice(2, 4), rows(2, 3)),
        ([0, 1, 6], rows(0, 1, 6)),
        (torch.tensor([7, 0]), rows(7, 0)),
        ((slice(None), slice(0, 1)), [0, 6, 12, 18, 24, 30, 36, 42]),
    ],
)
def test_every_form(spec, held):
    assert positions(spec) == held


def test_uneven_chunks_and_ranks_without_any():
    assert positions(0, "bias") == []  # chunks of 2, 2 and 1
    assert positions({"tp": 0}, "bias") == [3, 4]


def test_another_name_on_one_device():
    (one,) = by_user({"0.*": ("layers.3.weight", {"tp": 0})}, "0.weight", None, PLACE, SHAPES)
    assert (one.whole, one.shape, one.at.tolist()) == ("layers.3.weight", (4, 4), [*range(8, 16)])


def test_the_first_pattern_that_matches_counts():
    placement = {"up.*": "whole", "*": 0}
    assert by_user(placement, "up.weight", None, PLACE, SHAPES)[0].at is None
    assert by_user(placement, "bias", None, PLACE, SHAPES)[0].at is not None
    assert by_user({"down.*": 0}, "up.weight", None, PLACE, SHAPES) is None


def test_a_function_of_name_and_rank():
    def placement(name, rank):
        return {"tp": 0} if name == "up.weight" and rank == "the rank" else None

    assert by_user(placement, "up.weight", "the rank", PLACE, SHAPES)[0].at.tolist() == rows(4, 5, 6, 7)
    assert by_user(placement, "bias", "the rank", PLACE, SHAPES) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (2, r"placement of 'up.weight' is 2, which does not fit shape \[8, 6\] and mesh axes \['dp', 'tp'\]"),
        ({"pp": 0}, "'pp'"),
        ({"tp": "rows"}, "'rows' is no dimension"),
        ({"tp": True}, "True is no dimension"),
        (2.5, "2.5 is no dimension"),
        ([8], "give a dimension, a mapping from mesh axes to dimensions"),
        (("down.weight", 0), r"names 'down.weight', which build\(\) does not make; choose of up.weight"),
    ],
)
def test_wrong_specifications(spec, message):
    with pytest.raises(ValueError, match=message):
        positions(spec)


def marked(shape: tuple[int, ...], dim: int, stride: int = 1, parallel: bool = True) -> Any:
    tensor: Any = torch.zeros(shape)
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = parallel, dim, stride
    return tensor


@pytest.mark.parametrize(
    ("tensor", "held"),
    [
        (marked((4, 6), 0), rows(4, 5, 6, 7)),
        (marked((4, 6), 0, stride=2), rows(2, 3, 6, 7)),
        (marked((8, 3), 1), [row * 6 + column for row in range(8) for column in (3, 4, 5)]),
        (marked((2, 6), 0), rows(6, 7)),  # of all four ranks, and not of the two along "tp"
    ],
)
def test_attributes_of_megatron(tensor, held):
    (one,) = by_attributes(tensor, "up.weight", (8, 6), PLACE)
    assert one.at.tolist() == held


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6), marked((4, 6), 0, parallel=False), marked((4, 6), -1), marked((3, 6), 0), marked((1, 6), 0)],
)
def test_attributes_that_declare_nothing(tensor):
    assert by_attributes(tensor, "up.weight", (8, 6), PLACE) is None


def of_expert(shape: tuple[int, ...], dim: int = -1) -> Any:
    tensor = marked(shape, dim, parallel=dim >= 0)
    tensor.allreduce = False
    return tensor


EXPERTS = {"": (5, 8), "ep": (1, 2), "etp": (0, 2), "tp": (1, 4)}


@pytest.mark.parametrize(
    ("tensor", "coordinates", "held"),
    [
        (of_expert((4, 6)), EXPERTS, rows(4, 5, 6, 7)),  # a stack of experts
        (
            of_expert((4, 3), 1),
            {**EXPERTS, "tp": (0, 1)},
            [row * 6 + column for row in (4, 5, 6, 7) for column in (0, 1, 2)],
        ),
        (of_expert((4, 6), 0), {"": (5, 8), "tp": (1, 2), "ep": (1, 4)}, rows(4, 5, 6, 7)),  # "etp" is "tp" by default
        (of_expert((1, 6)), EXPERTS, rows(5)),
        (of_expert((4, 6), 0), {"": (5, 8), "tp": (0, 2), "ep": (1, 2)}, None),  # which of the two?
        (of_expert((8, 6)), EXPERTS, None),  # a whole expert is told by its values
        (of_expert((4, 6)), {"": (5, 8), "tp": (1, 2)}, None),  # experts are not divided over "tp"
        (of_expert((3, 6)), EXPERTS, None),
        (of_expert((8,)), EXPERTS, None),
    ],
)
def test_experts_of_megatron(tensor, coordinates, held):
    found = by_attributes(tensor, "up.weight", (8, 6), coordinates)
    assert (None if found is None else found[0].at.tolist()) == held
