"""A healthy GPU may round other steps than the CPU, and give another sign of zero: its results are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mgpu_check.errors import DeviceEnumerationError, DeviceMismatch
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.fixtures.checks import assert_device_computes
from mgpu_check.suite.mismatch.checks import assert_right_on_each


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


@pytest.mark.parametrize(("rows", "seed"), [(1, 1), (1, 49), (2, 278)])  # losses below 2e-5 of scores up to 15
def test_a_tiny_loss_of_large_scores_is_bounded_by_the_scores(
    node: list[torch.device], monkeypatch: pytest.MonkeyPatch, rows: int, seed: int
) -> None:
    original = F.cross_entropy
    error = 0.0

    def in_other_steps(scores: torch.Tensor, classes: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if scores.device.type != "cuda" or arguments or options:
            return original(scores, classes, *arguments, **options)
        chosen = scores.gather(1, classes.reshape(-1, 1)).squeeze(1)
        return (scores.logsumexp(1) - chosen).mean() + error  # loses the digits that the maximum takes

    monkeypatch.setattr(F, "cross_entropy", in_other_steps)
    assert_right_on_each(node, rows, seed)
    error = 1e-2
    with pytest.raises(DeviceMismatch, match="cross_entropy"):
        assert_right_on_each(node, rows, seed)
