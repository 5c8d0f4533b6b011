"""The functions of a step that round to a format without a dtype of torch, such as FP4 in float32.

Rounding to bfloat16 or float8 shows in the dtypes of results. A function that quantizes and dequantizes shows only its
own name, which the user gives. Its rounding errors are then measured as they are, whatever its format, blocks and
scales: for the exact run the function returns its argument, and for samples of the error it errs to the other side at
random elements.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_check.gates.gate_arguments import Unusable
from mgpu_check.torch_hooks.patches import replaced

Rounding = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the result for an argument of a quantizer, and what the quantizer makes of it."""


def as_rounded(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return what the quantizer made."""
    return rounded


def as_argument(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return the argument. The quantizer ran, so that it has drawn its random numbers."""
    return values


def mirrored(generator: torch.Generator, values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return the rounded values, of which half err to the other side by as much."""
    error = (rounded - values).detach()
    flips = torch.randint(0, 2, values.shape, generator=generator).to(error.device, error.dtype)
    return rounded - 2 * flips * error


class Quantized(contextlib.ExitStack):
    """A context in which quantizers of the names "module:function" round as `rounding` says.

    Each run of a measurement enters one. Raises `Unusable` for a name that does not exist, and for a function that does
    not return its first argument in the same shape.
    """

    def __init__(self, names: Sequence[str], rounding: Rounding = as_rounded) -> None:
        super().__init__()
        self._names, self._rounding = names, rounding
        self._calls: Counter[str] = Counter()

    def __enter__(self) -> Quantized:
        super().__enter__()
        for name in self._names:
            module, _, path = name.partition(":")
            try:
                *owners, last = path.split(".")
                owner = functools.reduce(getattr, owners, importlib.import_module(module))
                quantizer = getattr(owner, last)
            except (ImportError, AttributeError, ValueError) as error:
                self.close()
                raise Unusable(
                    f"quantizers has {name!r}, which is not found: {error}; give names as 'package.module:function'"
                ) from None
            self.enter_context(replaced(owner, last, self._around(name, quantizer)))
        return self

    def _around(self, name: str, quantizer: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(quantizer)
        def quantize(*args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            rounded = quantizer(*args, **kwargs)
            values = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if values is None or not isinstance(rounded, torch.Tensor) or rounded.shape != values.shape:
                raise Unusable(
                    f"quantizers has {name!r}, whose result has not the shape of its first tensor; give a function "
                    "that quantizes and dequantizes"
                )
            return self._rounding(values.to(rounded.dtype), rounded)

        return quantize

    def check(self) -> None:
        """Raise `Unusable` if some quantizer was not called inside the context."""
        if idle := [name for name in self._names if not self._calls[name]]:
            raise Unusable(
                f"quantizers has {', '.join(map(repr, idle))}, which the step did not call by that name; name the "
                "module that looks it up"
            )
