"""Compare results of DataParallel with those of one device: structure, device and every bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mgpu_check.asserts.bits import first_difference, same_bits
from mgpu_check.errors import GradientMismatch

Devices = Sequence[torch.device]


def both_ways(devices: Devices) -> list[list[torch.device]]:
    """Return the devices in the given order and in reverse; one of the two orders does not ascend."""
    return [list(devices), list(devices)[::-1]] if len(devices) > 1 else [list(devices)]


def indices_of(devices: Devices) -> list[int]:
    return [device.index for device in devices]


def told(order: Devices) -> list[int] | None:
    """Return the indices of devices, or None if they are all devices in order, which is the default of DataParallel."""
    indices = indices_of(order)
    return None if indices == list(range(torch.cuda.device_count())) else indices


def distinct_rows(rows: int, seed: int, width: int = 6) -> torch.Tensor:
    """Return distinct whole numbers, (rows, width), float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(rows * width, generator=generator).view(rows, width).float() - 7


@contextlib.contextmanager
def refused_by_mistake(what: str) -> Iterator[None]:
    """Report an exception in the body as a failure: operators refuse parts that do not fit each other."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if type(error) not in (RuntimeError, TypeError):
            raise  # subclasses mean trouble with a device, such as full memory
        raise GradientMismatch(f"{what} raised {type(error).__name__}: {error}") from error


def require_same(what: str, got: Any, expected: Any, device: torch.device, ranks: Sequence[int] = ()) -> None:
    """Assert that two nested results agree in structure, types and bits, and that tensors of `got` are on `device`."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            raise GradientMismatch(f"{what}: got {got!r}, expected a tensor", ranks=ranks)
        if got.device != device:
            raise GradientMismatch(f"{what} is on {got.device}, expected on {device}", ranks=ranks)
        if got.shape != expected.shape or got.dtype != expected.dtype:
            text = f"{tuple(got.shape)} {got.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
            raise GradientMismatch(f"{what} is {text}", ranks=ranks)
        if not same_bits(expected, got):
            at = first_difference(expected, got.detach().cpu())
            text = f"element {list(at)} is {got[at].item()}, expected {expected[at].item()}"
            raise GradientMismatch(f"{what}, {got.dtype}: {text}", ranks=ranks)
        return
    if type(got) is not type(expected):
        raise GradientMismatch(f"{what}: got {got!r}, expected {type(expected).__name__}", ranks=ranks)
    if isinstance(expected, Mapping):
        if list(got) != list(expected):
            raise GradientMismatch(f"{what} has the keys {list(got)}, expected {list(expected)}", ranks=ranks)
        for key in expected:
            require_same(f"{what}[{key!r}]", got[key], expected[key], device, ranks)
    elif isinstance(expected, (tuple, list)):
        if len(got) != len(expected):
            raise GradientMismatch(f"{what} has {len(got)} entries, expected {len(expected)}", ranks=ranks)
        for index, part in enumerate(expected):
            require_same(f"{what}[{index}]", got[index], part, device, ranks)
    elif got != expected:
        raise GradientMismatch(f"{what}: got {got!r}, expected {expected!r}", ranks=ranks)
