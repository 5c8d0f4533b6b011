"""Check reductions on a rank, and sums and broadcasts among the devices of a process.

On ranks: by torch and by hand, of all ranks and in a group. Among devices: by hand, by the functions that DataParallel
uses, and by `torch.cuda.nccl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.nn.parallel import comm

from mgpu_check.asserts.collectives import assert_allreduce_matches, assert_contributions_kept, same_bits
from mgpu_check.asserts.known_defects import known_defect
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import AllreduceMismatch
from mgpu_check.oracles.tensors import Contributions, layouts_for
from mgpu_check.oracles.training import gradient_exchange as recipes

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def _contributed(rank: Rank, data: Contributions, placement: str = "device") -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the terms of all ranks, and that of this rank, placed on "device" or "cpu"."""
    terms = data.parts(rank.size)
    return terms, data.placed(terms[rank.index], rank.device if placement == "device" else "cpu")


def assert_all_reduce_matches(rank: Rank, data: Contributions, placement: str) -> None:
    """Assert that `dist.all_reduce` leaves the result of the operation of `data`, for tensors on "device" or "cpu"."""
    terms, tensor = _contributed(rank, data, placement)
    dist.all_reduce(tensor, _OPERATIONS[data.operation])
    assert_allreduce_matches({rank.index: tensor}, terms, operation=data.operation, what="dist.all_reduce")


def assert_view_is_reduced(rank: Rank, data: Contributions) -> None:
    """Assert that `dist.all_reduce` of a CPU view leaves the sum, with an allowance for the known defect of gloo."""

    def without_gaps(view: torch.Tensor) -> torch.Tensor:
        """Return the first `view.numel()` elements of the memory of a view, without regard to its strides."""
        return view.as_strided((view.numel(),), (1,))

    terms = data.parts(rank.size)
    views = [data.placed(term, "cpu") for term in terms]
    tensor = views[rank.index]
    before = [without_gaps(view).clone() for view in views]
    dist.all_reduce(tensor)

    def explained() -> None:
        assert_allreduce_matches({rank.index: without_gaps(tensor)}, before, what="dist.all_reduce as if without gaps")

    contiguous = all(view.is_contiguous() for view in views)
    with known_defect("gloo-views-with-gaps", explained=explained, contiguous=contiguous, size=rank.size):
        assert_allreduce_matches({rank.index: tensor}, terms, what="dist.all_reduce of a view")


def assert_view_is_reduced_or_refused(rank: Rank, data: Contributions) -> None:
    """Assert that `dist.all_reduce` of a view on a device leaves the sum, or refuses a view that is not contiguous."""
    terms, tensor = _contributed(rank, data)
    try:
        dist.all_reduce(tensor)
    except (RuntimeError, ValueError) as refusal:
        if tensor.is_contiguous() or "Tensors must be contiguous" not in str(refusal):
            raise
        return
    assert_allreduce_matches({rank.index: tensor}, terms, what="dist.all_reduce of a view")


def assert_recipe_matches(rank: Rank, name: str, data: Contributions, placement: str, *arguments: int) -> None:
    """Assert that the function `name` of `gradient_exchange` leaves the sum, for tensors on "device" or "cpu"."""
    terms, tensor = _contributed(rank, data, placement)
    getattr(recipes, name)(tensor, *arguments)
    assert_allreduce_matches({rank.index: tensor}, terms, what=name)


_SHAPE = (2, 3, 4, 5)  # a shape of four dimensions, because these support every layout


def assert_added_up_by_hand(data: Contributions, devices: Sequence[torch.device]) -> None:
    """Assert that `recipes.gradient_exchange.allreduce` leaves the sum on every device."""
    terms = data.parts(len(devices))
    tensors = [data.placed(term, device) for term, device in zip(terms, devices, strict=True)]
    recipes.allreduce(tensors)
    _assert_sums(tensors, devices, terms, "allreduce by hand")


def assert_added_up(data: Contributions, devices: Sequence[torch.device], home: torch.device) -> None:
    """Assert that `reduce_add` and `reduce_add_coalesced` put the sum on `home` and do not change their inputs.

    The sum is then broadcast from there, to new and to given tensors, and the copies must be right too. `home` is one
    of the devices. If it is the first, which is current, it is not passed.
    """
    terms, order = data.parts(len(devices)), _from(home, devices)
    placed = [data.placed(term, device) for term, device in zip(terms, devices, strict=True)]
    named, indices = None if home == devices[0] else home.index, [device.index for device in order]
    total = comm.reduce_add(placed, named)
    label = f"reduce_add to {home}"
    assert_contributions_kept(placed, terms, what=label)
    _assert_there([total], [home], label)
    assert_allreduce_matches({0: total}, terms, what=label)
    _assert_sums(comm.broadcast(total, indices), order, terms, f"{label} and broadcast")
    outputs = [torch.zeros_like(term, device=device) for term, device in zip(terms, order, strict=True)]
    comm.broadcast(total, out=outputs)
    _assert_sums(outputs, order, terms, f"{label} and broadcast to tensors that are given")
    # Tensors of equal dtype are sent together, and must come back in the order of the arguments.
    between = [torch.tensor([number, 3], dtype=torch.int32) for number in range(len(devices))]
    several = [(tensor, between[number].to(devices[number]), tensor) for number, tensor in enumerate(placed)]
    for buffer_size in (10 << 20, 40):  # by default all in one buffer, or nearly each tensor in its own
        copies = comm.broadcast_coalesced(comm.reduce_add_coalesced(several, named, buffer_size), indices, buffer_size)
        for number, wanted in enumerate((terms, between, terms)):
            label = f"reduce_add_coalesced to {home} and broadcast_coalesced, {buffer_size=}, tensor {number}"
            _assert_sums([copy[number] for copy in copies], order, wanted, label)


def assert_broadcast(data: Contributions, devices: Sequence[torch.device], home: torch.device) -> None:
    """Assert that `broadcast` and `broadcast_coalesced` copy `data` from `home` to all devices, bit for bit, together
    with a tensor in each layout of the same dtype and kind of values."""
    order = _from(home, devices)
    indices = [device.index for device in order]
    specs = [replace(data.tensor, shape=_SHAPE, layout=layout) for layout in layouts_for(len(_SHAPE))]
    # Put a tensor of another dtype between them, because tensors of equal dtype are sent together.
    specs[1:1] = [data.tensor, replace(specs[0], dtype="int64" if data.tensor.dtype == "float64" else "float64")]
    specs.append(replace(specs[0], shape=((1 << 20) + 1,), dtype="uint8", layout="contiguous"))
    placed = [spec.build(home) for spec in specs]
    together = comm.broadcast_coalesced(placed, indices)
    for number, (spec, tensor) in enumerate(zip(specs, placed, strict=True)):
        expected = spec.build()
        for label, copies in (
            (f"broadcast from {home}", comm.broadcast(tensor, indices)),
            (f"broadcast_coalesced from {home}, tensor {number}", [row[number] for row in together]),
        ):
            _assert_there(copies, order, label)
            mismatches = [index for index, copy in enumerate(copies) if not same_bits(expected, copy)]
            if mismatches:
                text = f"{label}: the copy on {order[mismatches[0]]} differs from {spec}"
                raise AllreduceMismatch(text, ranks=mismatches)


def _from(home: torch.device, devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the devices with `home` before the others."""
    return [home, *(device for device in devices if device != home)]


def _assert_there(results: Sequence[torch.Tensor], devices: Sequence[torch.device], label: str) -> None:
    got = [result.device for result in results]
    if got != list(devices):
        raise AllreduceMismatch(f"{label}: results are on {[*map(str, got)]}, expected on {[*map(str, devices)]}")


def _assert_sums(
    results: Sequence[torch.Tensor], devices: Sequence[torch.device], terms: Sequence[torch.Tensor], label: str
) -> None:
    _assert_there(results, devices, label)
    assert_allreduce_matches(list(results), terms, what=label)


_MAX = 2  # the number of NCCL's operation, which torch does not name


def assert_nccl_calls(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that each function of `torch.cuda.nccl` gives the right results on all devices."""
    size = len(devices)
    terms = [((torch.arange(6 * size) * 7 + seed + 5 * position) % 31).float() for position in range(size)]
    stacked = torch.stack(terms)
    total, largest, gathered = stacked.sum(0), stacked.amax(0), torch.cat(terms)
    root = seed % size
    streams = [torch.cuda.current_stream(device) for device in devices]

    def placed() -> list[torch.Tensor]:
        return [term.to(device) for term, device in zip(terms, devices, strict=True)]

    def empty(count: int) -> list[torch.Tensor]:
        return [torch.zeros(count, device=device) for device in devices]

    def judge(label: str, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        for index, (result, reference) in enumerate(zip(got, expected, strict=True)):
            if not same_bits(reference, result.cpu()):
                text = f"torch.cuda.nccl.{label}: {result.tolist()} on {result.device}, expected {reference.tolist()}"
                raise AllreduceMismatch(text, ranks=[index])

    inputs = placed()
    nccl.all_reduce(inputs)
    judge("all_reduce in place", inputs, [total] * size)
    inputs, outputs = placed(), empty(6 * size)
    nccl.all_reduce(inputs, outputs, _MAX, streams)
    judge("all_reduce of the maximum", [*inputs, *outputs], [*terms, *[largest] * size])
    inputs, output = placed(), torch.zeros(6 * size, device=devices[root])
    nccl.reduce(inputs, output, root, _MAX, streams)
    judge(f"reduce of the maximum to {root}", [*inputs, output], [*terms, largest])
    inputs = placed()
    nccl.broadcast(inputs, root, streams)
    judge(f"broadcast from {root}", inputs, [terms[root]] * size)
    inputs, outputs = placed(), empty(6 * size * size)
    nccl.all_gather(inputs, outputs, streams)
    judge("all_gather", [*inputs, *outputs], [*terms, *[gathered] * size])
    for op, expected in ((0, total), (_MAX, largest)):
        inputs, outputs = placed(), empty(6)
        nccl.reduce_scatter(inputs, outputs, op, streams)
        judge(f"reduce_scatter, operation {op}", [*inputs, *outputs], [*terms, *expected.chunk(size)])
