"""Plant faults of collectives: change inputs or results of functions of `torch.distributed`, for some calls only."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.planting import is_last
from mgpu_check.suite.common.faults.registry import Planter, When
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, ROOTS
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.tensors import as_bits

_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_OP_TYPES = (dist.ReduceOp, dist.ReduceOp.RedOpType)


@dataclass
class ObservedCall:
    """A call of a collective: the original function, and what it gets.
    `instead` makes one for each call while a fault is planted, and hands it to the function of the fault."""

    real: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: list[torch.Tensor]  # the tensors that it writes on this rank
    op: str  # name of the reduction; "SUM" by default
    group: Any
    late: bool  # True if the call was asynchronous
    kept: dict[Any, Any]  # what earlier calls have kept, since the fault was planted

    @property
    def rank(self) -> int:
        rank = current_rank()
        return 0 if rank is None else rank.index

    @property
    def size(self) -> int:
        """The size of the group; 0 if this rank is not a member."""
        return 0 if self.group == dist.GroupMember.NON_GROUP_MEMBER else dist.get_world_size(self.group)

    @property
    def root(self) -> int | None:
        """The rank that the call names as its root, in the world or in the group."""
        return next((self.kwargs[name] for name in ROOTS if name in self.kwargs), None)

    @property
    def first(self) -> torch.Tensor:
        """The first tensor that the call writes, or an empty tensor."""
        return self.written[0] if self.written else torch.empty(0)

    def splits(self, position: int) -> list[int]:
        """Return the sizes of parts that the call has as argument number `position`, if any."""
        return list(self.args[position] or ()) if len(self.args) > position else []

    def every(self, period: int) -> bool:
        """Count a call; return True for every `period`-th call."""
        self.kept["calls"] = self.kept.get("calls", 0) + 1
        return bool(self.kept["calls"] % period == 0)

    def proceed(self, *instead: Any) -> Any:
        """Call the original function, with `instead` in place of its first arguments."""
        return self.real(*instead, *self.args[len(instead) :], **self.kwargs)

    def finish(self, *instead: Any) -> Any:
        """Call the original function, and wait until it has written its results."""
        return _waited(self.proceed(*instead))

    def with_op(self, op: str, tensor: torch.Tensor | None = None) -> Any:
        """Call an in-place reduction with another operation, also of another tensor, and wait for it."""
        rest = [value for value in self.args[1:] if not isinstance(value, _OP_TYPES)]
        named = self.kwargs | {"op": getattr(dist.ReduceOp, op)}
        return _waited(self.real(self.first if tensor is None else tensor, *rest, **named))

    def with_root(self, **root: int) -> Any:
        """Call the original function with another root, such as ``group_src=0``."""
        named = {name: value for name, value in self.kwargs.items() if name not in ROOTS}
        return self.real(*(None if type(value) is int else value for value in self.args), **named, **root)

    def through(self, wide: torch.dtype, back: Callable[[torch.Tensor], torch.Tensor] = lambda total: total) -> Any:
        """Reduce in another dtype; `back` converts the result."""
        widened = self.first.to(wide)
        work = self.finish(widened)
        self.first.copy_(back(widened))
        return work


def _waited(work: Any) -> Any:
    if isinstance(work, dist.Work):
        work.wait()
    return work


class Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def _observed(
    name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kept: Any
) -> ObservedCall:
    order = list(inspect.signature(real).parameters)
    parameter = COLLECTIVES[name].taken or order[0]
    written = args[order.index(parameter)] if order.index(parameter) < len(args) else kwargs.get(parameter)
    tensors = [written] if isinstance(written, torch.Tensor) else list(written or ())
    operation = next((value for value in args if isinstance(value, _OP_TYPES)), kwargs.get("op"))
    op = "SUM" if operation is None else next(label for label in _OPS if operation == getattr(dist.ReduceOp, label))
    return ObservedCall(real, args, kwargs, tensors, op, kwargs.get("group"), bool(kwargs.get("async_op")), kept)


def instead(*function_names: str) -> Planter:
    """Plant a function in place of collectives. If it returns NotImplemented, the original is called."""

    @contextlib.contextmanager
    def plant(make: Callable[[ObservedCall], Any]) -> Iterator[None]:
        kept: dict[Any, Any] = {}

        def made(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(real)
            def collective(*args: Any, **kwargs: Any) -> Any:
                call = _observed(name, real, args, kwargs, kept)
                result = make(call)
                return call.proceed() if result is NotImplemented else result

            return collective

        with contextlib.ExitStack() as stack:
            for name in function_names:
                for alias in (name, COLLECTIVES[name].newer):
                    if alias and hasattr(dist, alias):
                        stack.enter_context(replaced(dist, alias, made(name, getattr(dist, alias))))
            yield

    return plant


def _planter(make: Callable[[Callable[[ObservedCall], Any], ObservedCall], Any]) -> Callable[..., Planter]:
    """Return a function like `instead`; `make` gets the planted function and the call."""

    def named(*function_names: str) -> Planter:
        return lambda change: instead(*function_names)(functools.partial(make, change))

    return named


def _before(spoil: Callable[[ObservedCall], object], call: ObservedCall) -> Any:
    spoil(call)
    return call.proceed()


def _after(spoil: Callable[[ObservedCall], object], call: ObservedCall) -> Any:
    work = call.finish()
    spoil(call)
    return work


def _unchanged(view_of: Callable[[ObservedCall], Any], call: ObservedCall) -> Any:
    if (view := view_of(call)) is NotImplemented:
        return view
    old = view.clone()
    work = call.finish()
    view.copy_(old)
    return work


before, after = _planter(_before), _planter(_after)
"""Plant functions that change tensors of collectives before each call, and after it has written its results."""
unchanged = _planter(_unchanged)
"""Plant a function that returns a view of a written tensor; it has after each call what it had before."""


def flipped(tensor: torch.Tensor, *, at: int = 0) -> torch.Tensor:
    """Invert the lowest bit of one element of a contiguous tensor, if there is one, and return the tensor."""
    if tensor.numel():
        as_bits(tensor).view(-1)[at].bitwise_xor_(1)
    return tensor


LAST = When("one rank", lambda *args, **kwargs: is_last())
LATE = When("async", lambda call: call.late)
DEVICE = When("device tensors", lambda call: call.first.device.type != "cpu")
NAN = When("NaN", lambda call: bool(call.first.isnan().any()))
GROUPS = When("groups", lambda call: call.group is not None and call.size > 1)
SOME = When("groups of some ranks", lambda call: 1 < call.size < dist.get_world_size())


def op(name: str) -> When:
    return When(name, lambda call: call.op == name)


def dtype(name: str) -> When:
    return When(name, lambda call: call.first.dtype is getattr(torch, name))


def above(elements: int) -> When:
    """Select calls whose first written tensor has more than this number of elements."""
    large = elements >= 1 << 20
    words = f"{elements:,}" if elements < 1 << 16 else f"{elements >> 20} Mi" if large else f"{elements >> 10} Ki"
    return When(f"above {words} elements", lambda call: call.first.numel() > elements)
