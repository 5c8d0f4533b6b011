"""Dispatch modes for measuring a step: draw random numbers as in float32, and note dtypes and draws."""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mgpu_check.torch_hooks.patches import entered, replaced
from mgpu_check.torch_hooks.tensors import FLOAT8, draws, local_part, name_of, plain, written_by

_aten = torch.ops.aten
_FACTORIES = {_aten.randn, _aten.rand, _aten.normal, _aten.randn_like, _aten.rand_like}
_FILLING = {
    *(_aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.exponential_),
    *(_aten.cauchy_, _aten.log_normal_, _aten.geometric_, _aten.random_),
}
_ROUNDING = {getattr(_aten, name) for name in ("round", "round_", "bucketize", "searchsorted")}
_FROM_NOTHING = (_FACTORIES - {_aten.randn_like, _aten.rand_like}) | _FILLING | {_aten.randperm, _aten.randint}


class DrawsOfFloat32(TorchDispatchMode):
    """Makes float64 code draw the random numbers that float32 code draws from the same seed, widened.

    A run in float64 enters one while it makes a step that is a class; measurements enter others around the steps.
    """

    # The dtype decides how many random bits an operator takes, and their order. This holds for normal numbers on a CPU
    # (pytorch/pytorch#79703; float64 takes `random64`: ATen/core/DistributionsHelper.h, torch 2.13) as for the dropout
    # mask on a GPU.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in _FILLING and args[0].dtype == torch.float64:
            drawn = torch.empty_like(args[0], dtype=torch.float32)
            func(drawn, *map(_narrow, args[1:]), **kwargs)
            return args[0].copy_(drawn)
        if packet in _FACTORIES and self._of_float64(args, kwargs):
            drawn = func(*args, **kwargs | {"dtype": torch.float32})
            return drawn.double()
        if packet is _aten.native_dropout and args[0].dtype == torch.float64:
            probability, mask = args[1], func(_narrow(args[0]), *args[1:])[1]
            return args[0] * mask * (0.0 if probability == 1 else 1 / (1 - probability)), mask
        return self._narrowed(func, args, kwargs)

    @staticmethod
    def _of_float64(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (dtype := kwargs.get("dtype")) is not None:
            return bool(dtype == torch.float64)
        like = args[0] if args else None
        return (like.dtype if isinstance(like, torch.Tensor) else torch.get_default_dtype()) == torch.float64

    @staticmethod
    def _narrowed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run any other operator on what it is given in float32, and widen its results."""
        inputs = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in inputs):
            return func(*args, **kwargs)
        narrow_args, narrow_kwargs = tree_map(_narrow, (args, kwargs))
        result = func(*narrow_args, **narrow_kwargs)
        positions = [position for position, _ in written_by(func) if position < len(args)]
        own = {id(narrow_args[i]): args[i].copy_(narrow_args[i]) for i in positions}
        return tree_map(lambda leaf: own.get(id(leaf), leaf.double() if _is_float32(leaf) else leaf), result)


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


class _Redrawing(TorchDispatchMode):
    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for _ in range(self._times if draws(func, args, kwargs or {}) else 0):
            func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def redrawing(times: int) -> contextlib.AbstractContextManager[None]:
    """Give the code other random numbers from the same seeds: discard the first `times` draws of each draw."""
    seed = random.Random.seed

    def reseeded(generator: random.Random, *args: Any, **kwargs: Any) -> None:
        seed(generator, *args, **kwargs)
        for _ in range(times):  # Python's generators discard them after each seed
            generator.random()

    # `random.seed` is a method bound to the module's own generator when it was imported (Lib/random.py, `seed =
    # _inst.seed`, Python 3.11), so it has its own patch. Typeshed describes it as a function.
    of_module = functools.partial(reseeded, random.seed.__self__)  # type: ignore[attr-defined]
    return entered(replaced(random.Random, "seed", reseeded), replaced(random, "seed", of_module), _Redrawing(times))


class Notes(TorchDispatchMode):
    """Notes the dtypes narrower than float32 that operators return, and the operators that draw at random.

    A measurement or a trace makes one, enters it around a run, and reads the attributes afterwards.

    Attributes:
        seen: the dtypes.
        drawn: the shapes of the random draws, in order.
        drew: the operators that drew them.
        rounded: the operators that rounded to whole numbers or to a table, as quantizers do.
        fused: whether one operator ran all steps of a recurrent network.
        numbers: the sum of each draw, if requested; None for a draw that depends on more than the generator.
        casts: the elements that were cast to each dtype of float8, and of them those that became 0 and those that are
            larger than its largest number, if `numbers` are requested.
    """

    def __init__(self, *, numbers: bool = False) -> None:
        super().__init__()
        self._sums = numbers
        self.numbers: list[float | None] = []
        self.casts: dict[str, tuple[int, int, int]] = {}
        self.seen: set[torch.dtype] = set()
        self.drawn: list[tuple[int, ...]] = []
        self.drew: list[str] = []
        self.rounded: set[str] = set()
        self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.fused |= "_rnn" in func._schema.name
        if func.overloadpacket in _ROUNDING or "fake_quantize" in func._schema.name:
            self.rounded.add(func._schema.name.removeprefix("aten::"))
        if draws(func, args, kwargs or {}):
            shape = getattr(result[0] if isinstance(result, tuple) else result, "shape", ())
            self.drawn.append(tuple(shape))
            self.drew.append(func._schema.name)
            if self._sums:
                self.numbers.append(_sum(result) if _by_generator_alone(func, args) else None)
        if self._sums and func.overloadpacket is _aten._to_copy and result.dtype in FLOAT8:
            before, after = local_part(args[0]).float(), local_part(result).float()
            lost = int(((before != 0) & (after == 0)).sum())
            beyond = int((before.abs() > torch.finfo(result.dtype).max).sum())
            cast, earlier_lost, earlier_beyond = self.casts.get(name_of(result.dtype), (0, 0, 0))
            self.casts[name_of(result.dtype)] = cast + after.numel(), earlier_lost + lost, earlier_beyond + beyond
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.element_size() < 4:
                self.seen.add(leaf.dtype)
        return result


def _by_generator_alone(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the draw of an operator depends only on the generator, not on its tensor arguments."""
    packet = func.overloadpacket
    inputs = args[1:] if packet in _FILLING else args
    return packet in _FROM_NOTHING and not any(isinstance(value, torch.Tensor) for value in inputs)


def _sum(drawn: Any) -> float | None:
    if not isinstance(drawn, torch.Tensor) or drawn.is_complex():
        return None
    local = drawn.to_local() if hasattr(drawn, "to_local") else drawn
    return float(plain(local).double().sum())
