"""Check sums and broadcasts among the devices of a process: by hand, and by the functions that DataParallel uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.parallel import comm

from mgpu_check.asserts.collectives import assert_allreduce_matches, assert_contributions_kept, same_bits
from mgpu_check.errors import AllreduceMismatch
from mgpu_check.suite.allreduce.cases import Contributions
from mgpu_check.suite.common.tensors import layouts_for
from mgpu_check.suite.recipes import gradient_exchange as recipes

_SHAPE = (2, 3, 4, 5)
"""A shape of four dimensions, because these support every layout."""


def assert_added_up_by_hand(data: Contributions, devices: Sequence[torch.device]) -> None:
    """Assert that `recipes.gradient_exchange.allreduce` leaves the sum on every device.

    Raises:
        AllreduceMismatch: a sum is wrong, or is on the wrong device. `.ranks` has indices of `devices`.
    """
    parts = data.parts(len(devices))
    held = [data.placed(part, device) for part, device in zip(parts, devices, strict=True)]
    recipes.allreduce(held)
    _assert_there(held, devices, "allreduce by hand")
    assert_allreduce_matches(held, parts, what="allreduce by hand")


def assert_added_up(data: Contributions, devices: Sequence[torch.device], home: torch.device) -> None:
    """Assert that `reduce_add` and `reduce_add_coalesced` put the sum on `home` and do not change their inputs.

    The sum is then broadcast from there, to new and to given tensors, and the copies must be right too.

    Args:
        home: one of them. If it is the first, which is current, it is not passed.

    Raises:
        AllreduceMismatch: a sum or a copy of it is wrong, or is on the wrong device. `.ranks` has indices of `devices`.
    """
    parts, order = data.parts(len(devices)), _from(home, devices)
    placed = [data.placed(part, device) for part, device in zip(parts, devices, strict=True)]
    named, indices = None if home == devices[0] else home.index, [device.index for device in order]
    total = comm.reduce_add(placed, named)
    what = f"reduce_add to {home}"
    assert_contributions_kept(placed, parts, what=what)
    _assert_there([total], [home], what)
    assert_allreduce_matches({0: total}, parts, what=what)
    held = comm.broadcast(total, indices)
    _assert_there(held, order, f"{what} and broadcast")
    assert_allreduce_matches(list(held), parts, what=f"{what} and broadcast")
    given = [torch.zeros_like(part, device=device) for part, device in zip(parts, order, strict=True)]
    comm.broadcast(total, out=given)
    assert_allreduce_matches(given, parts, what=f"{what} and broadcast to tensors that are given")
    # Tensors of equal dtype are sent together, and must come back in the order of the arguments.
    between = [torch.tensor([number, 3], dtype=torch.int32) for number in range(len(devices))]
    several = [(one, between[number].to(devices[number]), one) for number, one in enumerate(placed)]
    for buffer_size in (10 << 20, 40):  # by default all in one buffer, or nearly each tensor in its own
        added_up = comm.reduce_add_coalesced(several, named, buffer_size)
        copies = comm.broadcast_coalesced(added_up, indices, buffer_size)
        for number, wanted in enumerate((parts, between, parts)):
            what = f"reduce_add_coalesced to {home} and broadcast_coalesced, {buffer_size=}, tensor {number}"
            column = [copy[number] for copy in copies]
            _assert_there(column, order, what)
            assert_allreduce_matches(column, wanted, what=what)


def assert_broadcast(data: Contributions, devices: Sequence[torch.device], home: torch.device) -> None:
    """Assert that `broadcast` and `broadcast_coalesced` copy every layout from `home` to all devices, bit for bit.

    Args:
        data: the tensor to send, together with one in each layout of the same dtype and kind of values.

    Raises:
        AllreduceMismatch: a copy is wrong, or is on the wrong device. `.ranks` has its index among the copies.
    """
    order = _from(home, devices)
    indices = [device.index for device in order]
    specs = [replace(data.tensor, shape=_SHAPE, layout=layout) for layout in layouts_for(len(_SHAPE))]
    # Put a tensor of another dtype between them, because tensors of equal dtype are sent together.
    specs[1:1] = [data.tensor, replace(specs[0], dtype="int64" if data.tensor.dtype == "float64" else "float64")]
    specs.append(replace(specs[0], shape=((1 << 20) + 1,), dtype="uint8", layout="contiguous"))
    placed = [spec.build(home) for spec in specs]
    together = comm.broadcast_coalesced(placed, indices)
    for number, (spec, one) in enumerate(zip(specs, placed, strict=True)):
        expected = spec.build()
        for what, copies in (
            (f"broadcast from {home}", comm.broadcast(one, indices)),
            (f"broadcast_coalesced from {home}, tensor {number}", [row[number] for row in together]),
        ):
            _assert_there(copies, order, what)
            wrong = [place for place, copy in enumerate(copies) if not same_bits(expected, copy)]
            if wrong:
                raise AllreduceMismatch(f"{what}: the copy on {order[wrong[0]]} differs from {spec}", ranks=wrong)


def _from(home: torch.device, devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the devices with `home` before the others."""
    return [home, *(device for device in devices if device != home)]


def _assert_there(results: Sequence[torch.Tensor], devices: Sequence[torch.device], what: str) -> None:
    """Assert that the results are on the given devices, in this order."""
    got = [result.device for result in results]
    if got != list(devices):
        raise AllreduceMismatch(f"{what}: results are on {[*map(str, got)]}, expected on {[*map(str, devices)]}")
