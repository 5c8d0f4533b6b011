"""Check that shards are disjoint, cover the batch in order, are on the right devices, and gather to the batch again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_check.asserts.bits import as_bytes, first_difference, same_bits
from mgpu_check.asserts.nested import columns
from mgpu_check.errors import ShardError
from mgpu_check.torch_hooks.tensors import plain

Device = torch.device | str | int


def chunk_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of the shards into which torch splits `total` samples for `parts` devices.

    All but the last have ceil(total / parts), so there can be fewer shards than devices (10 over 8 is 2+2+2+2+2). An
    empty batch gives every device an empty shard. Source: documentation of `torch.chunk`, which `scatter` uses.
    """
    if total == 0:
        return [0] * parts
    size = -(-total // parts)
    full, rest = divmod(total, size)
    return [size] * full + [rest] * (rest > 0)


def assert_shards_cover(batch: Any, shards: Sequence[Any], devices: Sequence[Device], dim: int = 0) -> None:
    """Assert that `shards` are `batch`, split along `dim`: every row once, in order, shard i on ``devices[i]``.

    Args:
        batch: a tensor of any shape, dtype, layout and device, or tensors nested in tuples, lists and dicts. Every
            shard must have the other leaves unchanged.
        shards: one part of the same nesting per device, in the order of the devices. There may be fewer shards than
            devices, and their sizes are free (`assert_shard_sizes` asserts those).
        devices: the device of each shard; an int is the index of a GPU.
        dim: the split dimension; may be negative.

    Raises:
        ShardError: naming shard, device, row and element, with the expected and the actual value. Its ``ranks`` are the
            indices of the shards at fault.
        ValueError: there are no devices, or a tensor of the batch has no dimension `dim`.
    """
    __tracebackhide__ = True
    where = _devices(devices)
    if len(shards) > len(where):
        raise ShardError(
            f"{len(shards)} shards for {len(where)} devices; shards from {len(where)} on have no device",
            ranks=range(len(where), len(shards)),
        )
    for name, whole, parts in columns(batch, shards):
        if isinstance(whole, torch.Tensor):
            _assert_tensor_covered(name, whole, parts, where, dim)
        else:
            _assert_replicated(name, whole, parts, where)


def assert_leaves_replicated(batch: Any, shards: Sequence[Any], devices: Sequence[Device]) -> None:
    """Assert that every shard has the non-tensor leaves of `batch` unchanged.

    `nn.parallel.scatter` documents this.

    Raises:
        ShardError: naming the leaf, the shard and its device.
    """
    __tracebackhide__ = True
    where = _devices(devices)
    for name, whole, parts in columns(batch, shards):
        if not isinstance(whole, torch.Tensor):
            _assert_replicated(name, whole, parts, where)


def assert_shard_sizes(shards: Sequence[Any], sizes: Sequence[int], devices: Sequence[Device], dim: int = 0) -> None:
    """Assert that there are as many shards as `sizes`, and that every tensor of shard i has ``sizes[i]`` rows.

    Raises:
        ShardError: with the expected and the actual sizes, and the device of the first wrong shard.
    """
    __tracebackhide__ = True
    where = _devices(devices)
    if not shards:
        raise ShardError(f"no shards; expected sizes {_sum(sizes)}")
    for name, _, parts in columns(shards[0], shards, "shard"):
        if not isinstance(parts[0], torch.Tensor):
            continue
        got = [part.shape[dim] for part in parts]
        if got != list(sizes):
            pairs = zip(got, sizes, strict=False)
            wrong = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(sizes)))
            first = f", first wrong on {where[wrong]}" if wrong < len(where) else ""
            raise ShardError(f"{name}: expected sizes {_sum(sizes)}, got {_sum(got)}{first}", ranks=(wrong,))


def assert_gathered(batch: Any, gathered: Any, device: Device) -> None:
    """Assert that `gathered` equals `batch` bit for bit, with every tensor on `device`.

    Raises:
        ShardError: naming the element, with the expected and the actual value.
    """
    __tracebackhide__ = True
    (wanted,) = _devices([device])
    for name, whole, (got,) in columns(batch, [gathered]):
        if not isinstance(whole, torch.Tensor):
            if got is not whole and (type(got) is not type(whole) or got != whole):  # 1, 1.0 and True are equal
                raise ShardError(f"gathered {name}: expected {whole!r}, got {got!r}")
            continue
        if got.device != wanted:
            raise ShardError(f"gathered {name}: expected it on {wanted}, got it on {got.device}")
        if got.shape != whole.shape or got.dtype != whole.dtype:
            raise ShardError(f"gathered {name}: expected {_looks(whole)}, got {_looks(got)}")
        if not same_bits(whole, got):
            at = first_difference(whole, got)
            raise ShardError(f"gathered {name}: element {list(at)}: expected {whole[at].item()}, got {got[at].item()}")


def _devices(devices: Sequence[Device]) -> list[torch.device]:
    if len(devices) == 0:
        raise ValueError("devices=() is empty; give at least one device")
    # torch.device(int) would need an accelerator, and take its type.
    return [torch.device("cuda", one) if isinstance(one, int) else torch.device(one) for one in devices]


def _assert_replicated(name: str, leaf: Any, parts: Sequence[Any], devices: Sequence[torch.device]) -> None:
    for index, part in enumerate(parts):
        # 1, 1.0 and True are equal.
        if part is not leaf and (type(part) is not type(leaf) or part != leaf):
            raise ShardError(
                f"{name} is not a tensor and must reach every device unchanged, but shard {index}, for "
                f"{devices[index]}, got {part!r} instead of {leaf!r}",
                ranks=(index,),
            )


def _assert_tensor_covered(
    name: str, whole: torch.Tensor, parts: Sequence[torch.Tensor], devices: Sequence[torch.device], dim: int
) -> None:
    if not -whole.dim() <= dim < whole.dim():
        raise ValueError(f"{name}: dim={dim} is not valid for shape {tuple(whole.shape)}")
    axis = dim % whole.dim()
    total = whole.shape[axis]
    source = plain(whole)
    landed = 0
    for index, part in enumerate(parts):
        shard = f"{name}: shard {index}"
        if part.device != devices[index]:
            raise ShardError(f"{shard} is on {part.device}, expected on {devices[index]}", ranks=(index,))
        shape = list(whole.shape)
        shape[axis] = part.shape[axis] if part.dim() == whole.dim() else -1
        if list(part.shape) != shape or part.dtype != whole.dtype:
            raise ShardError(
                f"{shard}, on {part.device}, is {_looks(part)}, expected a part of {_looks(whole)} along dim {dim}",
                ranks=(index,),
            )
        rows = min(part.shape[axis], total - landed)
        expected, got = source.narrow(axis, landed, rows), plain(part).narrow(axis, 0, rows)
        if not same_bits(expected, got):
            at = first_difference(expected, got)
            row = landed + at[axis]
            raise ShardError(
                f"{shard}, on {part.device}: row {at[axis]} along dim {dim} (row {row} of the batch), element "
                f"{list(at)}: expected {expected[at].item()}, got {got[at].item()}{_origins(whole, parts, axis)}",
                ranks=(index,),
            )
        if rows < part.shape[axis]:
            raise ShardError(
                f"{shard}, on {part.device}: {part.shape[axis] - rows} rows more than the batch has "
                f"({total} along dim {dim}){_origins(whole, parts, axis)}",
                ranks=(index,),
            )
        landed += rows
    if landed < total:
        raise ShardError(
            f"{name}: rows {_ranges(range(landed, total))} of {total} along dim {dim} are in no shard; "
            f"the shards have {_sum([part.shape[axis] for part in parts])} rows{_origins(whole, parts, axis)}"
        )


def _origins(whole: torch.Tensor, parts: Sequence[torch.Tensor], axis: int) -> str:
    """List the rows of the batch that each shard holds, for a message; "" if two rows are equal."""
    rows = _row_keys(whole, axis)
    if len(set(rows)) != len(rows):
        return ""
    row_of = {key: index for index, key in enumerate(rows)}
    lines, counts, strange = [], dict.fromkeys(range(len(rows)), 0), 0
    for index, part in enumerate(parts):
        if part.shape[:axis] + part.shape[axis + 1 :] != whole.shape[:axis] + whole.shape[axis + 1 :]:
            return ""
        found = [row_of.get(key) for key in _row_keys(part, axis)]
        known = [row for row in found if row is not None]
        for row in known:
            counts[row] += 1
        unknown = len(found) - len(known)
        strange += unknown
        aside = f", {unknown} that the batch does not hold" if unknown else ""
        lines.append(f"\n  shard {index} on {part.device} holds rows {_ranges(known)}{aside}")
    missing = [row for row, count in counts.items() if count == 0]
    repeated = [row for row, count in counts.items() if count > 1]
    if missing:
        lines.append(f"\n  in no shard: rows {_ranges(missing)}")
    if repeated:
        lines.append(f"\n  more than once: rows {_ranges(repeated)}")
    if not missing and not repeated and not strange:
        lines.append("\n  every row is there once: looks like shards were swapped, or the batch shuffled")
    return "".join(lines)


def _row_keys(tensor: torch.Tensor, axis: int) -> list[tuple[int, ...]]:
    rows = plain(tensor).movedim(axis, 0)
    if rows.numel() == 0:
        return [()] * len(rows)
    return [tuple(as_bytes(row).reshape(-1).tolist()) for row in rows]


def _ranges(rows: Sequence[int]) -> str:
    """Return rows as text in the given order, such as "0-2, 5" for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for row in rows:
        if spans and row == spans[-1][1] + 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans) or "none"


def _sum(sizes: Sequence[int]) -> str:
    return "+".join(str(size) for size in sizes) or "none"


def _looks(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
