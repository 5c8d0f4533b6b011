"""Plant faults in torch from outside: in any function, in DistributedDataParallel, or in the simulated hardware.

A fault can affect some ranks and calls only. A fault of a function is a function too: it gets the original, and then
the arguments of the call::

    copies = caught_by("test_copies_that_convert")

    @copies("copies of one device lose the sign", around(Tensor, "copy_"), one_device(torch.bfloat16))
    def sign_lost(copy, target, source, *args, **kwargs):
        return copy(target, source.abs(), *args, **kwargs)
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.simulated.defects.implementations import Unit
from mgpu_check.simulated.hardware import Defect, Hardware, planted
from mgpu_check.suite.common.faults.registry import Planter, When
from mgpu_check.torch_hooks.patches import Patches, entered, replaced
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
    dtype_names = " and ".join(map(name_of, dtypes))
    return When(f"{dtype_names} only", lambda value, *args, **kwargs: value.dtype in dtypes)


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


DDP = DistributedDataParallel
Change = Callable[[torch.Tensor, Any, DistributedDataParallel], torch.Tensor | None]


def around(owner: Any, *function_names: str) -> Planter:
    """Plant a function in place of functions of `owner`. It gets the original function, and the arguments of the call.

    If it returns NotImplemented, the original is called. `owner` is a module or class, or its name as in
    ``package.module:Class``, which is imported when the fault is planted.
    """

    @contextlib.contextmanager
    def plant(change: Callable[..., Any]) -> Iterator[None]:
        def changed(real: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(real)
            def call(*args: Any, **kwargs: Any) -> Any:
                result = change(real, *args, **kwargs)
                return real(*args, **kwargs) if result is NotImplemented else result

            return call

        with Patches() as patches:
            for name in function_names:
                patches.wrap(pkgutil.resolve_name(owner) if isinstance(owner, str) else owner, name, changed)
            yield

    return plant


def both(outer: Planter, inner: Planter) -> Planter:
    """Plant a function in two places."""
    return lambda change: entered(outer(change), inner(change))


def given(owner: Any, *function_names: str) -> Planter:
    """Plant a function that changes what functions of `owner` are given. It gets the arguments of the call.
    It returns a tuple that takes the place of the first arguments, or None if it has changed them in place."""

    def plant(change: Callable[..., Any]) -> AbstractContextManager[None]:
        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            others = change(*args, **kwargs)
            replacements = others if isinstance(others, tuple) else ()
            return real(*replacements, *args[len(replacements) :], **kwargs)

        return around(owner, *function_names)(call)

    return plant


def returned(owner: Any, *function_names: str) -> Planter:
    """Plant a function that changes what functions of `owner` return. It gets the result, and then the arguments of the
    call.

    It returns another result, or None if it has changed the result or the arguments in place.
    """

    def plant(change: Callable[..., Any]) -> AbstractContextManager[None]:
        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            replacement = change(result, *args, **kwargs)
            return result if replacement is None or replacement is NotImplemented else replacement

        return around(owner, *function_names)(call)

    return plant


def keeping(planter: Planter) -> Planter:
    """Plant a function that gets a dictionary before all other arguments: empty when planted, and its own."""
    return lambda change: planter(functools.partial(change, {}))


def optimized(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def wrapped(
    after: Callable[[DistributedDataParallel], None] = lambda model: None,
    before: Callable[[nn.Module], None] = lambda module: None,
    **forced: Any,
) -> AbstractContextManager[None]:
    """Build DDP with other arguments, and change the module before and the wrapper after."""
    real = DistributedDataParallel.__init__

    @functools.wraps(real)  # checks read the options of this version of torch from its signature
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(module)
        real(self, module, *args, **(kwargs | forced))
        after(self)

    return replaced(DistributedDataParallel, "__init__", init)


def communicated(
    change: Change, selects: Callable[[DistributedDataParallel], bool] = lambda model: True
) -> AbstractContextManager[None]:
    """Make DDP communicate a copy of each bucket changed by `change`, for the models that `selects` accepts.

    `change` may also change the copy in place and return None.
    Other models get no communication hook, because a model accepts only one, and because `join` divides differently
    with one.
    """

    def register(model: DistributedDataParallel) -> None:
        if not selects(model):
            return
        group = model.process_group

        def communicate(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer().clone()
            changed = change(buffer, bucket, model)
            buffer = (buffer if changed is None or changed is NotImplemented else changed) * (1 / group.size())
            dist.all_reduce(buffer, group=group)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        # DDP compares annotations with its own types, and does not resolve string annotations.
        communicate.__annotations__.clear()
        model.register_comm_hook(None, communicate)

    return wrapped(register)


def communicating(condition: When | None = None) -> Planter:
    """Plant a change of each bucket that DDP communicates; see `communicated`. `condition` holds for a model."""
    return lambda change: communicated(change, condition.holds if condition else lambda model: True)


def slices(buffer: torch.Tensor, bucket: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter of a bucket with its flat part of `buffer`."""
    at = 0
    for parameter in bucket.parameters():
        yield parameter, buffer[at : at + parameter.numel()]
        at += parameter.numel()


def upper_bits(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 11 significand bits of TF32, by Veltkamp's splitting; return other dtypes unchanged."""
    if values.dtype != torch.float32:
        return values
    large = values * ((1 << 13) + 1)
    return large - (large - values)


_MEMORY = 16 << 30


def call(text: str, holds: Callable[..., bool]) -> When:
    """Return a condition on the arguments of a call, for faults that `around` plants."""
    return When(text, lambda real, *args, **kwargs: holds(*args, **kwargs))


def first(text: str, holds: Callable[[Any], bool]) -> When:
    """Return a condition on the first argument of a call, for faults that `around` plants."""
    return When(text, lambda real, *args, **kwargs: bool(args) and holds(args[0]))


def one_device(*dtypes: torch.dtype, text: str = "") -> When:
    """Return the condition that the first argument is a tensor on the last device, of a given dtype if any is."""
    words = text or ", ".join(filter(None, ("one device", " and ".join(map(name_of, dtypes)))))
    return first(words, lambda x: on(x, last(), *dtypes))


def last() -> int:
    """Return the index of the last device. A check of the first device alone misses a defect there."""
    return torch.cuda.device_count() - 1


def on(tensor: object, index: int, *dtypes: torch.dtype) -> bool:
    """Return whether `tensor` is a tensor on device `index` and of one of the dtypes, if any are given."""
    if not isinstance(tensor, torch.Tensor) or tensor.device != torch.device("cuda", index):
        return False
    return not dtypes or tensor.dtype in dtypes


def narrowed(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Clear the lowest `bits` bits of float32 numbers."""
    return (x.contiguous().view(torch.int32) >> bits << bits).view(torch.float32)


def hardware(*defects: Defect) -> AbstractContextManager[None]:
    """Give the simulated node hardware with these defects until the context exits.

    Raises:
        ValueError: on entry; no simulated node is active, or a real device backs it.
    """
    return planted(Hardware(defects, _MEMORY))


def unit(operations: Sequence[str], **parameters: Any) -> AbstractContextManager[None]:
    """Make some operators wrong on one device; see `mgpu_check.simulated.defects.implementations.Unit`."""
    return hardware(Unit({"seed": 0, "pattern": "bits", **parameters}, tuple(operations)))
