"""Recognize the operators of torch that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch

_SWITCHES = ("p", "dropout", "dropout_p", "train", "training")
"""Arguments of operators that turn off the draw when they are 0 or False."""


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call of an operator uses random numbers; dropout with probability 0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _SWITCHES:
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if isinstance(given, (bool, int, float)) and not given:
                return False
    return True
