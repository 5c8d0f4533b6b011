"""The sums of NCCL's collectives under the arithmetic of a GPU: along a ring, rounded to the dtype after each hop.

gloo only gathers the operands of all ranks; each rank adds them itself, all in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_check.simulated.operators import arithmetic

_Op = dist.ReduceOp


def _is(op: Any, *kinds: Any) -> bool:
    # ``op in kinds`` compares the other way round, and then a `ReduceOp` equals no `RedOpType` (torch 2.11 to 2.14).
    return any(op == kind for kind in kinds)


def _is_extreme(op: Any) -> bool:
    return _is(op, _Op.MAX, _Op.MIN)


def differs(tensor: Tensor, op: Any) -> bool:
    """Return whether NCCL's result for an operand may differ from gloo's."""
    kinds = arithmetic.present.kinds
    if not kinds or not tensor.is_floating_point():
        return False
    if _is_extreme(op):
        return bool(kinds & {"zeros", "nan"})
    return "nccl" in kinds and _is(op, _Op.SUM, _Op.AVG, _Op.PRODUCT, _Op.PREMUL_SUM)


def operand(tensor: Tensor, op: Any, ranks: int) -> Tensor:
    """Return a flat copy of an operand; of AVG, with the factor that NCCL multiplies first (ncclDevPreMulSum)."""
    flat = tensor.reshape(-1)
    if op == _Op.AVG and ranks > 1:
        return flat * flat.new_full((), 1 / ranks)
    return flat.clone()


def _joined(a: Tensor, b: Tensor, op: Any) -> Tensor:
    if _is_extreme(op):
        return arithmetic.joined_extreme(a, b, op == _Op.MIN, ignores_nan="nan" in arithmetic.present.kinds)
    return a * b if op == _Op.PRODUCT else a + b


def reduced(rows: Sequence[Tensor], first: int, op: Any) -> Tensor:
    """Return the reduction of the operands of all ranks, from that of rank `first` on."""
    total = rows[first % len(rows)].clone()
    for step in range(1, len(rows)):
        total = _joined(total, rows[(first + step) % len(rows)], op)
    return total


def all_reduced(rows: Sequence[Tensor], op: Any) -> Tensor:
    """Return the reduction in chunks, one for each rank; the ring of chunk c begins after rank c."""
    chunks = [row.tensor_split(len(rows)) for row in rows]
    return torch.cat([reduced([of_rank[c] for of_rank in chunks], c + 1, op) for c in range(len(rows))])
