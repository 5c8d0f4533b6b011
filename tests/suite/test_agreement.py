"""The comparison of devices names who is wrong in what."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.errors import DeviceMismatch
from mgpu_check.oracles.agreement import Kind, WrongCase, difference, named_wrong

Devices = list[torch.device]
NODE = [torch.device("cuda", index) for index in range(4)]
PRODUCT, SUM = "matmul of float32, 3x4 and 4x5", "add of float32, 3"


def named(*wrong: tuple[int, str, str], devices: Devices = NODE) -> DeviceMismatch:
    return named_wrong([WrongCase(NODE[index], case, what) for index, case, what in wrong], devices, 3)


def test_one_device_alone_is_named() -> None:
    error = named((2, PRODUCT, "1 of 15 elements"))
    assert str(error) == f"cuda:2 alone is wrong in {PRODUCT}: 1 of 15 elements; the other 3 agree with the CPU"
    assert error.ranks == (2,)


def test_several_devices_and_cases_are_named() -> None:
    error = named((0, PRODUCT, "1 of 15 elements"), (3, PRODUCT, "1 of 15 elements"), (3, SUM, "2 of 3 elements"))
    first, *lines = str(error).splitlines()
    assert first.startswith(f"cuda:0, cuda:3 are wrong, cuda:3 in {SUM}: 2 of 3 elements")
    assert lines == [
        f"cuda:0: 1 of 3 cases are wrong: [{PRODUCT}]",
        f"cuda:3: 2 of 3 cases are wrong: [{PRODUCT}], [{SUM}]",
    ]
    assert error.ranks == (0, 3)


def test_all_devices_and_a_single_one() -> None:
    everywhere = named(*((index, PRODUCT, f"expected 4.0, got {index}") for index in range(4)))
    assert str(everywhere).startswith(f"all 4 devices are wrong in {PRODUCT}: cuda:0: expected 4.0, got 0; cuda:1: ")
    assert str(named((2, PRODUCT, "it raised"), devices=NODE[2:3])) == f"cuda:2 is wrong in {PRODUCT}: it raised"


NAN = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("got", "expected", "wrong"),
    [
        (NAN[:1], NAN[1:], {"bits"}),
        (torch.tensor([0.0]), torch.tensor([-0.0]), {"bits", "values"}),
        (torch.tensor([1.0]), torch.tensor([1.0]), set()),
        (torch.tensor([1.0 + 2**-23]), torch.tensor([1.0]), {"bits", "values", "numbers"}),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), {"bits", "values", "numbers"}),
        (torch.tensor([2 + 3j]), torch.tensor([2 - 3j]).conj(), set()),
        (torch.tensor([2**62 + 1]), torch.tensor([2**62]), {"bits", "values", "numbers"}),
    ],
)
@pytest.mark.parametrize("kind", ["bits", "values", "numbers"])
def test_kinds_of_comparison(got: torch.Tensor, expected: torch.Tensor, wrong: set[str], kind: Kind) -> None:
    assert bool(difference(got, expected, kind)) == (kind in wrong)


def test_shapes_and_dtypes_count() -> None:
    assert difference(torch.ones(2), torch.ones(3), "values") == "expected shape (3,), got (2,)"
    assert difference(torch.ones(2), torch.ones(2).int(), "values") == "expected int32, got float32"
