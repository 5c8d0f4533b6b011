"""Check the results of collective operations: reductions, shards, and what is gathered from them.

A reduction must hold the result that one device would compute. Shards must be disjoint, cover the batch in order, be
on the right devices, and gather to the batch again. They are walked side by side with the batch, through the
containers that `nn.parallel.scatter` supports. These differ from those of `torch_hooks.nested` and of torch's pytree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mgpu_check.errors import AllreduceMismatch, ShardError
from mgpu_check.numerics.differences import diagnose, difference
from mgpu_check.numerics.reduction import reduced
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.torch_hooks.tensors import name_of, plain


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in order, as a uint8 matrix on the CPU, (number of elements, bytes of one)."""
    # Always copy: torch calls a single element contiguous for any stride, and `view` then refuses it ("self.stride(-1)
    # must be 1 to view Float as Byte", torch 2.13).
    flat = plain(tensor).clone(memory_format=torch.contiguous_format).reshape(-1)
    if flat.numel() == 0:
        return torch.empty(0, flat.element_size(), dtype=torch.uint8, device="cpu")
    return flat.view(torch.uint8).reshape(-1, flat.element_size())


def same_bits(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Return whether shape, dtype and every bit agree.

    NaN equals a NaN with the same bits, and 0.0 differs from -0.0. The devices may differ.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    return torch.equal(as_bytes(expected), as_bytes(got))


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first element, in row-major order, whose bits differ; shapes and dtypes must be equal.

    Raises:
        ValueError: the tensors hold the same bits.
    """
    differs = (as_bytes(expected) != as_bytes(got)).any(dim=1).nonzero()
    if len(differs) == 0:
        raise ValueError("first_difference: the tensors hold the same bits")
    return index_of(int(differs[0]), expected.shape)


def index_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at position `flat`, in row-major order, of a tensor of this shape."""
    index = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def columns(batch: Any, shards: Sequence[Any], location: str = "batch") -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield each tensor or other leaf of `batch`: its name, the leaf, and the leaf at the same place in every shard.

    Raises:
        ShardError: a shard is nested differently: another type, length or set of keys.
    """
    if isinstance(batch, Mapping):
        for key in batch:
            yield from columns(batch[key], _parts(batch, shards, key, location), f"{location}[{key!r}]")
        _require_same_kind(batch, shards, location, same_length=True)
    elif isinstance(batch, (tuple, list)) and len(batch) > 0:
        _require_same_kind(batch, shards, location, same_length=True)
        field_names = getattr(batch, "_fields", None)
        for index, entry in enumerate(batch):
            name = f"{location}.{field_names[index]}" if field_names else f"{location}[{index}]"
            yield from columns(entry, _parts(batch, shards, index, location), name)
    else:
        for index, shard in enumerate(shards):
            if isinstance(batch, torch.Tensor) != isinstance(shard, torch.Tensor):
                _fail(location, index, type(batch).__name__, type(shard).__name__)
        yield location, batch, list(shards)


def _parts(batch: Any, shards: Sequence[Any], key: Any, location: str) -> list[Any]:
    entries = []
    for index, shard in enumerate(shards):
        _require_same_kind(batch, [shard], location, index)
        try:
            entries.append(shard[key])
        except (KeyError, IndexError):
            _fail(location, index, f"an entry {key!r}", "none")
    return entries


def _require_same_kind(
    batch: Any, shards: Sequence[Any], location: str, start: int = 0, *, same_length: bool = False
) -> None:
    for index, shard in enumerate(shards, start):
        if type(shard) is not type(batch):
            _fail(location, index, type(batch).__name__, type(shard).__name__)
        if same_length and len(shard) != len(batch):
            _fail(location, index, f"{len(batch)} entries", f"{len(shard)}")


def _fail(location: str, index: int, expected: str, got: str) -> None:
    raise ShardError(f"{location}: shard {index} is nested differently: expected {expected}, got {got}", ranks=(index,))


def assert_allreduce_matches(
    results: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
    contributions: Sequence[torch.Tensor],
    *,
    operation: str = "sum",
    what: str = "allreduce",
) -> None:
    """Assert that every result is the reduction of all contributions.

    Elements whose sum is the same in every order are compared bit for bit: integers, and floating-point data such as
    that of `mgpu_check.numerics.reduction.exact_parts`. Others may be off by gamma(n-1)·Σ|x| in the unit roundoff of
    the dtype, the bound for every order of summation.

    Args:
        results: the tensors of ranks (or devices) after the operation: all of them in order, or some of them by rank.
            On any device, in any layout.
        contributions: the input of each rank, in order, unchanged by the operation; all of the same shape and dtype.
        operation: "sum", "avg", "product", "min" or "max".
        what: the name of the operation under test, for the message.

    Raises:
        AllreduceMismatch: a result has the wrong dtype, shape or value. `.ranks` has the ranks with a wrong result.
        ValueError: no contributions, contributions that differ in shape or dtype, or a rank that is not among them.
    """
    __tracebackhide__ = True
    should = reduced(contributions, operation)
    count = len(should.contributions)
    results_by_rank = dict(results) if isinstance(results, Mapping) else dict(enumerate(results))
    strangers = sorted(rank for rank in results_by_rank if not 0 <= rank < count)
    if strangers:
        raise ValueError(
            f"assert_allreduce_matches: results name ranks {strangers}, but contributions are of {count} ranks only"
        )
    if not isinstance(results, Mapping) and len(results_by_rank) != count:
        raise AllreduceMismatch(
            f"{what}: {len(results_by_rank)} results for {count} contributions",
            ranks=range(len(results_by_rank), count),
        )
    contribution = should.contributions[0]

    def deviation(result: torch.Tensor, rank: int) -> str | None:
        if result.dtype != contribution.dtype:
            return f"has dtype {result.dtype}, expected {contribution.dtype}"
        if result.shape != should.value.shape:
            return f"has shape {tuple(result.shape)}, expected {tuple(should.value.shape)}"
        own = result, should.value, should.tolerance
        if (off := difference(*own)) is None:
            return None
        looks = diagnose(*own, contributions=should.contributions, rank=rank, constants={"world size": count})
        return "; ".join([str(off), *looks])

    texts = ((deviation(result, rank), rank) for rank, result in sorted(results_by_rank.items()))
    failures = grouped((text, rank) for text, rank in texts if text is not None)
    if not failures:
        return
    wrong_ranks = sorted(rank for _, ranks in failures for rank in ranks)
    description = f"{operation} of {count} x {tuple(contribution.shape)} {name_of(contribution.dtype)}"
    among = f" (of {len(results_by_rank)})" if len(results_by_rank) > 1 else ""
    head = f"{what}: {description} is wrong on {named(wrong_ranks)}{among}"
    lines = [f"  {named(ranks)}: {text}" for text, ranks in failures[:4]]
    raise AllreduceMismatch("\n".join([head, *lines]), ranks=wrong_ranks)


def assert_contributions_kept(
    placed: Sequence[torch.Tensor], contributions: Sequence[torch.Tensor], *, what: str = "reduction"
) -> None:
    """Assert that a reduction into a new tensor did not change its inputs.

    Args:
        placed: the inputs after the reduction, one for each rank, on any device.
        contributions: their values before the reduction, of the same shapes and dtypes.
        what: the name of the operation under test, for the message.

    Raises:
        AllreduceMismatch: an input has changed; `.ranks` has the ranks of the changed inputs.
    """
    __tracebackhide__ = True
    pairs = enumerate(zip(contributions, placed, strict=True))
    changed = [rank for rank, (before, after) in pairs if not same_bits(before, after)]
    if changed:
        raise AllreduceMismatch(
            f"{what}: the input of {named(changed)} has changed; expected the result in a new tensor", ranks=changed
        )


Device = torch.device | str | int


def chunk_sizes(total: int, devices: int) -> list[int]:
    """Return the sizes of the shards into which torch splits `total` samples for that many devices.

    All but the last have ceil(total / devices), so there can be fewer shards than devices (10 over 8 is 2+2+2+2+2). An
    empty batch gives every device an empty shard. Source: documentation of `torch.chunk`, which `scatter` uses.
    """
    if total == 0:
        return [0] * devices
    size = -(-total // devices)
    full, rest = divmod(total, size)
    return [size] * full + ([rest] if rest else [])


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
    torch_devices = _devices(devices)
    if len(shards) > len(torch_devices):
        raise ShardError(
            f"{len(shards)} shards for {len(torch_devices)} devices; "
            f"shards from {len(torch_devices)} on have no device",
            ranks=range(len(torch_devices), len(shards)),
        )
    for name, leaf, pieces in columns(batch, shards):
        if isinstance(leaf, torch.Tensor):
            _assert_tensor_covered(name, leaf, pieces, torch_devices, dim)
        else:
            _assert_replicated(name, leaf, pieces, torch_devices)


def assert_leaves_replicated(batch: Any, shards: Sequence[Any], devices: Sequence[Device]) -> None:
    """Assert that every shard has the non-tensor leaves of `batch` unchanged.

    `nn.parallel.scatter` documents this.
    """
    __tracebackhide__ = True
    torch_devices = _devices(devices)
    for name, leaf, pieces in columns(batch, shards):
        if not isinstance(leaf, torch.Tensor):
            _assert_replicated(name, leaf, pieces, torch_devices)


def assert_shard_sizes(shards: Sequence[Any], sizes: Sequence[int], devices: Sequence[Device], dim: int = 0) -> None:
    """Assert that there are as many shards as `sizes`, and that every tensor of shard i has ``sizes[i]`` rows."""
    __tracebackhide__ = True
    torch_devices = _devices(devices)
    if not shards:
        raise ShardError(f"no shards; expected sizes {_sum(sizes)}")
    for name, _, pieces in columns(shards[0], shards, "shard"):
        if not isinstance(pieces[0], torch.Tensor):
            continue
        got = [piece.shape[dim] for piece in pieces]
        if got != list(sizes):
            pairs = zip(got, sizes, strict=False)
            mismatch = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(sizes)))
            remark = f", first wrong on {torch_devices[mismatch]}" if mismatch < len(torch_devices) else ""
            raise ShardError(f"{name}: expected sizes {_sum(sizes)}, got {_sum(got)}{remark}", ranks=(mismatch,))


def assert_gathered(batch: Any, gathered: Any, device: Device) -> None:
    """Assert that `gathered` equals `batch` bit for bit, with every tensor on `device`."""
    __tracebackhide__ = True
    (wanted,) = _devices([device])
    for name, leaf, (got,) in columns(batch, [gathered]):
        if not isinstance(leaf, torch.Tensor):
            if got is not leaf and (type(got) is not type(leaf) or got != leaf):  # 1, 1.0 and True are equal
                raise ShardError(f"gathered {name}: expected {leaf!r}, got {got!r}")
            continue
        if got.device != wanted:
            raise ShardError(f"gathered {name}: expected it on {wanted}, got it on {got.device}")
        if got.shape != leaf.shape or got.dtype != leaf.dtype:
            raise ShardError(f"gathered {name}: expected {_looks(leaf)}, got {_looks(got)}")
        if not same_bits(leaf, got):
            at = first_difference(leaf, got)
            raise ShardError(f"gathered {name}: element {list(at)}: expected {leaf[at].item()}, got {got[at].item()}")


def _devices(devices: Sequence[Device]) -> list[torch.device]:
    if len(devices) == 0:
        raise ValueError("devices=() is empty; give at least one device")
    # torch.device(int) takes the type of the accelerator, and raises without one ("Cannot access accelerator device
    # when none is available", torch 2.13).
    return [torch.device("cuda", device) if isinstance(device, int) else torch.device(device) for device in devices]


def _assert_replicated(name: str, leaf: Any, pieces: Sequence[Any], devices: Sequence[torch.device]) -> None:
    for index, piece in enumerate(pieces):
        # 1, 1.0 and True are equal.
        if piece is not leaf and (type(piece) is not type(leaf) or piece != leaf):
            raise ShardError(
                f"{name} is not a tensor and must reach every device unchanged, but shard {index}, for "
                f"{devices[index]}, got {piece!r} instead of {leaf!r}",
                ranks=(index,),
            )


def _assert_tensor_covered(
    name: str, full_tensor: torch.Tensor, pieces: Sequence[torch.Tensor], devices: Sequence[torch.device], dim: int
) -> None:
    if not -full_tensor.dim() <= dim < full_tensor.dim():
        raise ValueError(f"{name}: dim={dim} is not valid for shape {tuple(full_tensor.shape)}")
    axis = dim % full_tensor.dim()
    total = full_tensor.shape[axis]
    source = plain(full_tensor)
    landed = 0
    for index, piece in enumerate(pieces):
        shard = f"{name}: shard {index}"
        if piece.device != devices[index]:
            raise ShardError(f"{shard} is on {piece.device}, expected on {devices[index]}", ranks=(index,))
        shape = list(full_tensor.shape)
        shape[axis] = piece.shape[axis] if piece.dim() == full_tensor.dim() else -1
        if list(piece.shape) != shape or piece.dtype != full_tensor.dtype:
            raise ShardError(
                f"{shard}, on {piece.device}, is {_looks(piece)}, expected a part of "
                f"{_looks(full_tensor)} along dim {dim}",
                ranks=(index,),
            )
        rows = min(piece.shape[axis], total - landed)
        expected, got = source.narrow(axis, landed, rows), plain(piece).narrow(axis, 0, rows)
        if not same_bits(expected, got):
            at = first_difference(expected, got)
            raise ShardError(
                f"{shard}, on {piece.device}: row {at[axis]} along dim {dim} (row {landed + at[axis]} of the batch), "
                f"element {list(at)}: expected {expected[at].item()}, got {got[at].item()}"
                f"{_origins(full_tensor, pieces, axis)}",
                ranks=(index,),
            )
        if rows < piece.shape[axis]:
            raise ShardError(
                f"{shard}, on {piece.device}: {piece.shape[axis] - rows} rows more than the batch has "
                f"({total} along dim {dim}){_origins(full_tensor, pieces, axis)}",
                ranks=(index,),
            )
        landed += rows
    if landed < total:
        raise ShardError(
            f"{name}: rows {_ranges(range(landed, total))} of {total} along dim {dim} are in no shard; "
            f"the shards have {_sum([piece.shape[axis] for piece in pieces])} rows{_origins(full_tensor, pieces, axis)}"
        )


def _origins(full_tensor: torch.Tensor, pieces: Sequence[torch.Tensor], axis: int) -> str:
    """List the rows of the batch that each shard holds, for a message; "" if two rows are equal."""
    rows = _row_keys(full_tensor, axis)
    if len(set(rows)) != len(rows):
        return ""
    row_of = {key: index for index, key in enumerate(rows)}
    lines, counts, strange = [], dict.fromkeys(range(len(rows)), 0), 0
    for index, piece in enumerate(pieces):
        if piece.shape[:axis] + piece.shape[axis + 1 :] != full_tensor.shape[:axis] + full_tensor.shape[axis + 1 :]:
            return ""
        origins = [row_of.get(key) for key in _row_keys(piece, axis)]
        recognized = [row for row in origins if row is not None]
        for row in recognized:
            counts[row] += 1
        unknown = len(origins) - len(recognized)
        strange += unknown
        aside = f", {unknown} that the batch does not hold" if unknown else ""
        lines.append(f"\n  shard {index} on {piece.device} holds rows {_ranges(recognized)}{aside}")
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
