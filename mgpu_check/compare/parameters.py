"""Record, in the script's process, the parameters of its optimizers: their numbers in the trace, and their groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mgpu_check.compare.naming import Names
from mgpu_check.compare.placing import Placing, TracePart
from mgpu_check.compare.summaries import Numbers, over, summaries
from mgpu_check.compare.trace import Writer
from mgpu_check.torch_hooks.tensors import is_distributed, name_of, readable


class NumberedPart(NamedTuple):
    """A part of a parameter, with its number in the trace."""

    number: int
    parameter: torch.Tensor
    part: TracePart


def numbers_of(parts: Sequence[NumberedPart]) -> dict[int, Numbers]:
    """Return the summary of each part that has numbers, by its number in the trace."""
    found = summaries([one.parameter for one in parts], [one.part.cut for one in parts])
    return {one.number: numbers for one, numbers in zip(parts, found, strict=True) if numbers is not None}


class Parameters:
    """The known parameters, each recorded in the trace on first use."""

    def __init__(self, writer: Writer, names: Names) -> None:
        self.placing = Placing(names, None)
        self._writer, self._names = writer, names
        self._number = 0
        self._parts: dict[int, list[NumberedPart]] = {}  # by the id of a parameter
        self._held: list[torch.Tensor] = []  # keeps objects alive whose ids are keys
        self._groups: dict[int, list[dict[str, Any]]] = {}
        self._unread: set[str] = set()

    def parts(self, optimizer: Any, number: int) -> list[NumberedPart]:
        """Return the parts of an optimizer's parameters.

        Args:
            number: the number of the optimizer.
        """
        fresh: dict[int, tuple[torch.Tensor, str]] = {}
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if id(parameter) not in self._parts:
                    fresh[id(parameter)] = parameter, f"optimizer{number}.group{g}.parameter{p}"
        if fresh:
            self._names.look_around()
        for (parameter, _), parts in zip(fresh.values(), self.placing.parts(list(fresh.values())), strict=True):
            self._held.append(parameter)
            self._parts[id(parameter)] = [self._numbered(parameter, part) for part in parts]
        if fresh:
            self._names.look_around()  # releases the references to all modules
        return [one for parameter in parameters_of(optimizer) for one in self._parts[id(parameter)]]

    def _numbered(self, parameter: torch.Tensor, part: TracePart) -> NumberedPart:
        self._writer.write(
            "parameter",
            name=part.label,
            order=part.order,
            shape=part.shape,
            dtype=name_of(parameter.dtype),
            device=str(parameter.device),
            sharded=is_distributed(parameter),
            held=None if part.cut is None or part.cut.is_whole else dataclasses.asdict(part.cut.held),
            unplaced=part.unplaced,
            same_elsewhere=part.same_elsewhere,
            over=over(parameter),
        )
        if readable(parameter) is None:
            self.note_unread(part.label, "", parameter)
        self._number += 1
        return NumberedPart(self._number - 1, parameter, part)

    def note_unread(self, name: str, of: str, value: object) -> None:
        """Record a tensor or state whose values cannot be read.

        Args:
            of: the parameter that has the state; "" for a parameter or a gradient.
        """
        if name not in self._unread:
            self._unread.add(name)
            self._writer.write("unread", after=0, name=name, of=of, type=type(value).__name__)

    def note_groups(self, optimizer: Any, number: int) -> None:
        """Record learning rates and other options of each group, if any has changed since the last step."""
        groups = [
            {
                "options": {key: _plain(value) for key, value in group.items() if _is_plain(key, value)},
                "members": [one.number for parameter in group["params"] for one in self._parts[id(parameter)]],
            }
            for group in optimizer.param_groups
        ]
        if self._groups.get(number) != groups:
            self._groups[number] = groups
            self._writer.write("groups", optimizer=number, rule=type(optimizer).__name__, groups=groups)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_OF_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable", "params", "initial_lr")
"""Options that choose an implementation, or that no step reads."""


def _is_plain(key: str, value: object) -> bool:
    numbers = value if isinstance(value, (tuple, list)) else [value]
    kinds = bool, int, float, str, type(None)
    return key not in _OF_IMPLEMENTATIONS and all(
        isinstance(one, kinds) or (isinstance(one, torch.Tensor) and one.numel() == 1) for one in numbers
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, torch.Tensor) else value
