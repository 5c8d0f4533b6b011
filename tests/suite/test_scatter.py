"""The checks of scatter pass on right shards, and name what is wrong with others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mgpu_check.asserts.collectives import (
    assert_gathered,
    assert_leaves_replicated,
    assert_shard_sizes,
    assert_shards_cover,
    chunk_sizes,
)
from mgpu_check.errors import ShardError
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.scatter.checks import assert_split_aligned

CPUS = ["cpu"] * 3
X = torch.arange(14.0).reshape(7, 2)


@pytest.fixture
def node() -> Iterator[list[torch.device]]:
    with simulated_node(3):
        yield [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(30, 2, [15, 15]), (30, 3, [10, 10, 10]), (10, 3, [4, 4, 2]), (10, 8, [2] * 5), (0, 3, [0, 0, 0]), (2, 3, [1, 1])],
)
def test_chunk_sizes_are_those_of_torch(total: int, parts: int, sizes: list[int]) -> None:
    assert chunk_sizes(total, parts) == sizes
    assert [len(part) for part in torch.arange(total).chunk(parts)] == sizes


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_right_shards_pass(dim: int, dtype: torch.dtype) -> None:
    batch = X.to(dtype)
    assert_shards_cover(batch, batch.chunk(3, dim), CPUS, dim)
    assert_shards_cover(batch, batch.tensor_split(3, dim), CPUS, dim)
    assert_shards_cover(batch[:0], batch[:0].chunk(3), CPUS)


def test_bits_are_compared() -> None:
    special = torch.tensor([float("nan"), 0.0, 1.0])
    assert_shards_cover(special, special.chunk(3), CPUS)
    with pytest.raises(ShardError, match=r"expected 0.0, got -0.0"):
        assert_shards_cover(special, [special[:1], -special[1:2], special[2:]], CPUS)


def parts() -> list[torch.Tensor]:
    return list(X.chunk(3))


def changed(index: int, part: torch.Tensor) -> list[torch.Tensor]:
    shards = parts()
    shards[index] = part
    return shards


@pytest.mark.parametrize(
    ("shards", "at_fault", "words"),
    [
        (parts()[:2], (), "rows 6 of 7 along dim 0 are in no shard"),
        ([X[0:3], X[2:5], X[5:7]], (1,), "more than once: rows 2"),
        (
            [X[3:6], X[0:3], X[6:7]],
            (0,),
            r"row 0 along dim 0 \(row 0 of the batch\), element \[0, 0\]: expected 0.0, got 6.0",
        ),
        ([X[3:6], X[0:3], X[6:7]], (0,), "shard 1 on cpu holds rows 0-2"),
        ([X[3:6], X[0:3], X[6:7]], (0,), "looks like shards were swapped"),
        (changed(1, X[3:6] + 0.5), (1,), "3 that the batch does not hold"),
        (
            changed(1, X[3:6].double()),
            (1,),
            r"is \(3, 2\) of torch.float64, expected a part of \(7, 2\) of torch.float32",
        ),
        (changed(2, X[6:7, :1]), (2,), r"is \(1, 1\)"),
        (changed(2, X[6]), (2,), r"is \(2,\)"),
        (changed(2, X[5:7]), (2,), "expected 12.0, got 10.0"),
        (changed(2, torch.cat([X[6:], X[6:]])), (2,), "1 rows more than the batch has"),
        ([*parts(), X[:0]], (3,), "4 shards for 3 devices"),
    ],
)
def test_wrong_shards_are_named(shards: list[torch.Tensor], at_fault: tuple[int, ...], words: str) -> None:
    with pytest.raises(ShardError, match=words) as caught:
        assert_shards_cover(X, shards, CPUS)
    assert caught.value.ranks == at_fault


def test_a_shard_on_the_wrong_device_is_named(node: list[torch.device]) -> None:
    shards = torch.nn.parallel.scatter(X, node)
    assert_shards_cover(X, shards, node)
    assert_shards_cover(X, shards, [0, 1, 2])
    assert_shards_cover(X.to(node[1]), shards, ["cuda:0", "cuda:1", "cuda:2"])
    with pytest.raises(ShardError, match="shard 2 is on cuda:0, expected on cuda:2") as caught:
        assert_shards_cover(X, [*shards[:2], shards[2].to(node[0])], node)
    assert caught.value.ranks == (2,)


def test_nested_batches() -> None:
    batch = {"x": X, "rest": (X[:, 0], ["train", 3])}
    shards: list[Any] = [{"x": x, "rest": (y, ["train", 3])} for x, y in zip(parts(), X[:, 0].chunk(3), strict=True)]
    assert_shards_cover(batch, shards, CPUS)
    assert_leaves_replicated(batch, shards, CPUS)
    shards[1]["rest"][1][0] = "eval"
    with pytest.raises(
        ShardError, match=r"batch\['rest'\]\[1\]\[0\] .* shard 1, for cpu, got 'eval' instead of 'train'"
    ):
        assert_leaves_replicated(batch, shards, CPUS)
    with pytest.raises(ShardError, match="'eval'"):
        assert_shards_cover(batch, shards, CPUS)


@pytest.mark.parametrize(("leaf", "got"), [(True, 1), (7, 7.0), (frozenset({1}), {1})])
def test_a_leaf_of_another_type_is_named_even_if_it_is_equal(leaf: Any, got: Any) -> None:
    assert leaf == got
    assert_leaves_replicated([leaf], [[leaf]], ["cpu"])
    with pytest.raises(ShardError, match=r"batch\[0\] .* shard 0, for cpu, got .* instead of"):
        assert_leaves_replicated([leaf], [[got]], ["cpu"])


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ((X,), "shard 0 is nested differently: expected dict, got tuple"),
        ({}, "expected an entry 'x', got none"),
        ({"x": X, "y": X}, "expected 1 entries, got 2"),
        ({"x": 3}, "expected Tensor, got int"),
    ],
)
def test_other_nesting_is_named(shard: Any, words: str) -> None:
    with pytest.raises(ShardError, match=words):
        assert_shards_cover({"x": X}, [shard], ["cpu"])


def test_sizes() -> None:
    assert_shard_sizes(parts(), [3, 3, 1], CPUS)
    with pytest.raises(ShardError, match=r"expected sizes 3\+2\+2, got 3\+3\+1, first wrong on cpu") as caught:
        assert_shard_sizes(parts(), [3, 2, 2], CPUS)
    assert caught.value.ranks == (1,)
    with pytest.raises(ShardError, match=r"got 3\+3\+1"):
        assert_shard_sizes(parts(), [3, 3, 1, 0], CPUS)
    with pytest.raises(ShardError, match="no shards"):
        assert_shard_sizes([], [1], CPUS)


def test_alignment(node: list[torch.device]) -> None:
    y = torch.arange(7)
    assert_split_aligned(X, y, (parts(), y.chunk(3)), CPUS)
    with pytest.raises(ShardError, match="shard 1, on cpu: 3 inputs, but 2 labels"):
        assert_split_aligned(X, y, (parts(), y.tensor_split(3)), CPUS)
    with pytest.raises(ShardError, match="inputs are in 3 shards, labels in 2"):
        assert_split_aligned(X, y, (parts(), y.chunk(2)), CPUS)
    with pytest.raises(ShardError, match=r"batch\['labels'\]: shard 0"):
        assert_split_aligned(X, y, (parts(), y.roll(1).chunk(3)), CPUS)
    moved = [part.to(device) for part, device in zip(parts(), node, strict=True)]
    with pytest.raises(ShardError, match="its inputs are on cuda:0, its labels on cpu"):
        assert_split_aligned(X, y, (moved, y.chunk(3)), node)


@pytest.mark.parametrize(
    ("gathered", "words"),
    [
        (X.flip(0), r"element \[0, 0\]: expected 0.0, got 12.0"),
        (X[:6], r"expected \(7, 2\) of torch.float32, got \(6, 2\)"),
        (X.half(), "got .* of torch.float16"),
    ],
)
def test_a_wrong_gathering_is_named(gathered: torch.Tensor, words: str) -> None:
    assert_gathered(X, X.clone(), "cpu")
    with pytest.raises(ShardError, match=words):
        assert_gathered(X, gathered, "cpu")


def test_a_gathering_elsewhere_is_named(node: list[torch.device]) -> None:
    assert_gathered((X, None), (X.to(node[1]), None), node[1])
    with pytest.raises(ShardError, match="expected it on cuda:1, got it on cuda:0"):
        assert_gathered(X, X.to(node[0]), node[1])
    with pytest.raises(ShardError, match="expected None, got 3"):
        assert_gathered((X, None), (X.to(node[1]), 3), node[1])
    with pytest.raises(ShardError, match="expected 1, got True"):
        assert_gathered((X, 1), (X.to(node[1]), True), node[1])
