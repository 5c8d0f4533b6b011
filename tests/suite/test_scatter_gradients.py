"""The checks of gradients through scatter and gather pass with torch, and fail where a gradient is lost or swapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import _functions, comm

from mgpu_check.errors import ShardError
from mgpu_check.simulated import simulated_node
from mgpu_check.strategies import TensorSpec
from mgpu_check.suite.scatter import checks

X, WEIGHTS = TensorSpec((7, 2)), TensorSpec((7, 2), seed=1, values="exact")


@pytest.fixture(autouse=True)
def node() -> Iterator[list[torch.device]]:
    with simulated_node(3):
        yield [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize("source", ["cpu", "cuda:0", "cuda:2"])
def test_torch_passes(node: list[torch.device], source: str) -> None:
    for dim in (0, 1, -1):
        checks.assert_scatter_differentiable(X.build(source), WEIGHTS.build(), node, dim)
        checks.assert_gather_differentiable(WEIGHTS.build(), node, source, dim)
    checks.assert_scalars_stacked([1.0, 2.0, 3.0], node, source)


def test_a_lost_gradient_is_named(node: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    backward = _functions.Scatter.backward

    def losing(context: Any, *gradients: torch.Tensor) -> Any:
        return backward(context, *gradients[:-1], torch.zeros_like(gradients[-1]))

    monkeypatch.setattr(_functions.Scatter, "backward", staticmethod(losing))
    with pytest.raises(ShardError, match=r"scatter, on cpu: gradient of element \[6, \d\]: expected .*, got 0.0"):
        checks.assert_scatter_differentiable(X.build(), WEIGHTS.build(), node, 0)


def test_swapped_gradients_are_named(node: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = comm.scatter

    def swapping(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return scatter(tensor.flip(0), *args, **kwargs)

    monkeypatch.setattr(comm, "scatter", swapping)
    with pytest.raises(ShardError, match=r"gather: shard 0, on cuda:0: gradient of element") as caught:
        checks.assert_gather_differentiable(WEIGHTS.build(), node, "cuda:1", 0)
    assert caught.value.ranks == (0,)


def test_scalars_out_of_order_are_named(node: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    gather = comm.gather
    monkeypatch.setattr(comm, "gather", lambda tensors, *rest: gather(list(tensors)[::-1], *rest))
    with pytest.raises(ShardError, match=r"expected \[1.0, 2.0\] on cpu, got \[2.0, 1.0\]"):
        checks.assert_scalars_stacked([1.0, 2.0], node[:2], "cpu")
