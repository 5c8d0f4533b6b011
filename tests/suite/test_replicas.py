"""`assert_replicas_agree`, in one process and across ranks: names who differs, in what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mgpu_check.asserts.models import assert_replicas_agree, fingerprint
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ReplicaMismatch
from mgpu_check.oracles.training import models


def _state(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3), "steps": torch.tensor(4)} | changed


def test_equal_replicas_pass() -> None:
    assert_replicas_agree([_state()])
    assert_replicas_agree(
        [_state(), _state(), _state(weight=torch.arange(6.0).reshape(3, 2).t().contiguous().t().reshape(2, 3))]
    )
    torch.manual_seed(0)
    net = models.small_convnet()
    assert_replicas_agree([net, net])


def test_the_odd_one_is_named() -> None:
    other = torch.ones(3)
    other[1] += 2**-20
    with pytest.raises(
        ReplicaMismatch, match=r"replica 0 differs: 'bias' is not that of replica 1: element \[1\]: .*"
    ) as caught:
        assert_replicas_agree([_state(bias=other), _state(), _state()])
    assert caught.value.ranks == (0,)


def test_without_a_majority_the_first_is_the_model() -> None:
    with pytest.raises(ReplicaMismatch) as caught:
        assert_replicas_agree([_state(), _state(steps=torch.tensor(5))])
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"weight": torch.zeros(2, 3)}, "it has weight; replica 0 has weight, bias, steps"),
        (_state(bias=torch.ones(2)), r"'bias' is \(2,\) float32, on replica 0 \(3,\) float32"),
        (_state(bias=torch.ones(3).double()), "float64"),
        (_state(weight=torch.arange(6.0).reshape(2, 3) * torch.tensor([-1.0, 1, 1])), "sign of zeros|element"),
    ],
)
def test_what_differs_is_named(other, match) -> None:
    with pytest.raises(ReplicaMismatch, match=match):
        assert_replicas_agree([_state(), _state(), other])


def test_modules_include_buffers() -> None:
    torch.manual_seed(0)
    nets = [nn.BatchNorm1d(2) for _ in range(3)]
    nets[2].running_mean += 1
    with pytest.raises(ReplicaMismatch, match="running_mean"):
        assert_replicas_agree(nets)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.data())
def test_any_changed_bit_changes_the_fingerprint(values, data) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    other = tensor.clone()
    element, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 31))
    other.view(torch.int32)[element] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert fingerprint(tensor) != fingerprint(other)
    assert fingerprint(tensor) == fingerprint(tensor.clone())


def _across(rank: Rank, kind: str) -> tuple[str, tuple[int, ...]]:
    torch.manual_seed(0)
    state = {"weight": torch.randn(5, 3, device=rank.device), "bias": torch.ones(3, device=rank.device)}
    if kind == "value" and rank.index == 2:
        state["bias"][1] = 1.5
    if kind == "first" and rank.index == 0:
        state["weight"][4, 2] += 1
    if kind == "shape" and rank.index == 1:
        state["bias"] = torch.ones(4, device=rank.device)
    if kind == "name" and rank.index == 3:
        state["scale"] = state.pop("bias")
    try:
        assert_replicas_agree({} if kind == "empty" else state, what="model")
    except ReplicaMismatch as mismatch:
        return str(mismatch), mismatch.ranks
    return "", ()


KINDS = {  # what differs -> the odd rank, and what is said of it
    "equal": (None, ""),
    "empty": (None, ""),
    "value": (2, "rank 2 of 4 differs from rank 0: 'bias' is not that of rank 0: element [1]: got 1.5, expected 1"),
    "first": (0, "rank 0 of 4 differs from rank 1: 'weight' is not that of rank 1: element [4, 2]"),
    "shape": (1, "1 of 4 differs from rank 0 in names, shapes or dtypes; here: weight (5, 3) float32, bias (4,)"),
    "name": (3, "here: weight (5, 3) float32, scale (3,) float32"),
}


def _of_all_kinds(rank: Rank) -> list[tuple[str, tuple[int, ...]]]:
    return [_across(rank, kind) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.gpus(4)
def test_equal_ranks_pass_and_the_odd_one_is_named(ranks) -> None:
    for (kind, (odd, text)), results in zip(KINDS.items(), zip(*ranks.run(_of_all_kinds), strict=True), strict=True):
        assert [ranks for _, ranks in results] == [(index,) if index == odd else () for index in range(4)], kind
        assert [bool(said) for said, _ in results] == [index == odd for index in range(4)], kind
        assert odd is None or (results[odd][0].startswith("model: rank") and text in results[odd][0]), kind
