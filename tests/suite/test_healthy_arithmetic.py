"""A healthy GPU may give another sign of zero than the CPU: its results are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mgpu_check.errors import DeviceEnumerationError
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.fixtures.checks import assert_device_computes


@pytest.fixture
def node() -> Iterator[list[torch.device]]:
    with simulated_node(2):
        yield [torch.device("cuda", index) for index in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_one_term_may_be_zero_of_either_sign(
    node: list[torch.device], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    multiply = torch.Tensor.__matmul__
    data = torch.tensor([[0.0], [-3.0]], dtype=dtype)
    assert (data @ data.T).signbit().any(), "the CPU begins with the first product"

    def accumulated(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        product = multiply(rows, columns)
        return product + 0.0 if rows.device.type == "cuda" else product

    monkeypatch.setattr(torch.Tensor, "__matmul__", accumulated)
    assert_device_computes(node[1], data)
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda rows, columns: multiply(rows, columns) + (rows.device.type == "cuda")
    )
    with pytest.raises(DeviceEnumerationError, match=r"x @ x\.T"):
        assert_device_computes(node[1], data)
