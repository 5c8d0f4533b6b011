"""GPUs that do not train alike are found, with the step and the parameter; what cannot be decided is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_check.acceptance.cases import PRECISIONS, Trained, TransformerCase
from mgpu_check.acceptance.faults import hardware_planted, hardware_text, planted_from
from mgpu_check.acceptance.training import transformer as parallel_training
from mgpu_check.acceptance.training.checks import (
    Departure,
    Divided,
    departures,
    judge,
    train_alike,
)
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch, ReplicaMismatch
from mgpu_check.oracles.generated_data import digests
from mgpu_check.oracles.training.cases import TrainingSpec
from mgpu_check.simulated import simulated_node
from mgpu_check.simulated.hardware import Defect, Hardware, cells
from mgpu_check.simulated.hardware import planted as on_hardware
from tests.acceptance.nodes import Node

CASE = TransformerCase(steps=3)
NAMES = ("loss", "a", "b")


def said(*digests: tuple[int, ...]) -> Trained:
    return Trained(CASE, NAMES, digests, 1.0)


RIGHT = said((1, 2, 3), (4, 5, 6), (7, 8, 9))
LATE = said((1, 2, 3), (4, 5, 6), (7, 8, 0))
EARLY = said((1, 0, 3), (4, 0, 6), (7, 8, 9))


def test_who_has_left_the_majority_votes_no_more():
    gone, divided = departures({0: RIGHT, 1: EARLY, 2: LATE, 3: RIGHT})
    assert gone == {1: Departure(1, ("a",), 0), 2: Departure(3, ("b",), 0)}
    assert divided is None


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ({2: RIGHT, 5: LATE}, Divided(3, ("b",), (2, 5))),
        ({0: RIGHT, 1: RIGHT, 2: LATE, 3: LATE}, Divided(3, ("b",), (0, 1, 2, 3))),
        ({0: RIGHT, 1: LATE, 2: EARLY}, Divided(3, ("b",), (0, 1))),
        ({0: RIGHT, 1: said((1, 2, 3))}, Divided(2, ("number of steps",), (0, 1))),
        ({0: RIGHT, 1: RIGHT}, None),
    ],
)
def test_without_a_majority_nobody_is_accused(trained, expected):
    _, divided = departures(trained)
    assert divided == expected


def test_a_departure_says_what_is_wrong_and_whether_it_happens_again():
    data = {1: b"\0\0\0\0\0\0\0\0", 0: b"\0\0\0\0\0\0\4\0"}
    found, divided = judge({0: RIGHT, 1: LATE, 2: RIGHT}, lambda gpu, step, name: data[gpu])
    assert divided is None
    assert [(one.subject.members, one.work.operations) for one in found] == [((0,), 3), ((1,), 3), ((2,), 3)]
    assert [one.outcome for one in found] == ["passed", "failed", "passed"]
    again = "trained again, 1 of 2 elements of b are wrong"
    assert found[1].seen == f"departs from the other GPUs in step 3, in b; {again}"
    assert found[1].evidence["at"] == [1] and found[1].evidence["bits"] == ["0x00040000"]
    once, _ = judge({0: RIGHT, 1: EARLY, 2: RIGHT}, lambda gpu, step, name: b"same")
    assert once[1].seen.endswith("; trained again, it does not")
    unknown, _ = judge({0: RIGHT, 1: EARLY, 2: RIGHT}, lambda gpu, step, name: None)
    assert unknown[1].seen == "departs from the other GPUs in step 1, in a"


def test_a_training_that_changes_nothing_is_no_pass():
    still = said((1, 2, 3), (4, 2, 3))
    found, _ = judge({0: still, 1: still}, lambda gpu, step, name: None)
    assert [one.outcome for one in found] == ["failed", "failed"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_digest_sees_every_bit(dtype):
    tensors = [torch.arange(3).to(dtype), torch.tensor(7).to(dtype), torch.arange(6).to(dtype).view(2, 3).T]
    before = digests(tensors).tolist()
    assert len(set(before)) == 3
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensors[0].element_size()]
    for bit in range(8 * tensors[0].element_size()):
        for element in range(3):
            changed = tensors[0].clone()
            changed.view(integer)[element] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(integer)
            after = digests([changed, *tensors[1:]]).tolist()
            assert after[0] != before[0] and after[1:] == before[1:]
    swapped = digests([tensors[0].flip(0), *tensors[1:]]).tolist()
    signs = digests([-torch.zeros(2, dtype=torch.float64)]).tolist() != digests([torch.zeros(2, dtype=torch.float64)])
    assert swapped[0] != before[0] and signs


def subjects(node: Node) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.subject.kind, one.subject.members) for one in node.failed}


@pytest.fixture(scope="module", autouse=True)
def _node():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with simulated_node(3):
        yield
    torch.set_num_threads(threads)


def hardware(*faults: str):
    return hardware_planted(hardware_text([planted_from(fault) for fault in faults]))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_right_gpus_train_alike(precision):
    """By vote, and beside the host; in each variant, which the simplest cases of the precisions cover."""
    place = PRECISIONS.index(precision)
    variant = ("sgd", "adamw")[place % 2], bool(place // 2), bool((place + 1) // 2 % 2)
    case = TransformerCase(precision, *variant, steps=3, seed=place)
    node: Any = Node("GG")
    alone: Any = Node("G")
    with hardware():
        train_alike(node, case)
        train_alike(alone, case)
    assert [one.outcome for one in node.results] == ["passed"] * 2
    assert all(one.work.operations == 3 and one.work.seconds > 0 for one in node.results)
    assert {one.outcome for one in alone.results} == {"passed"}


@pytest.mark.parametrize(
    ("count", "fault", "accused"),
    [
        (3, "product-lane", ("gpu", (1,))),
        pytest.param(3, "attention", ("gpu", (1,)), marks=pytest.mark.slow),
        pytest.param(3, "functions:device=2", ("gpu", (2,)), marks=pytest.mark.slow),
        (3, "reduction", ("gpu", (1,))),  # the checksum is wrong, the data are not
        (2, "product-flutters", ("gpu", (1,))),  # differs from itself
        (1, "product-nan:every=1,device=0", ("gpu", (0,))),  # always wrong, and far from the host
        pytest.param(2, "product-nan:every=1", ("gpu", (1,)), marks=pytest.mark.slow),
        (2, "upload-truncated", ("upload", (1,))),
        pytest.param(2, "download-truncated", ("download", (1,)), marks=pytest.mark.slow),
    ],
)
def test_what_is_broken_is_accused(count, fault, accused):
    with hardware(fault):
        node: Any = Node("G" * count)
        train_alike(node, CASE)
    assert accused in subjects(node), node.results


class Off(Defect):
    """Products of one device are off by their lowest bit, always."""

    def operated(self, operation):
        if operation.device == 1 and operation.name == "addmm":
            cells(operation.outputs[0])[0] ^= 1


def test_of_two_that_differ_by_the_lowest_bit_nobody_is_accused():
    """Neither differs from itself, nor is it further from the host than rounding leads."""
    node: Any = Node("G" * 2)
    with on_hardware(Hardware([Off()], 16 << 20)):
        train_alike(node, CASE)
    assert subjects(node) == {("group", (0, 1))}
    assert "without a majority: step 1, " in node.results[-1].seen


@pytest.mark.parametrize(
    ("error", "size", "suspects"),
    [
        (ReplicaMismatch("rank 2 differs", ranks=[2]), 4, (2,)),
        (ReplicaMismatch("rank 1 differs", ranks=[1]), 2, ()),
        (GradientMismatch("2 of 3 results differ", ranks=[0]), 4, ()),
    ],
)
def test_what_ranks_disagree_on_is_of_their_group(monkeypatch, error, size, suspects):
    """Of two that differ, the right one is unknown; of gradients, the rank with the wrong part is unknown."""

    def wrong(training, rank):
        raise error

    monkeypatch.setattr(parallel_training, "assert_distributed_agrees", wrong)
    (found,) = parallel_training.examine_distributed(Rank(1, size, 1, 0, torch.device("cpu")), TrainingSpec())
    assert (found.outcome, found.subject.members) == ("failed", tuple(range(size)))
    assert found.suspects == suspects


def test_a_group_that_agrees_is_noted_once():
    training = TrainingSpec(steps=2)
    devices = [torch.device("cuda", index) for index in range(3)]
    (found,) = parallel_training.examine_data_parallel(devices, training)
    assert (found.outcome, found.work.operations) == ("passed", 2)
