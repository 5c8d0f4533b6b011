"""Arithmetic with random rounding errors of a chosen size, to see which digits of a result it determines.

Monte Carlo arithmetic: D. S. Parker, *Monte Carlo Arithmetic*, UCLA CSD-970002, 1997.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_check.numerics.bounds import unit_roundoff

__all__ = ["Perturbed", "unfused"]

# Operators that subtract what nearly cancels before they give a result: taken apart, so that its parts are perturbed. On
# GPUs batches are normalized by cuDNN's or MIOpen's own.
_COMPOSED = get_decompositions(
    [
        torch.ops.aten._fused_rms_norm_backward,
        torch.ops.aten._log_softmax,
        torch.ops.aten._log_softmax_backward_data,
        torch.ops.aten._softmax,
        torch.ops.aten._softmax_backward_data,
        torch.ops.aten.batch_norm_backward,
        torch.ops.aten.cudnn_batch_norm_backward,
        torch.ops.aten.miopen_batch_norm_backward,
        torch.ops.aten.native_batch_norm_backward,
        torch.ops.aten.native_group_norm_backward,
        torch.ops.aten.native_layer_norm_backward,
    ]
)


class Perturbed(TorchDispatchMode):
    """Multiplies every floating-point result of an operator by 1 ± spread·u, each element with a random sign of its own.

    u is the unit roundoff of the dtype of the result; that of `stands_for` where it is float64, in which a narrower dtype
    is computed more exactly. On the CPU, and on simulated and real devices.

    Args:
        spread: in unit roundoffs; with the other sign, and the generator in the same state, in the other direction.
        generator: of the signs, on the CPU.
        stands_for: unit roundoff of the dtype that float64 stands for.
        counts: leave whole numbers alone that are small for float32: as counts they are exact.
        coherent: all signs are the same: where few operators round coarsely, random ones may well cancel.
    """

    def __init__(
        self,
        spread: float,
        generator: torch.Generator,
        stands_for: float,
        *,
        counts: bool = False,
        coherent: bool = False,
    ) -> None:
        super().__init__()
        self.spread, self.generator, self.stands_for = spread, generator, stands_for
        self.counts, self.coherent = counts, coherent
        simulated = sys.modules.get("mgpu_check.simulated.tensor")  # not imported where no tensor can be one
        self._raw: Callable[[torch.Tensor], torch.Tensor] = simulated.raw if simulated else lambda tensor: tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _COMPOSED:
            with self:
                return _COMPOSED[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        computes, written = _effects(func)
        made: list[Any] = []
        if computes:
            made += (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        if written:
            made += tree_leaves([args[index] for index in written if index < len(args)])
        for value in made:
            # Of a DTensor this rank's own part: operators on plain and distributed tensors together are refused.
            tensor = getattr(value, "_local_tensor", value)
            if isinstance(tensor, torch.Tensor):
                self._perturb(self._raw(tensor))  # what is computed here is no operator of the simulated device's
        return result

    def _perturb(self, tensor: torch.Tensor) -> None:
        """Multiply each element by a random factor near 1, in place."""
        if tensor.is_complex() and not tensor.is_conj():
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point() or tensor.device.type == "meta":
            return
        roundoff = self.stands_for if tensor.dtype == torch.float64 else unit_roundoff(tensor.dtype)
        size = self.spread * roundoff
        least = 1 if self.coherent else 0
        sign = torch.randint(least, 2, tensor.shape, generator=self.generator, dtype=torch.get_default_dtype())
        factor = sign.mul_(2 * size).add_(1 - size)
        if tensor.device != factor.device:
            factor = factor.to(tensor.device)
        if self.counts and tensor.element_size() > 2:
            whole = tensor == tensor.round()
            if bool(whole.any()):  # of most results none is
                factor = torch.where(whole & (tensor.abs() <= 0.25 / roundoff), 1, factor)
        tensor.mul_(factor)


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Switch off libraries for neural networks (cuDNN, MIOpen, oneDNN), whose recurrent networks are one operator for
    all steps.
    """
    libraries: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn]
    before = [library.enabled for library in libraries]
    for library in libraries:
        library.enabled = False
    try:
        yield
    finally:
        for library, value in zip(libraries, before, strict=True):
            library.enabled = value


@functools.cache
def _effects(func: Any) -> tuple[bool, tuple[int, ...]]:
    """Return whether an operator computes its results, and the indices of the arguments that it writes to instead.

    A result that aliases an argument without writing to it is a view: nothing was computed.
    """
    schema = func._schema
    computes = not any(part.alias_info is not None and not part.alias_info.is_write for part in schema.returns)
    if schema.returns:
        return computes, ()
    return computes, tuple(index for index, part in enumerate(schema.arguments) if _written(part))


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
