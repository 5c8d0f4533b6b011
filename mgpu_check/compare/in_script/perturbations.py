"""Change values in the script's process, to measure rounding, or to tell the elements of a tensor apart.

Results are perturbed by a few unit roundoffs, to measure how fast rounding errors grow. This is Monte Carlo arithmetic,
as in :mod:`mgpu_check.numerics.steps`, applied to modules. Each element of the result of each innermost module, and of
each gradient, is multiplied by 1 ± size with a random sign. Several ranks sum the same numbers in another order, which
changes results by a similar amount.

The elements of constant tensors are made distinct, so that the values of a slice show its place: biases of zeros and
norms of ones have the same values everywhere. A run with distinct values finds the slices of such tensors; its training
is not compared. One device and all ranks move tensors of the same shape by the same values.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from mgpu_check.numerics.placement import make_distinct
from mgpu_check.numerics.steps import is_narrow
from mgpu_check.torch_hooks.patches import Patches, around, replaced
from mgpu_check.torch_hooks.tensors import PACKAGES, is_distributed

_ROUNDOFFS = 4.0  # a sum over a batch has a larger error than a single rounding


class Perturbation:
    """Perturbs with signs from its own generator, so that the script's random numbers do not change.
    `recorder.install` makes it for a run that is moved by roundoffs. `ScriptRecorder` calls it after each innermost
    module and before each step."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def output(self, value: Any) -> Any:
        """Return a module's result with its tensors perturbed, also in lists, tuples and dicts."""
        if isinstance(value, torch.Tensor):
            if not _is_moved(value):
                return value
            if value.is_complex():
                real_pairs = torch.view_as_real(value.resolve_conj())
                return torch.view_as_complex(real_pairs * self._factors(real_pairs))
            if is_narrow(value.dtype):
                return self._rounded_otherwise(value)
            return value * self._factors(value)
        if type(value) in (list, tuple):
            return type(value)(self.output(entry) for entry in value)
        if type(value) is dict:
            return {key: self.output(entry) for key, entry in value.items()}
        return value

    def gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Perturb each gradient in place."""
        for gradient in gradients:
            local: Any = gradient
            local = local.to_local() if is_distributed(local) else local
            if local is not None and _is_moved(local):
                if local.is_complex():
                    # A lazily conjugated tensor: perturb the stored values.
                    local = torch.view_as_real(local.conj() if local.is_conj() else local)
                local.mul_(self._factors(local))

    def _rounded_otherwise(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value. About every third element is moved by one unit in the last place.

        A module sums in float32, and rounds once to a narrower dtype. Two such roundings differ by 0.4 units, as a root
        mean square; this moves by 0.5.
        """
        moves = 2 * torch.rand(value.shape, generator=self._generator, dtype=torch.float32, device="cpu") - 1
        return (value.float() * (1 + torch.finfo(value.dtype).eps / 2 * moves.to(value.device))).to(value.dtype)

    def _factors(self, like: torch.Tensor) -> torch.Tensor:
        # In the dtype itself, which represents 1 ± 4u exactly.
        size = _ROUNDOFFS * torch.finfo(like.dtype).eps / 2
        signs = torch.randint(0, 2, like.shape, generator=self._generator, dtype=torch.int8, device="cpu")
        return (1 + size * (2 * signs.to(like.dtype) - 1)).to(like.device)


def _is_moved(value: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be read; a product of a user's class may be of another kind."""
    rounds = (value.is_floating_point() or value.is_complex()) and value.layout is torch.strided
    return rounds and type(value).__module__.partition(".")[0] in PACKAGES and not is_distributed(value)


def make_constants_distinct() -> None:
    """Make constant parameters and buffers distinct at registration, and whenever they are filled."""
    moving = _MovedApart()
    register_module_parameter_registration_hook(moving.registered)
    register_module_buffer_registration_hook(moving.registered)
    patches = Patches()
    for name in ("zero_", "fill_"):
        patches.wrap(torch.Tensor, name, around(moving.fill))


class _MovedApart:
    """Makes constants distinct: registration hooks and patched fills call it until the process ends."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._shapes: set[torch.Size] = set()
        self._within = False

    def registered(self, module: nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and _is_movable(tensor):
            self._known.append(weakref.ref(tensor))
            self._shapes.add(tensor.shape)
            self._move(tensor)

    def fill(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if not self._within and tensor.shape in self._shapes and _is_movable(tensor) and self._is_known(tensor):
            self._move(tensor)
        return result

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer, or shares its memory, as `.data` does."""
        address = tensor.data_ptr()
        alive = (candidate for reference in self._known if (candidate := reference()) is not None)
        return any(own is tensor or (own.shape == tensor.shape and own.data_ptr() == address != 0) for own in alive)

    def _move(self, tensor: torch.Tensor) -> None:
        with replaced(self, "_within", True), torch.no_grad():
            head = tensor.reshape(-1)[0]
            if math.isfinite(float(head)) and bool((tensor == head).all()):
                # The seed depends on the shape alone: ranks may build fewer tensors than one device, or in another
                # order.
                seed = zlib.crc32(repr(tuple(tensor.shape)).encode())
                make_distinct(tensor, abs(float(head)), torch.Generator("cpu").manual_seed(seed))


def _is_movable(tensor: torch.Tensor) -> bool:
    stored = tensor.layout is torch.strided and not tensor.is_meta and not is_distributed(tensor)
    return stored and tensor.is_floating_point() and tensor.numel() > 1 and tensor.is_contiguous()
