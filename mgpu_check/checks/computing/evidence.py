"""Compare results on the device that made them, and say of what is wrong where it is and what it looks like."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import gcd
from typing import Any

import torch

from mgpu_check.checks.bits import index_of
from mgpu_check.checks.digests import digest
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

__all__ = ["bits", "differing", "digests_of_pieces", "evidence_of", "length_of_piece"]

_LISTED = 16
_LOOKED_AT = 4096
_PIECES = 64
_BLOCK = 1 << 24


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor, flat, as integers with the same bits: NaN equals the same NaN then."""
    flat = tensor.reshape(-1)
    wanted = INTEGER_OF_SIZE[flat.element_size()]
    return flat if flat.dtype == wanted else flat.view(wanted)


def differing(rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return how many elements of each of `rows` differ from those of `right`: int64, on their device."""
    return (rows != right).sum(dim=-1)


def length_of_piece(tensor: torch.Tensor) -> int:
    """Return how many elements each of 64 pieces of a tensor has, in row-major order; the last has fewer."""
    return max(1, -(-tensor.numel() // _PIECES))


def digests_of_pieces(tensor: torch.Tensor) -> list[int]:
    """Return the digest of each of at most 64 pieces of `tensor`."""
    return [digest(piece) for piece in bits(tensor).split(length_of_piece(tensor))]


def evidence_of(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> dict[str, Any]:
    """Return what a report says about wrong elements, as values that JSON has.

    Args:
        got, expected: of one shape and dtype, on one device.
        wrong: booleans of that shape.

    Returns:
        errors: how many elements are wrong; indices: of the first; values: theirs, as (expected, got) in hexadecimal bits;
        bits: bit -> in how many elements it differs; "share of single bits", "share of NaN"; period: the largest number
        that divides all distances of wrong elements, in row-major order; box: first and last index of what is wrong, by
        dimension. All but `errors` is of the first 4096 wrong ones.
    """
    flat = wrong.reshape(-1)
    errors = int(flat.sum())
    places = _first(flat)
    found: dict[str, Any] = {"errors": errors, "elements": flat.numel()}
    if not places:
        return found
    where = torch.tensor(places, device=flat.device)
    values = [bits(tensor)[where].tolist() for tensor in (expected, got)]
    mask = (1 << 8 * got.element_size()) - 1
    pairs = [(one & mask, other & mask) for one, other in zip(*values, strict=True)]
    counts: Counter[int] = Counter()
    for one, other in pairs:
        counts.update(bit for bit in range(64) if (one ^ other) >> bit & 1)
    odd = got.reshape(-1)[where]
    finite = torch.isfinite(odd.float()) if odd.dtype.is_floating_point else torch.ones_like(where, dtype=torch.bool)
    indices = [index_of(place, got.shape) for place in places]
    period = 0
    for left, right in pairwise(places):
        period = gcd(period, right - left)
    width = got.element_size() * 2 + 2
    return found | {
        "indices": [list(index) for index in indices[:_LISTED]],
        "values": [[f"{value:#0{width}x}" for value in pair] for pair in pairs[:_LISTED]],
        "bits": {str(bit): times for bit, times in counts.most_common()},
        "share of single bits": sum((one ^ other).bit_count() == 1 for one, other in pairs) / len(pairs),
        "share of NaN": 1 - float(finite.double().mean()),
        "period": period,
        "lanes": len({place % 32 for place in places}),
        "box": [[min(axis), max(axis)] for axis in zip(*indices, strict=True)],
    }


def _first(flat: torch.Tensor) -> list[int]:
    """Return where the first 4096 of booleans are true, without an index of all that are."""
    places: list[int] = []
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        if bool(block.any()):
            places += (block.nonzero()[: _LOOKED_AT - len(places), 0] + start).tolist()
        if len(places) >= _LOOKED_AT:
            break
    return places
