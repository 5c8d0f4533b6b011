"""Compute with random rounding errors of a chosen size, to see which digits of a result are determined.

Monte Carlo arithmetic: D. S. Parker, *Monte Carlo Arithmetic*, UCLA CSD-970002, 1997.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.torch_hooks.patches import entered, temporarily
from mgpu_check.torch_hooks.tensors import Argument, written_by

_FEW = 4096
"""Elements up to which every element gets its own random sign; larger tensors use a table, since drawing is slow."""
_AT_ONCE = 1 << 15
"""Elements of a larger tensor that are perturbed together. They fit several times into a processor's cache, and torch
does not divide them among threads, which would wait for each other most of the time.
"""
_TABLE = 1 << 20  # signs in the table: their factors take 4 MB in float32, and 8 MB in float64

# Operators that subtract nearly equal numbers internally: decomposed, so that their parts are perturbed. On GPUs, cuDNN
# and MIOpen normalize batches with operators of their own.
_COMPOSED = get_decompositions(
    [
        getattr(torch.ops.aten, name)
        for name in (
            *("_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_softmax"),
            *("_softmax_backward_data", "batch_norm_backward", "cudnn_batch_norm_backward"),
            *("miopen_batch_norm_backward", "native_batch_norm_backward", "native_group_norm_backward"),
            "native_layer_norm_backward",
        )
    ]
)

# Operators that only copy elements of their arguments bit for bit, or fill the result with one number.
_COPYING = {
    getattr(torch.ops.aten, name)
    for name in (
        *("cat", "clone", "copy_", "_foreach_copy_", "constant_pad_nd", "fill_", "flip", "full", "full_like", "gather"),
        *("index_select", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "relu", "relu_", "stack"),
        *("threshold_backward", "zero_", "zeros", "zeros_like"),
    )
}


class Perturbed(TorchDispatchMode):
    """Multiplies every floating-point result of an operator by 1 ± spread·u, with random signs.

    A gate or a measurement makes one for a perturbed run of a step, and enters it for that run with its backward pass.

    u is the unit roundoff of the result's dtype. For float64 results it is `stands_for`, because float64 computes a
    narrower dtype's step more exactly. The mode works on the CPU and on simulated and real devices. Large tensors take
    runs of a table of random signs, each from a random place: drawing every sign takes longer than the step itself.

    Args:
        spread: size in unit roundoffs. The opposite sign, with the generator in the same state, reverses the direction.
        generator: draws the signs, on the CPU.
        stands_for: unit roundoff of the dtype that float64 stands for.
        counts: leave small whole numbers alone, except in 16-bit dtypes: as counts they are exact.
        copies: also perturb copied and sent tensors. This takes most of the time in large models; copies do not round.
    """

    _decomposes = _in_place = True

    def __init__(
        self, spread: float, generator: torch.Generator, stands_for: float, *, counts: bool = False, copies: bool = True
    ) -> None:
        super().__init__()
        self.spread, self.generator, self.stands_for = spread, generator, stands_for
        self.counts, self.copies = counts, copies
        simulated = sys.modules.get("mgpu_check.simulated.tensor")  # not imported where no tensor can be one
        self._raw: Callable[[torch.Tensor], torch.Tensor] = simulated.raw if simulated else lambda tensor: tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._decomposes and func in _COMPOSED:
            with self:
                return _COMPOSED[func](*args, **(kwargs or {}))
        # The simulated node counts the references to operands, so no other function may pass them on.
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._after_collective(func, args)
        elif func.namespace == "_c10d_functional":
            self._after_collective(func, result)
        if not self._in_place and written_by(func):
            return result
        if func.overloadpacket is torch.ops.aten._to_copy:
            dtypes = [value.dtype for value in (result, args[0]) if isinstance(value, torch.Tensor)]
            if all(dtype.is_floating_point for dtype in dtypes) and dtypes[0].itemsize > dtypes[-1].itemsize:
                return result  # only the float64 run widens here; the dtype that it stands for does not
        spared = not self.copies and (func.overloadpacket in _COPYING or func.namespace == "c10d")
        computes, written = effects(func)
        results: list[Any] = []
        if computes:
            results += (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        if written:
            results += tree_leaves([args[index] for index, _ in written if index < len(args)])
        for value in results:
            # Perturb only the local part of a DTensor: torch refuses operators that mix plain and distributed tensors.
            tensor = getattr(value, "_local_tensor", value)
            if isinstance(tensor, torch.Tensor):
                # The raw tensor: the simulated device must not see the perturbation as one of its operators.
                self._perturb(self._raw(tensor), spared)
        return result

    def _after_collective(self, func: Any, written: Any) -> None:
        """Change the tensors that a collective has written to; see `steps.Dithered`."""

    def _perturb(self, tensor: torch.Tensor, spared: bool) -> None:
        """Multiply each element by a random factor near 1, in place.

        A spared tensor keeps its values but consumes the same draws, so that later signs do not depend on sparing.
        """
        if tensor.is_complex() and not tensor.is_conj():
            tensor = torch.view_as_real(tensor)
        # float8 has no arithmetic, and is a cast's rounding alone: see `steps.Dithered`.
        if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.device.type == "meta":
            return
        roundoff = self.stands_for if tensor.dtype == torch.float64 else unit_roundoff(tensor.dtype)
        size = self.spread * roundoff
        if tensor.numel() > _FEW:
            self._perturb_large(tensor, size, roundoff, spared)
            return
        sign = torch.randint(0, 2, tensor.shape, generator=self.generator, dtype=torch.get_default_dtype())
        if spared:
            return
        factor = sign.mul_(2 * size).add_(1 - size)
        if tensor.device != factor.device:
            factor = factor.to(tensor.device)
        if self.counts and tensor.element_size() > 2:
            integral = tensor == tensor.round()
            if bool(integral.any()):  # most results have no whole numbers
                factor = torch.where(integral & (tensor.abs() <= 0.25 / roundoff), 1, factor)
        tensor.mul_(factor)

    def _perturb_large(self, tensor: torch.Tensor, size: float, roundoff: float, spared: bool) -> None:
        # A GPU has no such cache limit: take longer runs.
        length = _AT_ONCE if tensor.device.type == "cpu" else _TABLE // 2
        pieces = -(-tensor.numel() // length)
        offsets = torch.randint(0, _TABLE - length + 1, (pieces,), generator=self.generator).tolist()
        if spared:
            return
        # Take the elements in the order of their indices, so that signs do not depend on the layout.
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
        table = _factors(size, flat.dtype, flat.device)
        counts = self.counts and flat.element_size() > 2
        scratch = torch.empty((2, min(length, flat.numel())), dtype=flat.dtype, device=flat.device) if counts else None
        for number, offset in enumerate(offsets):
            piece = flat[number * length : (number + 1) * length]
            factor = table[offset : offset + piece.numel()]
            if scratch is not None and _has_counts(piece, *scratch[:, : piece.numel()]):
                factor = torch.where((piece == piece.round()) & (piece.abs() <= 0.25 / roundoff), 1, factor)
            piece.mul_(factor)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


@functools.cache
def _signs() -> torch.Tensor:
    """Return a table of random booleans from a fixed seed; `Perturbed` draws the places that it reads from."""
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(_TABLE // 64, dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator)
    masks = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device="cpu")
    return (words.view(torch.uint8) & masks[:, None]).flatten() != 0


# A table is 4 or 8 MB, and making it takes as long as a small step: keep one per direction for each of two dtypes.
@functools.lru_cache(maxsize=4)
def _factors(size: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    up, down = torch.tensor([1 + size, 1 - size], dtype=dtype, device="cpu")
    return torch.where(_signs(), up, down).to(device)


def _has_counts(piece: torch.Tensor, size: torch.Tensor, integral: torch.Tensor) -> bool:
    """Return whether some element may be a nonzero whole number; `size` and `integral` are scratch.

    Zeros do not count, because a ReLU makes many. Arithmetic is used because comparing takes 20 times as long on a CPU.
    """
    torch.abs(piece, out=size)
    if float(size.amax()) < 1:
        return False
    torch.trunc(size, out=integral)
    size.sub_(integral)  # 0 if it is whole, and then the term below is 1 if it is 0
    size.add_(integral.neg_().add_(1).clamp_(min=0))
    return not float(size.amin()) > 0


def unfused() -> contextlib.AbstractContextManager[None]:
    """Switch off cuDNN, MIOpen and oneDNN, which run all steps of a recurrent network in one operator."""
    libraries: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn]
    switches = [(functools.partial(setattr, library, "enabled"), library.enabled) for library in libraries]
    return entered(*(temporarily(switch, False, before) for switch, before in switches))


@functools.cache
def effects(func: Any) -> tuple[bool, tuple[Argument, ...]]:
    """Return whether an operator computes its results, and the arguments that it writes to instead.

    A result that aliases an argument without writing to it is a view, so the operator computes nothing.
    """
    schema = func._schema
    views = [result for result in schema.returns if result.alias_info is not None and not result.alias_info.is_write]
    return not views, () if schema.returns else written_by(func)
