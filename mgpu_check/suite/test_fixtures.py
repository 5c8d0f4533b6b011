"""Fixtures: `gpus` gives exactly the requested devices, distinct and usable, and helpers of tutorials find them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.specs.tensors import DTYPES
from mgpu_check.strategies import TensorSpec
from mgpu_check.suite.budget import examples

if TYPE_CHECKING:
    import torch


@examples(5)
@given(count=strategies.all_devices())
def test_gpus_are_those_asked_for(gpus: tuple[torch.device, ...], count: int) -> None:
    """`gpus` is cuda:0 to cuda:N-1 for --gpus=N; all are visible and different devices."""
    from mgpu_check.checks.devices import assert_devices_enumerated

    assert_devices_enumerated(gpus, count)


@examples(20, quick=4)
@given(shape=strategies.shapes(), layout=strategies.layouts(4), seed=strategies.seeds())
@example(shape=(9, 28), layout="contiguous", seed=0)
@example(shape=(6, 5), layout="transposed", seed=0)
def test_every_gpu_computes(gpus: tuple[torch.device, ...], shape: tuple[int, ...], layout: str, seed: int) -> None:
    """A tensor moves to a device, gives the same results there as on the CPU, and returns unchanged, in each dtype."""
    from mgpu_check.checks.devices import assert_each_computes

    for dtype in DTYPES:
        assert_each_computes(gpus, TensorSpec(shape, dtype).like(layout, seed=seed).build())


@examples(20, quick=4)
@given(data=strategies.tensors(dtypes=("float32", "float64", "float16", "bfloat16", "int64"), values=("exact",)))
@example(data=TensorSpec((3,), "int64", values="exact"))
@example(data=TensorSpec((300_001,), "float64", values="exact"))
def test_memories_are_separate(gpus: tuple[torch.device, ...], data: TensorSpec) -> None:
    """Writes on one device do not change another, also above 1 MiB."""
    from mgpu_check.checks.devices import assert_memory_separate

    assert_memory_separate(gpus, data.build())


@examples(10, quick=2)
@given(size=st.integers(1, 1 << 20))
@example(size=512)
@example(size=(4 << 20) + 1)
def test_memory_is_counted_where_it_is(gpus: tuple[torch.device, ...], size: int) -> None:
    """Memory allocated on a device is counted on that device only, and is released."""
    from mgpu_check.checks.devices import assert_memory_counted

    for index in range(len(gpus)):
        assert_memory_counted(gpus, index, size)


@examples(30)
@given(index=st.one_of(strategies.device_counts().map(lambda count: count - 1), st.integers(0, 40)))
def test_try_gpu(gpus: tuple[torch.device, ...], index: int) -> None:
    """`try_gpu(i)` is device i if it exists, else the CPU."""
    import torch

    from mgpu_check.checks.devices import assert_devices_are
    from mgpu_check.recipes import devices

    visible = torch.cuda.device_count()
    expected = torch.device("cuda", index) if index < max(visible, len(gpus)) else torch.device("cpu")
    assert_devices_are([devices.try_gpu(index)], [expected])


def test_try_all_gpus(gpus: tuple[torch.device, ...]) -> None:
    """`try_all_gpus()` lists every device once, in order."""
    from mgpu_check.checks.devices import assert_devices_are
    from mgpu_check.recipes import devices

    assert_devices_are(devices.try_all_gpus()[: len(gpus)], gpus)


def test_visible_devices_are_honoured(gpus: tuple[torch.device, ...]) -> None:
    """A process started under CUDA_VISIBLE_DEVICES sees the devices listed there, in that order, and no others."""
    from mgpu_check.checks.visibility import assert_visible_devices_honoured
    from mgpu_check.devices.inventory import visible_devices

    assert_visible_devices_honoured([device.uuid for device in visible_devices()][: len(gpus)])
