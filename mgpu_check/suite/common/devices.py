"""Check that the devices are exactly the requested ones, distinct, and usable."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

import torch

from mgpu_check.asserts.bits import first_difference, same_bits
from mgpu_check.devices.inventory import visible_devices
from mgpu_check.errors import DeviceEnumerationError
from mgpu_check.torch_hooks.tensors import name_of

__all__ = [
    "assert_device_computes",
    "assert_devices_are",
    "assert_devices_enumerated",
    "assert_each_computes",
    "assert_memory_counted",
    "assert_memory_separate",
]


def assert_devices_enumerated(devices: Sequence[torch.device], count: int) -> None:
    """Assert that `devices` are cuda:0 to cuda:`count`-1 in order, all visible, and each its own piece of hardware.

    Raises:
        DeviceEnumerationError: naming devices that are missing or listed twice, or two names of one device.
    """
    __tracebackhide__ = True
    expected = [torch.device("cuda", index) for index in range(count)]
    assert_devices_are(devices, expected)
    visible = visible_devices()
    if len(visible) < count:
        raise DeviceEnumerationError(
            f"{count} devices were asked for, but torch.cuda sees {len(visible)}: "
            f"{', '.join(f'cuda:{one.index} ({one.name})' for one in visible) or 'none'}",
            ranks=range(len(visible), count),
        )
    first_of: dict[str, int] = {}
    for one in visible[:count]:
        if not one.uuid:
            raise DeviceEnumerationError(
                f"cuda:{one.index} ({one.name}) has no UUID to identify it", ranks=(one.index,)
            )
        twin = first_of.setdefault(one.uuid, one.index)
        if twin != one.index:
            raise DeviceEnumerationError(
                f"cuda:{twin} and cuda:{one.index} are two names of one device (UUID {one.uuid})",
                ranks=(twin, one.index),
            )


def assert_devices_are(got: Sequence[torch.device], expected: Sequence[torch.device]) -> None:
    """Assert that two lists of devices are the same, in order.

    Raises:
        DeviceEnumerationError: naming the devices that are missing, unexpected, repeated, or out of order.
    """
    __tracebackhide__ = True
    if list(got) == list(expected):
        return
    repeated = sorted({str(one) for one in got if list(got).count(one) > 1})
    missing = [one for one in expected if one not in got]
    strange = [one for one in got if one not in expected]
    reasons = [
        f"{words}: {', '.join(str(one) for one in which)}"
        for words, which in (("listed twice", repeated), ("missing", missing), ("not asked for", strange))
        if which
    ] or ["out of order"]
    raise DeviceEnumerationError(
        f"expected {_listed(expected)}, got {_listed(got)} ({'; '.join(reasons)})",
        ranks=[one.index for one in (*missing, *strange) if one.index is not None],
    )


def assert_device_computes(device: torch.device, data: torch.Tensor) -> None:
    """Assert that `data` put on `device` is there, computes there what the CPU computes, and comes back unchanged.

    Args:
        data: whole numbers in [-15, 15] of any shape and dtype, on the CPU. The computation is x + x and, for floats,
            the product of the rows of x, clamped to [-3, 3], with themselves: exact in any order of summation as long
            as a row has at most 28 elements (9 · 28 < 2^8, bfloat16's last consecutive whole number).

    Raises:
        DeviceEnumerationError: naming the device, the step that went wrong and the element.
    """
    __tracebackhide__ = True
    there = data.to(device)
    if there.device != device:
        raise DeviceEnumerationError(
            f"a tensor put on {device} landed on {there.device}", ranks=_ranks(device, there.device)
        )
    _require_bits("sent there and back", device, data, there.to("cpu"))
    doubled = there + there
    if doubled.device != device:
        raise DeviceEnumerationError(f"x + x of a tensor on {device} is on {doubled.device}", ranks=_ranks(device))
    _require_bits("x + x", device, data + data, doubled.to("cpu"))
    if data.dtype.is_floating_point:
        rows = (data.reshape(-1, data.shape[-1]) if data.dim() and data.numel() else data.reshape(1, -1)).clamp(-3, 3)
        moved = rows.to(device)
        _require_bits("x @ x.T", device, rows @ rows.T, (moved @ moved.T).to("cpu"))


def assert_each_computes(devices: Sequence[torch.device], data: torch.Tensor) -> None:
    """Assert on each of `devices` what `assert_device_computes` asserts, and name the devices that are right.

    Raises:
        DeviceEnumerationError: naming the wrong devices, and the error of the first.
    """
    __tracebackhide__ = True
    found: dict[torch.device, DeviceEnumerationError] = {}
    for device in devices:
        try:
            assert_device_computes(device, data)
        except DeviceEnumerationError as error:
            found[device] = error
    if not found:
        return
    first = next(iter(found.values()))
    right = [device for device in devices if device not in found]
    what = f"{name_of(data.dtype)} of shape {tuple(data.shape)}"
    if len(found) == 1 and right:
        others = f"{next(iter(found))} alone is wrong in {what}, the other {len(right)} agree with the CPU"
    else:
        others = f"wrong in {what} are {_listed(list(found))}; right are {_listed(right)}"
    raise DeviceEnumerationError(
        f"{first}; {others}", ranks=first.ranks if len(found) == 1 else _ranks(*found)
    ) from first


def assert_memory_separate(devices: Sequence[torch.device], data: torch.Tensor) -> None:
    """Assert that devices do not share memory: each must keep `data` plus its own index.

    Args:
        data: any tensor on the CPU; its dtype must hold its numbers plus ``len(devices)`` exactly.

    Raises:
        DeviceEnumerationError: naming the device whose memory changed, and the one that most likely changed it.
    """
    __tracebackhide__ = True
    wanted = [data + index for index in range(len(devices))]
    held = [torch.zeros_like(data, device=device) for device in devices]
    for tensor, value in zip(held, wanted, strict=True):
        tensor.copy_(value)
    for index, tensor in enumerate(held):
        got = tensor.to("cpu")
        if same_bits(wanted[index], got):
            continue
        culprit = next((other for other, value in enumerate(wanted) if other != index and same_bits(value, got)), None)
        seen = "" if culprit is None else f"; it holds what was written to {devices[culprit]}: they share memory"
        at = first_difference(wanted[index], got)
        raise DeviceEnumerationError(
            f"{devices[index]} does not hold what was written to it: element {list(at)}: expected "
            f"{wanted[index][at].item()}, got {got[at].item()}{seen}",
            ranks=[index] if culprit is None else [index, culprit],
        )


def assert_memory_counted(devices: Sequence[torch.device], index: int, size: int) -> None:
    """Assert that `size` bytes on ``devices[index]`` increase `torch.cuda.memory_allocated` there, and nowhere else.

    Raises:
        DeviceEnumerationError: naming the device with a wrong number, and the numbers.
    """
    __tracebackhide__ = True
    with _collector_off():
        before = [torch.cuda.memory_allocated(device) for device in devices]
        block = torch.empty(size, dtype=torch.uint8, device=devices[index])
        grown = [torch.cuda.memory_allocated(device) - old for device, old in zip(devices, before, strict=True)]
        del block
        left = [torch.cuda.memory_allocated(device) - old for device, old in zip(devices, before, strict=True)]
    for other, (more, after) in enumerate(zip(grown, left, strict=True)):
        wrong = more < size if other == index else more != 0
        if wrong or after != 0:
            raise DeviceEnumerationError(
                f"{size} bytes were allocated on {devices[index]} and freed again: memory_allocated({devices[other]}) "
                f"rose by {more} and was {after} above the start afterwards; expected "
                f"{f'at least {size}' if other == index else '0'}, then 0",
                ranks=(other,),
            )


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Disable garbage collection, so that only the code in this context changes memory statistics."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _require_bits(step: str, device: torch.device, expected: torch.Tensor, got: torch.Tensor) -> None:
    if same_bits(expected, got):
        return
    if expected.shape != got.shape or expected.dtype != got.dtype:
        what = f"expected {tuple(expected.shape)} of {expected.dtype}, got {tuple(got.shape)} of {got.dtype}"
    else:
        at = first_difference(expected, got)
        what = f"element {list(at)}: expected {expected[at].item()}, got {got[at].item()}"
    raise DeviceEnumerationError(f"{device}: {step}: {what}", ranks=_ranks(device))


def _ranks(*devices: torch.device) -> tuple[int, ...]:
    """Return the indices of the devices that have one, in the given order: the device at fault comes first."""
    return tuple(device.index for device in devices if device.index is not None)


def _listed(devices: Sequence[torch.device]) -> str:
    return ", ".join(str(device) for device in devices) or "none"
