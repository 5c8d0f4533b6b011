"""Diagnosis: known patterns are named, with evidence, and unknown ones are not."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.numerics.differences import diagnose
from mgpu_check.numerics.reduction import exact_parts, random_parts, reduced

PARTS = {
    "exact": exact_parts((4, 5), torch.float32, count=4, seed=1),
    "random": random_parts((4, 5), torch.float32, count=4, seed=1),
}
CASES = {
    "1/4 of the expected (1 / world size)": lambda parts, total: total / 4,
    "4 times the expected (world size)": lambda parts, total: total * 4,
    "3 times the expected": lambda parts, total: total * 3,
    "misses rank 2": lambda parts, total: total - parts[2],
    "counts rank 1 twice": lambda parts, total: total + parts[1],
    "equal its own part alone": lambda parts, total: parts[3].clone(),
    "equal rank 0's part alone": lambda parts, total: parts[0].clone(),
    "equal the sum over ranks 0 to 1": lambda parts, total: parts[0] + parts[1],
    "never written": lambda parts, total: torch.zeros_like(total),
    "permutation": lambda parts, total: total.flip(0),
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("expected", CASES)
def test_patterns(kind, expected) -> None:
    parts = PARTS[kind]
    should = reduced(parts)
    got = CASES[expected](parts, should.value.float())
    found = diagnose(got, should.value, should.tolerance, contributions=parts, rank=3, constants={"world size": 4})
    assert expected in found[0], found


@pytest.mark.parametrize("kind", PARTS)
def test_a_pattern_in_part_of_the_elements(kind) -> None:
    parts = PARTS[kind]
    should = reduced(parts)
    got = should.value.float()
    got.view(-1)[15:] = parts[1].view(-1)[15:]
    found = diagnose(got, should.value, should.tolerance, contributions=parts, rank=0)
    assert "the 5 elements that differ equal rank 1's part alone" in found[0]


def test_one_bit_of_many_elements() -> None:
    should = reduced(PARTS["exact"])
    got = should.value.float()
    got.view(torch.int32)[:, 2] ^= 1 << 12
    (found,) = diagnose(got, should.value)
    assert found.startswith("looks like a flipped bit: bit 12 of 4 elements is inverted, in the first, [0, 2], that of")
    whole = torch.arange(8)
    (found,) = diagnose(whole ^ 4, whole)
    assert "bit 2 of 8 elements" in found


def _bits_of_few(expected: torch.Tensor) -> torch.Tensor:
    got = expected.float()
    got.view(torch.int32)[1, 2] ^= 1 << 12
    return got


def _different_bits(expected: torch.Tensor) -> torch.Tensor:
    got = expected.float()
    for row in range(4):
        got.view(torch.int32)[row, 2] ^= 1 << (12 + row)
    return got


EXACT = reduced(PARTS["exact"]).value


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.tensor([257, 3, 5, 7]), torch.tensor([256, 3, 5, 7])),
        (torch.tensor([0]), torch.tensor([1])),  # a counter
        (torch.tensor([1, 3, 5, 7, 9]), torch.tensor([0, 2, 4, 6, 8])),  # a number was added
        (torch.arange(256.0, 512.0).bfloat16(), torch.arange(256.0, 512.0)),  # rounding to bfloat16
        (torch.arange(256.0, 512.0).bfloat16().float(), torch.arange(256.0, 512.0)),
        (torch.nextafter(torch.ones(9), torch.tensor(2.0)), torch.ones(9)),  # one unit in the last place
        (_bits_of_few(EXACT), EXACT),
        (_different_bits(EXACT), EXACT),
    ],
)
def test_a_bit_that_chance_explains_is_no_flipped_bit(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert "flipped bit" not in " ".join(diagnose(got, expected))


def test_one_wrong_element_is_called_corrupted() -> None:
    should = reduced(PARTS["random"])
    (found,) = diagnose(_bits_of_few(should.value), should.value, should.tolerance)
    assert found.startswith("looks like a corrupted element: it is off by ")


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "float16"), (torch.bfloat16, "bfloat16")])
def test_low_precision(dtype, name) -> None:
    parts = PARTS["random"]
    should = reduced(parts)
    got = sum((part.to(dtype) for part in parts[1:]), parts[0].to(dtype)).float()
    assert f"arithmetic in {name}" in diagnose(got, should.value, should.tolerance, contributions=parts)[0]


def test_overflow() -> None:
    should = reduced([part * 1e4 for part in PARTS["exact"]])
    got = should.value.to(torch.float16).float()
    assert "overflow" in diagnose(got, should.value, should.tolerance)[0]


def test_stale_values() -> None:
    should = reduced(PARTS["random"])
    before = torch.randn(4, 5)
    assert "stale" in diagnose(before, should.value, should.tolerance, previous=before)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", ["one of many", "all alike"])
def test_last_bits_are_rounding_and_no_permutation(dtype, values) -> None:
    right = torch.linspace(1, 2, 20).to(dtype) if values == "one of many" else torch.ones(20, dtype=dtype)
    up = torch.nextafter(right, torch.full_like(right, 9))
    got = torch.where(torch.arange(20) % 3 == 0, up, right)
    (found,) = diagnose(got, right)
    assert "another order of rounding" in found, found
    assert str(dtype).removeprefix("torch.") in found


def test_values_that_are_nearly_right_are_no_permutation() -> None:
    right = torch.linspace(1, 2, 20, dtype=torch.float64)
    assert not any("permutation" in line for line in diagnose(right + 1e-9, right, 1e-9 / 4))


def test_nothing_is_made_up() -> None:
    should = reduced(PARTS["random"])
    torch.manual_seed(0)
    assert (
        diagnose(
            torch.randn(4, 5),
            should.value,
            should.tolerance,
            contributions=PARTS["random"],
            constants={"world size": 4},
        )
        == []
    )
    assert diagnose(should.value, should.value) == []
    assert diagnose(torch.zeros(3), torch.zeros(2)) == []
