"""Detect rows that reach the wrong replica, or are gathered in the wrong order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors

_EQUAL = 1e-5
"""Relative tolerance for counts and rows: ranks sum them in another order than one device."""

mistake(
    "not-scattered",
    "non-tensor arguments reach every replica whole, not split",
    "make tensors of lists before DataParallel scatters the batch",
)
mistake(
    "gathered-in-other-order",
    "gathered values are in the order of the ranks, not of the samples",
    "undo the interleaving of the sampler: torch.stack(parts, dim=1).flatten(0, 1); gather tensors one by one, and "
    "concatenate them after that",
)


@on_tensors(Precedence.OWN_VALUES + 20)
def first_shard_for_all(tensors: Tensors) -> Finding | None:
    """Detect a part of the batch that DataParallel does not scatter; skipped for steps that use ranks."""
    if any(True for _ in tensors.events("collective", "wrap")):
        return None
    for other in tensors.hypotheses.alternatives:
        if other.kind == "first-part-of-a-tensor" and tensors.is_alternative(other):
            return Finding(
                "not-scattered",
                f"{tensors.names[0]} is what one device gives when every shard has the first shard's values of tensor "
                f"{other.index} of the batch",
            )
    return None


@on_tensors(Precedence.OWN_VALUES + 40)
def other_order(tensors: Tensors) -> Finding | None:
    """Detect gathered rows in the wrong order: a result has the rows of one device, but permuted."""
    for name in tensors.wrong("returned"):
        right = tensors.expected.exact.get(name)
        if right is None and name in tensors.expected.single.values:
            right = tensors.expected.single.values[name].double()
        got = tensors.seen[tensors.relations.wrong[name][0]].values.get(name)
        if right is None or got is None or right.shape != got.shape or not right.dim() or len(right) < 2:
            continue
        if _same_rows(got.double(), right):
            told = f"{name} has the rows of one device in another order"
            return Finding("gathered-in-other-order", told)
    return None


def _same_rows(got: torch.Tensor, right: torch.Tensor) -> bool:
    rows, others = got.reshape(len(got), -1), right.reshape(len(right), -1)
    distance = (rows[:, None] - others[None]).abs().amax(-1)
    slack = _EQUAL * float(others.abs().max())
    order = distance.argmin(1).tolist()
    return bool((distance.amin(1) <= slack).all()) and sorted(order) == list(range(len(rows))) != order
