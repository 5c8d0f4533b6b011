"""Modes under which a step is measured: random numbers as in float32, and which narrow dtypes it computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["DrawsOfFloat32", "Notes", "entered"]

_aten = torch.ops.aten
_FACTORIES = {_aten.randn, _aten.rand, _aten.normal, _aten.randn_like, _aten.rand_like}
_IN_PLACE = {
    _aten.normal_,
    _aten.uniform_,
    _aten.bernoulli_,
    _aten.exponential_,
    _aten.cauchy_,
    _aten.log_normal_,
    _aten.geometric_,
}

_SWITCHES = ("p", "dropout", "dropout_p", "train", "training")
"""Arguments of operators that draw nothing where one of them is 0 or False."""


class DrawsOfFloat32(TorchDispatchMode):
    """Random float64 numbers are those that float32 code draws from the same seed, widened."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet in _IN_PLACE and args[0].dtype == torch.float64:
            drawn = torch.empty_like(args[0], dtype=torch.float32)
            func(drawn, *args[1:], **kwargs)
            return args[0].copy_(drawn)
        if packet in _FACTORIES and self._of_float64(args, kwargs):
            drawn = func(*args, **kwargs | {"dtype": torch.float32})
            return drawn.double()
        return func(*args, **kwargs)

    @staticmethod
    def _of_float64(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (dtype := kwargs.get("dtype")) is not None:
            return bool(dtype == torch.float64)
        like = args[0] if args else None
        return (like.dtype if isinstance(like, torch.Tensor) else torch.get_default_dtype()) == torch.float64


class Notes(TorchDispatchMode):
    """Notes in which floating-point dtypes narrower than float32 operators give results, and which draw at random.

    Attributes:
        seen: the dtypes.
        drawn: the shapes in which random numbers were drawn, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()
        self.drawn: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs or {}):
            shape = getattr(result[0] if isinstance(result, tuple) else result, "shape", ())
            self.drawn.append(tuple(shape))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.element_size() < 4:
                self.seen.add(leaf.dtype)
        return result


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator depends on random numbers: dropout with a probability of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _SWITCHES:
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if given is not None and not given:
                return False
    return True


@contextlib.contextmanager
def entered(*modes: TorchDispatchMode) -> Iterator[None]:
    """All of the modes, the last one innermost."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield
