"""Perturb results in the script's process by a few unit roundoffs, to measure how fast its rounding errors grow.

This is Monte Carlo arithmetic, as in :mod:`mgpu_check.numerics.steps`, applied to modules. Each element of the result
of each innermost module, and of each gradient, is multiplied by 1 ± size with a random sign. Several ranks sum the same
numbers in another order, which changes results by a similar amount.
"""

from __future__ import annotations

from typing import Any

import torch

from mgpu_check.torch_hooks.tensors import PACKAGES, is_distributed

_ROUNDOFFS = 4.0  # a sum over a batch has a larger error than a single rounding


class Perturbation:
    """Perturbs with signs from its own generator, so that the script's random numbers do not change."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def output(self, value: Any) -> Any:
        """Return a module's result with its tensors perturbed, also in lists, tuples and dicts."""
        if isinstance(value, torch.Tensor):
            if not _is_moved(value):
                return value
            if value.is_complex():
                parts = torch.view_as_real(value.resolve_conj())
                return torch.view_as_complex(parts * self._factors(parts))
            return value * self._factors(value)
        if type(value) in (list, tuple):
            return type(value)(self.output(part) for part in value)
        if type(value) is dict:
            return {key: self.output(part) for key, part in value.items()}
        return value

    def gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Perturb each gradient in place."""
        for gradient in gradients:
            here: Any = gradient
            here = here.to_local() if is_distributed(here) else here
            if here is not None and _is_moved(here):
                if here.is_complex():
                    # A lazily conjugated tensor: perturb the stored values.
                    here = torch.view_as_real(here.conj() if here.is_conj() else here)
                here.mul_(self._factors(here))

    def _factors(self, like: torch.Tensor) -> torch.Tensor:
        # In the dtype itself, which represents 1 ± 4u exactly.
        size = _ROUNDOFFS * torch.finfo(like.dtype).eps / 2
        signs = torch.randint(0, 2, like.shape, generator=self._generator, dtype=torch.int8, device="cpu")
        return (1 + size * (2 * signs.to(like.dtype) - 1)).to(like.device)


def _is_moved(value: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be read; a product of a user's class may be of another kind."""
    rounds = (value.is_floating_point() or value.is_complex()) and value.layout is torch.strided
    return rounds and type(value).__module__.partition(".")[0] in PACKAGES and not is_distributed(value)
