"""Plant faults of collectives: wrap functions of `torch.distributed` to change their inputs or results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.torch_hooks.patches import replaced

__all__ = ["Seen", "around", "spoiled", "through"]

_ALIASES = {
    "all_gather_into_tensor": ("all_gather_single",),
    "reduce_scatter_tensor": ("reduce_scatter_single",),
}
"""Newer aliases of the functions, patched together with them."""
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


@dataclass
class Seen:
    """A call of a collective.

    Attributes:
        real: the original function.
        written: the tensors that it writes on this rank.
        op: name of the reduction; "SUM" by default.
        late: True if the call was asynchronous.
    """

    real: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: list[torch.Tensor]
    op: str
    group: Any
    late: bool

    @property
    def rank(self) -> int:
        """The rank in the world."""
        rank = current_rank()
        return 0 if rank is None else rank.index

    @property
    def size(self) -> int:
        """The size of the group; 0 if this rank is not a member."""
        return 0 if self.group == dist.GroupMember.NON_GROUP_MEMBER else dist.get_world_size(self.group)

    @property
    def last(self) -> bool:
        """True on the last of several ranks of the world."""
        return is_last()

    @property
    def first(self) -> torch.Tensor:
        """The first tensor that the call writes, or an empty tensor."""
        return self.written[0] if self.written else torch.empty(0)

    def call(self, *instead: Any) -> Any:
        """Call the original function, with `instead` in place of its first arguments."""
        return self.real(*instead, *self.args[len(instead) :], **self.kwargs)

    def finish(self, *instead: Any) -> Any:
        """Call the original function, and wait until it has written its results."""
        work = self.call(*instead)
        if isinstance(work, dist.Work):
            work.wait()
        return work

    def is_of(self, *dtypes: torch.dtype) -> bool:
        """Return whether the call writes tensors of one of these dtypes."""
        return self.first.dtype in dtypes


def _seen(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
    written = (
        args[1] if name == "gather" and len(args) > 1 else kwargs.get("gather_list") if name == "gather" else args[0]
    )
    tensors = [written] if isinstance(written, torch.Tensor) else list(written or ())
    kinds = (dist.ReduceOp, dist.ReduceOp.RedOpType)
    given = next((value for value in args if isinstance(value, kinds)), kwargs.get("op"))
    op = "SUM" if given is None else next(known for known in _OPS if given == getattr(dist.ReduceOp, known))
    group = kwargs.get("group")
    return Seen(real, args, kwargs, tensors, op, group, bool(kwargs.get("async_op")))


@contextlib.contextmanager
def around(make: Callable[[Seen], Any], *names: str) -> Iterator[None]:
    """Replace collectives by `make`, called with the original function and its arguments."""
    with contextlib.ExitStack() as stack:
        for name in names:
            for alias in (name, *_ALIASES.get(name, ())):
                if hasattr(dist, alias):
                    stack.enter_context(replaced(dist, alias, _made(make, name, getattr(dist, alias))))
        yield


def _made(make: Callable[[Seen], Any], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def collective(*args: Any, **kwargs: Any) -> Any:
        return make(_seen(name, real, args, kwargs))

    return collective


@contextlib.contextmanager
def spoiled(spoil: Callable[[Seen], object], *names: str) -> Iterator[None]:
    """Call `spoil` after each collective has written its results."""

    def make(seen: Seen) -> Any:
        work = seen.finish()
        spoil(seen)
        return work

    with around(make, *names):
        yield


def through(
    wide: torch.dtype, narrow: torch.dtype, back: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Seen], Any]:
    """Return a sum that computes in another dtype; `back` converts the result to the dtype of the tensors."""

    def reduce(seen: Seen) -> Any:
        if seen.op != "SUM" or not seen.is_of(narrow):
            return seen.call()
        other = seen.first.to(wide)
        work = seen.finish(other)
        seen.first.copy_(back(other))
        return work

    return reduce
