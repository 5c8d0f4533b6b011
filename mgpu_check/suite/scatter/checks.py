"""Check scatter and gather in many cases: containers, arbitrary bits, large batches, given sizes, and given tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import comm

from mgpu_check.asserts.scatter import assert_gathered, assert_shards_cover
from mgpu_check.errors import ShardError
from mgpu_check.suite.common.counters import counted
from mgpu_check.suite.common.tensors import COMPLEX_DTYPES, DTYPES, PINNED, TensorSpec
from mgpu_check.suite.scatter.cases import KINDS, Leaf, Nested

_SIZES = ((1 << 16) - 16, 1 << 16, (1 << 16) + 16, (1 << 20) - 16, 1 << 20, (1 << 20) + 16, (1 << 22) + 16)
"""Bytes of a shard: below, at and above 64 KiB and 1 MiB, where copies and kernels change their method, and above 4
MiB."""

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)


def assert_containers(devices: Sequence[torch.device]) -> None:
    """Assert that scatter and gather support every container, and every container in every other.

    Scattered batches also have leaves that are not tensors. Gather supports tensors only, and matches the entries of
    dicts by key.
    """
    size = 2 * len(devices) + 1
    parts = [
        TensorSpec((size, 2), dtype, seed=seed) for seed, dtype in enumerate(("float32", "int64", "bool", "float32"))
    ]
    for outer, inner in itertools.product(KINDS, (None, *KINDS)):
        second = parts[1] if inner is None else Nested(inner, (parts[2], parts[3]))
        spec = Nested(outer, (parts[0], second))
        batch = spec.build()
        shards = nn.parallel.scatter(batch, devices)
        assert_shards_cover(batch, shards, devices)
        target = devices[-1]
        assert_gathered(batch, nn.parallel.gather(shards, target), target)
        leaves = Nested(outer, (spec, Leaf("train"))).build()
        assert_shards_cover(leaves, nn.parallel.scatter(leaves, devices), devices)
    # Replicas may fill their dicts in different orders; gather must match keys, and keep the order of the first dict.
    named = {"a": parts[0].build(), "b": parts[3].build()}
    turned = [
        dict(sorted(shard.items(), reverse=bool(number % 2)))
        for number, shard in enumerate(nn.parallel.scatter(named, devices))
    ]
    assert_gathered(named, nn.parallel.gather(turned, devices[-1]), devices[-1])


def assert_any_bits(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that shards keep the bits of the batch in every dtype: all kinds of NaN, subnormals, the largest numbers.

    Covers dims 0 and 1, sources on the CPU, in pinned memory and on a device, and devices in ascending, descending and
    rotated order. Square matrices are split along both dims. Images in channels_last are split into unequal shards too.
    """
    orders = [list(devices), list(reversed(devices)), [*devices[1:], devices[0]]]
    sources = ("cpu", PINNED, str(devices[-1]))
    for number, (dtype, dim, source) in enumerate(itertools.product((*DTYPES, *COMPLEX_DTYPES), (0, 1), sources)):
        shape = (3 * len(devices) - 1, 16) if dim == 0 else (16, 3 * len(devices) - 1)
        batch = TensorSpec(shape, dtype, seed=seed + number, values="bits").build(source)
        chosen = orders[(number + number // len(sources)) % len(orders)]
        shards = nn.parallel.scatter(batch, chosen, dim)
        assert_shards_cover(batch, shards, chosen, dim)
        assert_gathered(batch, nn.parallel.gather(shards, chosen[0], dim), chosen[0])
    for chosen, dim in itertools.product(orders, (0, 1)):
        square = _filled((3 * len(devices) - 1,) * 2, torch.float16, seed + dim)
        shards = nn.parallel.scatter(square, chosen, dim)
        assert_shards_cover(square, shards, chosen, dim)
        assert_gathered(square, nn.parallel.gather(shards, chosen[-1], dim), chosen[-1])
    for chosen in orders:
        images = _filled((3 * len(devices) - 1, 3, 2, 4), torch.float32, seed).to(memory_format=torch.channels_last)
        shards = nn.parallel.scatter(images, chosen)
        assert_shards_cover(images, shards, chosen)
        assert_gathered(images, nn.parallel.gather(shards, chosen[-1]), chosen[-1])


def _filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor on the CPU whose elements have pseudorandom bits, so that different places differ."""
    elements = torch.Size(shape).numel()
    words = counted((elements * dtype.itemsize // 8 + 1,), seed, torch.device("cpu"))
    return words.view(dtype)[:elements].view(tuple(shape))


def assert_large_batches(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that large batches are scattered and gathered bit for bit, along rows and columns.

    They come from the CPU, from pinned memory and from a device, and are gathered on a device and on the CPU.
    """
    ways = list(itertools.product(("the CPU", "pinned memory", "a device"), (0, 1)))
    backwards = tuple(reversed(devices))
    for number, size in enumerate(_SIZES * 2):
        # Give each way sizes below and above 1 MiB.
        source, dim = ways[(number + number // len(_SIZES) * 3) % len(ways)]
        dtype = _DTYPES[(number + seed) % len(_DTYPES)]
        elements = size // dtype.itemsize
        # With several shards, the last one is smaller than the others.
        rows, columns = 16 * len(devices) - 1, elements // 16
        batch = _filled((rows, columns) if dim == 0 else (columns, rows), dtype, seed + number)
        if source == "pinned memory":
            batch = batch.pin_memory()
        elif source == "a device":
            batch = batch.to(devices[number % len(devices)])
        chosen = devices if number % 2 else backwards
        shards = nn.parallel.scatter(batch, chosen, dim)
        assert_shards_cover(batch, shards, chosen, dim)
        for target in (devices[(number + seed) % len(devices)], "cpu"):
            # The annotation of gather lacks the string "cpu", which it supports and requires.
            assert_gathered(batch, nn.parallel.gather(shards, target, dim), target)  # type: ignore[arg-type]


def assert_given_sizes(devices: Sequence[torch.device], sizes: list[int], seed: int) -> None:
    """Assert that `comm.scatter` splits into given sizes, and that `comm.scatter` and `comm.gather` fill given tensors.

    Covers dims 0, 1 and -1, devices in both orders, and output tensors that hold other values before.

    Args:
        sizes: of the shards of the first ``len(sizes)`` devices, in order; some may be 0.
    """
    for dim, dtype, ascending in itertools.product((0, 1, -1), (torch.float32, torch.uint8), (True, False)):
        chosen = list(devices[: len(sizes)] if ascending else reversed(devices[: len(sizes)]))
        shape = [2, 3, 4]
        shape[dim] = sum(sizes)
        batch = _filled(shape, dtype, seed)
        got = comm.scatter(batch, chosen, sizes, dim)
        what = f"comm.scatter in sizes {sizes} along dim {dim}"
        if [shard.shape[dim] for shard in got] != sizes:
            raise ShardError(f"{what}: got sizes {[shard.shape[dim] for shard in got]}")
        assert_shards_cover(batch, got, chosen, dim)
        out = [torch.full_like(shard, 7) for shard in got]
        filled = comm.scatter(batch, dim=dim, out=out)
        wrong = [index for index, (one, other) in enumerate(zip(filled, out, strict=True)) if one is not other]
        if wrong:
            raise ShardError(f"{what}: the given output tensor {wrong[0]} was not returned", ranks=wrong)
        assert_shards_cover(batch, out, chosen, dim)
        whole = torch.full_like(batch, 7, device=chosen[0])
        comm.gather(out, dim, out=whole)
        assert_gathered(batch, whole, chosen[0])
        assert_gathered(batch, comm.gather(out, dim, destination="cpu"), "cpu")
