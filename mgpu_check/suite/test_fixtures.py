"""Devices: the fixture `gpus` gives exactly those asked for, distinct and usable; tutorials' helpers find them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.strategies import TensorSpec
from mgpu_check.suite.budget import examples

if TYPE_CHECKING:
    import torch


@examples(5)
@given(count=strategies.all_devices())
def test_gpus_are_those_asked_for(gpus: tuple[torch.device, ...], count: int) -> None:
    """`gpus` is cuda:0 to cuda:N-1 for --gpus=N, all of them visible, and no two the same device."""
    from mgpu_check.checks.devices import assert_devices_enumerated

    assert_devices_enumerated(gpus, count)


@examples(60)
@given(place=strategies.places(cpu=False), data=strategies.tensors(values=("exact",)))
def test_every_gpu_computes(gpus: tuple[torch.device, ...], place: str, data: TensorSpec) -> None:
    """A tensor put on a device is there, computes there what the CPU computes, and comes back unchanged."""
    import torch

    from mgpu_check.checks.devices import assert_device_computes

    assert_device_computes(torch.device(place), data.build())


@examples(40)
@given(data=strategies.tensors(dtypes=("float32", "float64", "float16", "bfloat16", "int64"), values=("exact",)))
def test_memories_are_separate(gpus: tuple[torch.device, ...], data: TensorSpec) -> None:
    """What is written on one device changes nothing on another."""
    from mgpu_check.checks.devices import assert_memory_separate

    assert_memory_separate(gpus, data.build())


@examples(20)
@given(place=strategies.places(cpu=False), size=st.integers(1, 1 << 20))
def test_memory_is_counted_where_it_is(gpus: tuple[torch.device, ...], place: str, size: int) -> None:
    """Memory allocated on a device counts there, on no other, and is given back."""
    import torch

    from mgpu_check.checks.devices import assert_memory_counted

    assert_memory_counted(gpus, gpus.index(torch.device(place)), size)


@examples(30)
@given(index=st.one_of(strategies.device_counts().map(lambda count: count - 1), st.integers(0, 40)))
def test_try_gpu(gpus: tuple[torch.device, ...], index: int) -> None:
    """`try_gpu(i)` is device i while there is one, and the CPU past the last."""
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
