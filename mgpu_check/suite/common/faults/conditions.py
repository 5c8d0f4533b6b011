"""Conditions of planted faults: the rank and the call that they affect."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.when import When
from mgpu_check.torch_hooks.tensors import name_of


def is_last() -> bool:
    """Return whether this process is the last of several ranks."""
    rank = current_rank()
    return rank is not None and rank.size > 1 and rank.index == rank.size - 1


def ranks_here() -> int:
    """Return the world size of this rank; 0 in the node process."""
    rank = current_rank()
    return 0 if rank is None else rank.size


class Count:
    """Counts calls, to select those that a fault affects."""

    def __init__(self) -> None:
        self.calls = 0

    def every(self, period: int) -> bool:
        """Count a call; return True for every `period`-th call."""
        self.calls += 1
        return self.calls % period == 0

    def later(self, than: int = 1) -> bool:
        """Count a call; return True after `than` calls."""
        self.calls += 1
        return self.calls > than


LAST_RANK = When("one rank", lambda *args, **kwargs: is_last())


def dtype(*dtypes: torch.dtype) -> When:
    """Return the condition that the first argument is a tensor of one of these dtypes."""
    names = " and ".join(map(name_of, dtypes))
    return When(f"{names} only", lambda value, *args, **kwargs: value.dtype in dtypes)


def above(elements: int) -> When:
    """Return the condition that the first argument is a tensor with more elements."""
    return When(f"above {elements >> 10} Ki elements", lambda value, *args, **kwargs: value.numel() > elements)


def keyword(name: str, value: object) -> When:
    """Return the condition that a call has this keyword argument."""
    return When(f"{name}={value}", lambda *args, **kwargs: kwargs.get(name) == value)


def counted(text: str, selects: Callable[[Count], bool]) -> When:
    """Return a condition on the number of calls: `selects` gets a count that starts at 0 with each planting."""

    def fresh() -> Callable[..., bool]:
        count = Count()
        return lambda *args, **kwargs: selects(count)

    return When(text, fresh(), fresh)
