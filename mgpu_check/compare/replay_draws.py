"""Record the random numbers that a rank draws in the graph of a loss, and give one device those of all ranks.

Numbers that enter a graph as tensors, such as noise, are data from outside: see `replay_outside`. Dropout and similar
operators draw within the graph.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.compare.joining import NotJoinedError
from mgpu_check.compare.replay_outside import Now, OutsideData, ReplayedData
from mgpu_check.compare.tape import Tape, Tapes, Unstored, place
from mgpu_check.simulated.tensor import tensors_in
from mgpu_check.torch_hooks.tensors import draws

_LARGEST = 2**24  # elements of a draw that is recorded
_FUSED = ("attention", "rnn", "lstm", "gru", "rrelu", "_fused_dropout", "alpha_dropout", "flash")
"""Parts of the names of operators whose results are no random numbers, but computed with them."""
_ALSO = ("aten::random_", "aten::binomial")  # operators that draw, but lack torch's tag


class InterceptedDraws(TorchDispatchMode, abc.ABC):
    """Passes the draws in a graph to `take`, and other operators to `outside`.

    Args:
        now: the progress of the script.
    """

    def __init__(self, now: Now, outside: OutsideData) -> None:
        super().__init__()
        self.now, self.outside = now, outside
        self._drawing: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawing = self._drawing.get(func)
        if drawing is None:
            drawing = torch.Tag.nondeterministic_seeded in func.tags or func._schema.name in _ALSO
            self._drawing[func] = drawing
        if not self.now.active():
            return func(*args, **kwargs)
        if drawing and (func._schema.name in _ALSO or draws(func, args, kwargs)):
            graph = not _name(func).endswith("_like") and any(one.grad_fn is not None for one in tensors_in(args))
            result = self.take(func, args, kwargs) if graph else func(*args, **kwargs)
            self.outside.origins.set(tensors_in([result]), None)
            return result
        divided = any(hasattr(kind, "full_tensor") for kind in types)  # such models are not replayed
        follows = self.now.follows() and not divided
        if not follows:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # a class of the user may override what is read here
            return self.outside.run(func, args, kwargs)

    @abc.abstractmethod
    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a draw: its own, which is recorded, or that of the ranks."""


def _name(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


def _numbers(func: Any, result: Any) -> Any:
    """Return the random numbers among the results of an operator; None if they are not among them."""
    if any(part in _name(func) for part in _FUSED):
        return None
    drawn = result[1] if _name(func) == "native_dropout" else result
    usable = isinstance(drawn, torch.Tensor) and not hasattr(drawn, "full_tensor") and drawn.layout is torch.strided
    return drawn if usable else None


class RecordedDraws(InterceptedDraws):
    """Writes each draw of a rank to its tape."""

    def __init__(self, now: Now, tape: Tape, outside: OutsideData) -> None:
        super().__init__(now, outside)
        self._tape = tape

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        drawn = _numbers(func, result)
        if drawn is None:
            value: Any = Unstored("the operator does not return its random numbers")
        else:
            value = drawn if drawn.numel() <= _LARGEST else Unstored(f"it has {drawn.numel()} elements")
        self._tape.put("draw", f"{_name(func)} {place()} {self.now.micro()}", value)
        return result


class ReplayedDraws(InterceptedDraws):
    """Gives one device the draws of the ranks, joined along the samples.

    Args:
        missing: called with the operator and the reason for each draw that could not be given.
    """

    outside: ReplayedData

    def __init__(self, now: Now, tapes: Tapes, missing: Callable[[str, str], None], outside: ReplayedData) -> None:
        super().__init__(now, outside)
        self._tapes, self._missing = tapes, missing

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._tapes.turn("draw", f"{_name(func)} {place()}", self.now.micro())
        result = func(*args, **kwargs)
        own = _numbers(func, result)
        guesses: list[str] = []
        try:
            if not parts:
                raise NotJoinedError("not every rank draws there")
            if unstored := [part for part in parts if isinstance(part, Unstored)]:
                raise NotJoinedError(unstored[0].why)
            value = self.outside.joint(own, parts, guesses)
            if value is not None and value.shape != own.shape:
                raise NotJoinedError(f"ranks draw the shape {list(parts[0].shape)}, and one device {list(own.shape)}")
        except NotJoinedError as error:
            self._missing(_name(func), str(error))
            return result
        for guess in guesses:
            self._missing(_name(func), guess)
        if value is None:
            return result
        if _name(func) == "native_dropout":
            data, share = args[0], 1 - args[1]
            return data * value.to(data.device) * (1 / share if share else 0.0), own.copy_(value)
        return own.copy_(value)
