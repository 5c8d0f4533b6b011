"""The arguments of a gate: the fixture `ranks`, world sizes, counts and tolerances, the user's functions and where
they are defined.

`Program` holds the functions of a gate for steps, checks them and their options, and calls them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.numerics.placement import Placement, check_placement
from mgpu_check.processes.collective_records import relative
from mgpu_check.torch_hooks.nested import named_parameters


class RanksFixture(Protocol):
    """The part of the fixture `ranks` that a gate needs."""

    @property
    def size(self) -> int: ...

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on each of `size` ranks; return what they return, in rank order."""

    @property
    def _seeds_apart(self) -> bool:
        """True if ranks already have different hash seeds."""

    def _remark(self, line: str) -> None:
        """Add a line to the summary of the run, once."""

    def _not_seen(self, step: str, line: str) -> None:
        """Add to the summary of the run, and to the report of the test, what the pass of a step does not show."""

    @property
    def _at_once(self) -> int:
        """The number of calls that `_run_apart` can make at the same time."""

    def _run_apart(self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run ``fn(*args)`` for all `arguments` at once, each on a rank alone in its world; return results in order."""


def world_sizes_of(ranks: RanksFixture, world_sizes: Iterable[int] | None) -> list[int]:
    """Return the world sizes to compare with one rank, in ascending order, each once.

    `world_sizes`: the user's choice, each from 1 to `ranks.size`. None for the powers of two from 2 on, and
    `ranks.size`: these cover most code that works only for some sizes.
    """
    if world_sizes is None:
        if ranks.size < 2:
            raise ValueError(
                "ranks.size is 1, but a gate compares one rank with several; run pytest with --gpus=2 or more "
                "(--simulate where there are no devices)"
            )
        return sorted({ranks.size, *(2**k for k in range(1, ranks.size.bit_length()) if 2**k <= ranks.size)})
    if isinstance(world_sizes, str | bytes) or not isinstance(world_sizes, Iterable):
        raise ValueError(f"world_sizes is {world_sizes!r}; give several ints from 1 to {ranks.size}, such as [2]")
    sizes = list(world_sizes)
    invalid = [size for size in sizes if not is_count(size) or size > ranks.size]
    if invalid or not sizes:
        fault = f"has {', '.join(map(repr, invalid))}" if invalid else "is empty"
        raise ValueError(
            f"world_sizes {fault}; give ints from 1 to {ranks.size}, the number of devices of this run "
            "(more with --gpus=N)"
        )
    return sorted(set(sizes))


def sizes_of(function_name: str, sizes: int | Iterable[int] | None) -> list[int] | None:
    """Return batch sizes in ascending order, each once; None if the gate should choose them."""
    if sizes is None:
        return None
    several = isinstance(sizes, Iterable) and not isinstance(sizes, str | bytes)
    batch_sizes: list[Any] = list(sizes) if isinstance(sizes, Iterable) and several else [sizes]
    if not batch_sizes or not all(is_count(n) for n in batch_sizes):
        shown = batch_sizes if several else sizes
        raise ValueError(f"{function_name}: sizes={shown!r}; give an int of at least 1, or several, such as [8, 9]")
    return sorted({int(n) for n in batch_sizes})


def check_count(function_name: str, argument: str, value: object, hint: str = "") -> None:
    if not is_count(value):
        raise ValueError(f"{function_name}: {argument}={value!r}; give an int of at least 1{hint}")


def check_tolerance(function_name: str, tolerance: object, *, by_name: bool = True) -> None:
    """Raise a ValueError unless `tolerance` is None, a number from 0 to below 1, or (`by_name`) a mapping to such."""
    # A tolerance of 1 or more would accept any result.
    fractions = tolerance.values() if isinstance(tolerance, Mapping) and by_name else [tolerance]
    numbers = [value for value in fractions if isinstance(value, int | float) and not isinstance(value, bool)]
    if tolerance is not None and not (len(numbers) == len(fractions) and all(0 <= value < 1 for value in numbers)):
        raise ValueError(
            f"{function_name}: tolerance={tolerance!r}; give a fraction of the largest magnitude, from 0 to below 1, "
            f"for all tensors{' or by name' if by_name else ''}, or leave it out to have it measured"
        )


def check_quantizers(function_name: str, quantizers: Any) -> tuple[Callable[..., Any], ...]:
    """Return the quantizers; raise a ValueError unless they are several functions."""
    functions = list(quantizers) if isinstance(quantizers, Iterable) else [quantizers]
    if not isinstance(quantizers, Iterable) or not all(inspect.isfunction(function) for function in functions):
        raise ValueError(f"{function_name}: quantizers={quantizers!r}; give functions, such as [recipes.nvfp4]")
    return tuple(functions)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@contextlib.contextmanager
def noting(doing: str) -> Iterator[None]:
    """Add a note to errors of ranks that says what the gate was checking: "world size 2, steps 3 to 6"."""
    try:
        yield
    except (RankFailure, RankHang) as error:
        # A note, because the engine rewrites the message when ranks explain their assertions.
        error.add_note(f"while checking {doing}")
        raise


def definition_of(step: Callable[..., Any]) -> str:
    inner = inspect.unwrap(innermost(step))
    code = getattr(inner, "__code__", None)
    if code is not None:
        return f"{relative(code.co_filename)}:{code.co_firstlineno}"
    cls = inner if isinstance(inner, type) else type(inner)
    try:
        return f"{relative(inspect.getsourcefile(cls) or '')}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):  # made without a file
        return ""


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def innermost(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or class that a partial wraps, or the callable itself."""
    while isinstance(step, functools.partial):
        step = step.func
    return step


class Unusable(ValueError):
    """A function or batch of the user does not meet the needs of the gate."""


def raise_unusable(gate: str, failure: Exception) -> None:
    """Raise a ValueError if a rank failed because the user's functions cannot be used."""
    if isinstance(failure.__cause__, Unusable):
        raise ValueError(f"{gate}: {failure.__cause__}") from None


@contextlib.contextmanager
def naming_unusable(gate: str) -> Iterator[None]:
    """Let the failure of a rank be a ValueError if the user's functions cannot be used; see `raise_unusable`."""
    try:
        yield
    except RankFailure as failure:
        raise_unusable(gate, failure)
        raise


@dataclass(frozen=True)
class Program:
    """The functions and options of the user.

    A gate makes one and checks it with `check_arguments`. It travels to the ranks with each case, and is never changed.
    """

    step: Callable[..., Any]  # ``step(model, batch, rank)``; or a class that is called with (model, rank) first
    build: Callable[[], Any]
    batch: Callable[[int], Any] | None  # ``batch(n)``; None if batches are drawn from a strategy
    reference: Callable[..., Any] | None = None  # ``reference(model, batch)`` on one device, or None
    single_process: bool = False  # whether one process drives all devices, as with nn.DataParallel
    gate: str = "assert_step_scales"  # the gate that the user called, for messages
    placement: Placement = None  # the slices of parameters that ranks hold; see `numerics.placement.by_user`
    # The ranks whose returned values count: "last", or a function of coordinates in the mesh; None for all.
    returned_by: Callable[[Mapping[str, int]], bool] | str | None = None
    quantizers: tuple[Callable[..., Any], ...] = ()  # functions that round to a format without a dtype


def bound(step: Callable[..., Any], model: Any, rank: Rank) -> Callable[[Any], Any]:
    """Return a function to call for each batch; a class, or a partial of one, is called with (model, rank) first."""
    instance = step(model, rank) if is_class(step) else step
    return lambda batch: instance(model, batch, rank)


def bound_reference(reference: Callable[..., Any], model: Any, world_size: int) -> Callable[[Any], Any]:
    """Return a function to call for each batch. It passes the world size to a reference with that parameter."""
    options = {"world_size": world_size} if wants_world_size(reference) else {}
    instance = reference(model) if is_class(reference) else reference
    return lambda batch: instance(model, batch, **options)


def wants_world_size(reference: Callable[..., Any] | None) -> bool:
    if reference is None:
        return False
    called = reference
    if is_class(reference):
        called = inspect.getattr_static(innermost(reference), "__call__")  # a base class may define it
    return "world_size" in inspect.signature(called).parameters


def is_class(step: Callable[..., Any]) -> bool:
    """Return whether `step` is a class, or a partial of a class, whose instance is called for each batch."""
    return isinstance(innermost(step), type)


def name_of(step: Callable[..., Any]) -> str:
    """Return the name for reports of a step, or of what a partial wraps: its `__name__`, or else that of its class."""
    inner = innermost(step)
    return str(getattr(inner, "__name__", type(inner).__name__))


def modules_of(model: Any) -> dict[str, nn.Module]:
    several = model if isinstance(model, Mapping) else dict(enumerate(model)) if isinstance(model, list | tuple) else {}
    modules = {f"{key}.": module for key, module in several.items() if isinstance(module, nn.Module)}
    if isinstance(model, nn.Module):
        modules = {"": model}
    if not modules:
        raise Unusable(f"build() returned {type(model).__name__}; return an nn.Module, or a tuple or mapping of them")
    for prefix, module in modules.items():
        for name, parameter in named_parameters(module):
            if parameter.is_meta:
                raise Unusable(f"build() returned a model with {prefix}{name} on meta; give its parameters values")
    return modules


_AS_IN = {
    "step": "step(model, batch, rank)",
    "build": "build() that makes the model",
    "batch": "batch(n) that makes n samples, or a strategy of batches",
    "reference": "reference(model, batch)",
}


def check_arguments(
    program: Program, observe: Collection[str], tolerance: float | Mapping[str, float] | None, max_examples: int | None
) -> None:
    gate = program.gate
    for name, example in _AS_IN.items():
        value = getattr(program, name)
        if value is not None and (not callable(value) or isinstance(value, nn.Module)):
            raise ValueError(f"{gate}: {name}={value!r:.80} is not a function; give a function, as in {example}")
    if isinstance(observe, str) or not isinstance(observe, Collection) or not set(observe) or set(observe) - set(KINDS):
        raise ValueError(f"{gate}: observe={observe!r}; choose some of {', '.join(KINDS)}")
    check_tolerance(gate, tolerance)
    check_placement(gate, program.placement)
    if program.returned_by not in (None, "last") and not callable(program.returned_by):
        raise ValueError(
            f'{gate}: returned_by={program.returned_by!r}; give "last", or a function of the coordinates of a rank'
        )
    if max_examples is not None and (type(max_examples) is not int or max_examples < 1):
        raise ValueError(f"{gate}: max_examples={max_examples!r}; give an integer of at least 1")
