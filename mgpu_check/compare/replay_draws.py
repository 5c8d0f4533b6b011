"""Record the random numbers that a rank draws, and give one device the joint numbers of all ranks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.compare.joining import NotJoinedError, SampleRows
from mgpu_check.compare.tape import Tape, Tapes, Unstored, in_a_constructor, own_draw, place
from mgpu_check.torch_hooks.drawing import draws
from mgpu_check.torch_hooks.tensors import plain

_LARGEST = 2**24  # elements: a larger draw is data or a parameter
_FUSED = ("attention", "rnn", "lstm", "gru", "rrelu", "_fused_dropout", "alpha_dropout", "flash")
"""Parts of the names of operators whose results are no random numbers, but computed with them."""
_ALSO = ("aten::random_", "aten::binomial")  # operators that draw, but lack torch's tag


class Now(Protocol):
    """The progress of the script."""

    def active(self) -> bool:
        """Return whether calls count now."""

    def micro(self) -> int:
        """Return the number of the micro-batch."""


class _InterceptedDraws(TorchDispatchMode, abc.ABC):
    """Passes each draw of the script to `take`.

    Args:
        now: the progress of the script.
    """

    def __init__(self, now: Now) -> None:
        super().__init__()
        self.now = now
        self._drawing: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawing = self._drawing.get(func)
        if drawing is None:
            drawing = torch.Tag.nondeterministic_seeded in func.tags or func._schema.name in _ALSO
            self._drawing[func] = drawing
        if not drawing or not self.now.active() or own_draw() or not _counts(func, args, kwargs):
            return func(*args, **kwargs)
        return self.take(func, args, kwargs)

    @abc.abstractmethod
    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a draw: its own, which is recorded, or that of the ranks."""


def _counts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func._schema.name not in _ALSO and not draws(func, args, kwargs):
        return False
    given = args[0] if args else None
    if isinstance(given, nn.Parameter) or (isinstance(given, torch.Tensor) and given.is_meta):
        return False
    return not in_a_constructor()


def _name(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


def _numbers(func: Any, result: Any) -> Any:
    """Return the random numbers among the results of an operator; None if they are not among them."""
    if any(part in _name(func) for part in _FUSED):
        return None
    drawn = result[1] if _name(func) == "native_dropout" else result
    usable = isinstance(drawn, torch.Tensor) and not hasattr(drawn, "full_tensor") and drawn.layout is torch.strided
    return drawn if usable else None


class RecordedDraws(_InterceptedDraws):
    """Writes each draw of a rank to its tape."""

    def __init__(self, now: Now, tape: Tape) -> None:
        super().__init__(now)
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


class ReplayedDraws(_InterceptedDraws):
    """Gives one device the draws of the ranks, joined along the samples.

    Args:
        missing: called with the operator and the reason for each draw that could not be given.
    """

    def __init__(self, now: Now, tapes: Tapes, rows: SampleRows, missing: Callable[[str, str], None]) -> None:
        super().__init__(now)
        self._tapes, self._rows, self._missing = tapes, rows, missing

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._tapes.turn("draw", f"{_name(func)} {place()}", self.now.micro())
        result = func(*args, **kwargs)
        own = _numbers(func, result)
        try:
            value = joint_draw(_name(func), parts, own, self._rows)
        except NotJoinedError as error:
            self._missing(_name(func), str(error))
            return result
        if value.shape == own.shape:
            if _name(func) == "native_dropout":
                given, share = args[0], 1 - args[1]
                return given * value.to(given.device) * (1 / share if share else 0.0), own.copy_(value)
            return own.copy_(value) if func._schema.name.endswith("_") else result.copy_(value)
        if func._schema.name.endswith("_") or "out" in kwargs:
            self._missing(_name(func), f"ranks fill tensors of other shapes than {list(own.shape)}")
            return result
        return own.new_empty(value.shape).copy_(value)


def joint_draw(name: str, parts: Sequence[Any], own: Any, rows: SampleRows) -> torch.Tensor:
    """Return the numbers that one device gets, which draws `own` by itself.

    Raises:
        NotJoinedError: the numbers of the ranks cannot be joined.
    """
    if not parts:
        raise NotJoinedError("not every rank draws there")
    if (unstored := next((part for part in parts if isinstance(part, Unstored)), None)) is not None:
        raise NotJoinedError(unstored.why)
    first = parts[0]
    equal = all(torch.equal(part, first) for part in parts)
    if own.shape == first.shape and equal:
        return plain(first)
    if name == "randperm":
        if own.numel() != sum(part.numel() for part in parts):
            raise NotJoinedError("ranks have orders of their own")
        starts = [sum(part.numel() for part in parts[:rank]) for rank in range(len(parts))]
        return torch.cat([part + start for part, start in zip(parts, starts, strict=True)])
    if first.numel() == 1 and own.numel() == 1:
        raise NotJoinedError("it is one number for all samples, and another one on each rank")
    if (dimension := _dimension_of_samples(parts, own)) is not None:
        return torch.cat(list(parts), dimension)
    padded: list[str] = []
    joined = rows.join(parts, padded)
    if joined.shape[1:] != own.shape[1:] or own.shape[0] not in (joined.shape[0], first.shape[0]):
        raise NotJoinedError(f"ranks draw the shape {list(first.shape)}, and one device {list(own.shape)}")
    if not padded:
        return joined
    # One device pads the batches to one length: the ranks have no numbers for the rest.
    value, start = plain(own).clone().resize_(joined.shape), 0
    for part in parts:
        value[start : start + len(part)][tuple(slice(size) for size in part.shape)] = part
        start += len(part)
    return value


def _dimension_of_samples(parts: Sequence[torch.Tensor], own: torch.Tensor) -> int | None:
    """Return the only dimension along which the parts add up to the shape of `own`; None if it is the first."""
    if any(part.dim() != own.dim() for part in parts):
        return None
    sizes = [sum(some) for some in zip(*(part.shape for part in parts), strict=True)]
    found = [d for d in range(own.dim()) if sizes[d] == own.shape[d] and _elsewhere(own, d) == _elsewhere(parts[0], d)]
    same = len(found) == 1 and len({tuple(_elsewhere(part, found[0])) for part in parts}) == 1
    return found[0] if same and found[0] else None


def _elsewhere(tensor: torch.Tensor, dimension: int) -> list[int]:
    return [size for d, size in enumerate(tensor.shape) if d != dimension]
