"""The functions of a step that round to a format without a dtype of torch, such as FP4 in float32.

Rounding to bfloat16 or float8 shows in the dtypes of results. A function that quantizes and dequantizes shows in none,
so the user gives it. Its rounding errors are then measured, for any format, blocks and scales. In the exact run the
function returns its argument. In samples of the error, random elements err to the other side.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mgpu_check.gates.gate_arguments import Unusable, name_of

Rounding = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the result for an argument of a quantizer, and what the quantizer makes of it."""


def as_rounded(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return what the quantizer made."""
    return rounded


def as_argument(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return the argument. The quantizer ran, so that it has drawn its random numbers."""
    return values


def mirrored(generator: torch.Generator, values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return the rounded values. Half of them, at random, err to the other side by as much."""
    error = (rounded - values).detach()
    flips = torch.randint(0, 2, values.shape, generator=generator).to(error.device, error.dtype)
    return rounded - 2 * flips * error


class Quantized(contextlib.ExitStack):
    """A context that lets the quantizers of a program round as `rounding` says.

    Each run of a measurement enters one. A call raises `Unusable` if it does not return its first tensor in the same
    shape.
    """

    def __init__(
        self,
        quantizers: Sequence[Callable[..., Any]],
        rounding: Rounding = as_rounded,
        redrawn: torch.Generator | None = None,
    ) -> None:
        """`redrawn`: draws other seeds for the quantizers that round at random; None to leave their numbers alone."""
        super().__init__()
        self._quantizers, self._rounding, self._redrawn = quantizers, rounding, redrawn
        self._called: set[Callable[..., Any]] = set()

    def __enter__(self) -> Quantized:
        super().__enter__()
        for quantizer in self._quantizers:
            self.enter_context(_replaced_everywhere(quantizer, self._around(quantizer)))
        return self

    def _around(self, quantizer: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(quantizer)
        def quantize(*args: Any, **kwargs: Any) -> Any:
            self._called.add(quantizer)
            rounded = self._rounded(functools.partial(quantizer, *args, **kwargs))
            values = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if values is None or not isinstance(rounded, torch.Tensor) or rounded.shape != values.shape:
                raise Unusable(
                    f"quantizers has {name_of(quantizer)}, whose result has not the shape of its first tensor; give a "
                    "function that quantizes and dequantizes"
                )
            return self._rounding(values.to(rounded.dtype), rounded)

        return quantize

    def _rounded(self, call: Callable[[], Any]) -> Any:
        """Return the result of a quantizer, with other random numbers if it draws some and they are to be redrawn."""
        if self._redrawn is None:
            return call()
        before = _random_states()
        rounded = call()
        if all(map(torch.equal, before, _random_states())):
            return rounded
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # later draws of the step do not change
            torch.manual_seed(int(torch.randint(1 << 31, (), generator=self._redrawn)))
            return call()

    def check(self) -> None:
        """Raise `Unusable` if some quantizer was not called inside the context."""
        if idle := [name_of(quantizer) for quantizer in self._quantizers if quantizer not in self._called]:
            raise Unusable(
                f"quantizers has {', '.join(idle)}, which the step did not call through a module, a dictionary or an "
                "attribute of an object; give the function that it calls so"
            )


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


@contextlib.contextmanager
def _replaced_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in all modules, and in other dictionaries: tables, objects, globals of functions by value."""
    modules = [vars(module) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    others = [holder for holder in gc.get_referrers(old) if type(holder) is dict]
    places = {
        (id(holder), key): holder
        for holder in (*modules, *others)
        for key, value in list(holder.items())
        if value is old and holder is not new.__dict__  # `functools.wraps` keeps the function there
    }
    for (_, key), holder in places.items():
        holder[key] = new
    try:
        yield
    finally:
        for (_, key), holder in places.items():
            if holder.get(key) is new:
                holder[key] = old
