"""The comparison of devices names who is wrong in what; the tables of operators hold on a sound node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mgpu_check.asserts.findings import first_suffices
from mgpu_check.errors import DeviceMismatch, ShardError
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.common.agreement import Case, assert_devices_agree, difference
from mgpu_check.suite.common.faults.registry import planted
from mgpu_check.suite.common.operators import Kind
from mgpu_check.suite.loading.pinned_batches import assert_pinned_by_themselves

Devices = list[torch.device]


@pytest.fixture
def node() -> Iterator[Devices]:
    with simulated_node(4):
        yield [torch.device("cuda", index) for index in range(4)]


def _wrong_on(*indices: int):
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = a @ b
        if result.device.index in indices:
            result[1, 2] += 1
        return result

    return call


def _product(*indices: int) -> Case:
    return Case("matmul of float32", _wrong_on(*indices), (torch.ones(3, 4), torch.ones(4, 5)))


SUM = Case("add of float32", lambda a: a + a, (torch.ones(3),))


def test_one_device_alone_is_named(node: Devices) -> None:
    with pytest.raises(DeviceMismatch) as caught:
        assert_devices_agree(node, [SUM, _product(2)])
    assert str(caught.value) == (
        "cuda:2 alone is wrong in matmul of float32, 3x4 and 4x5: 1 of 15 elements, the first [1, 2]: "
        "expected 4.0, got 5.0; the other 3 agree with the CPU"
    )
    assert caught.value.ranks == (2,)


def test_several_devices_and_cases_are_named(node: Devices) -> None:
    with pytest.raises(DeviceMismatch) as caught:
        assert_devices_agree(
            node, [_product(0, 3), SUM, Case("product", _wrong_on(3), (torch.ones(2, 2), torch.ones(2, 3)))]
        )
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("cuda:0, cuda:3 are wrong, cuda:3 in product, 2x2 and 2x3: 1 of 6 elements")
    assert lines == [
        "cuda:0: 1 of 3 cases are wrong: [matmul of float32, 3x4 and 4x5]",
        "cuda:3: 2 of 3 cases are wrong: [matmul of float32, 3x4 and 4x5], [product, 2x2 and 2x3]",
    ]
    assert caught.value.ranks == (0, 3)


def test_all_devices_and_a_single_one(node: Devices) -> None:
    with pytest.raises(DeviceMismatch, match=r"^all 4 devices are wrong in matmul"):
        assert_devices_agree(node, [_product(0, 1, 2, 3)])
    with pytest.raises(DeviceMismatch, match=r"^cuda:2 is wrong in matmul"):
        assert_devices_agree(node[2:3], [_product(2)])


def test_what_raises_or_lands_elsewhere_is_wrong(node: Devices) -> None:
    def raising(a: torch.Tensor) -> torch.Tensor:
        if a.device.index == 1:
            raise RuntimeError("no kernel")
        return a

    with pytest.raises(DeviceMismatch, match="cuda:1 alone is wrong in f, 3: it raised RuntimeError: no kernel"):
        assert_devices_agree(node, [Case("f", raising, (torch.ones(3),))])
    with pytest.raises(DeviceMismatch, match="its result is on cuda:0"):
        assert_devices_agree(node, [Case("f", lambda a: a.to(node[0]), (torch.ones(3),), expected=torch.ones(3))])


def test_cases_after_a_wrong_one_are_not_run_where_the_first_finding_suffices(node: Devices) -> None:
    later = Case("later", lambda a: pytest.fail("it is run"), (torch.ones(3),))
    with first_suffices(), pytest.raises(DeviceMismatch, match="cuda:2 alone is wrong in matmul"):
        assert_devices_agree(node, [SUM, _product(2), later])


NAN = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("got", "expected", "wrong"),
    [
        (NAN[:1], NAN[1:], {"bits", "close"}),
        (torch.tensor([0.0]), torch.tensor([-0.0]), {"bits", "values"}),
        (torch.tensor([1.0]), torch.tensor([1.0]), set()),
        (torch.tensor([1.0 + 2**-23]), torch.tensor([1.0]), {"bits", "values", "numbers"}),
        (torch.tensor([1.0 + 2**-10]), torch.tensor([1.0]), {"bits", "values", "numbers", "close"}),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), {"bits", "values", "numbers", "close"}),
        (torch.tensor([2 + 3j]), torch.tensor([2 - 3j]).conj(), set()),
        (torch.tensor([2**62 + 1]), torch.tensor([2**62]), {"bits", "values", "numbers", "close"}),
    ],
)
@pytest.mark.parametrize("kind", ["bits", "values", "numbers", "close"])
def test_kinds_of_comparison(got: torch.Tensor, expected: torch.Tensor, wrong: set[str], kind: Kind) -> None:
    assert bool(difference(got, expected, kind)) == (kind in wrong)


def test_shapes_and_dtypes_count() -> None:
    assert difference(torch.ones(2), torch.ones(3), "values") == "expected shape (3,), got (2,)"
    assert difference(torch.ones(2), torch.ones(2).int(), "values") == "expected int32, got float32"


def test_batches_that_pin_themselves_are_named_with_their_place(node: Devices) -> None:
    assert_pinned_by_themselves()
    with planted("own-pinning-lost"), pytest.raises(ShardError, match="the value of a dict: it was pinned 0 times"):
        assert_pinned_by_themselves()
