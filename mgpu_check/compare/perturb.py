"""Move results in the script's process by a few unit roundoffs, to see how fast rounding errors grow in this script.

Monte Carlo arithmetic, as in :mod:`mgpu_check.numerics.steps`, at the grain of modules: what each innermost module gives,
and each gradient, is multiplied by 1 ± size, each element with a random sign of its own. Several ranks add up the same
numbers in another order, which moves results by as much.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Perturbation"]

_ROUNDOFFS = 4.0  # what a sum over a batch may be off by, more than what a single rounding is


class Perturbation:
    """Draws signs from a generator of its own, so that the script's random numbers stay what they are."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def output(self, value: Any) -> Any:
        """Return `value`, the result of a module, with its floating-point tensors moved; in lists, tuples and dicts,
        too.
        """
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
        """Move each in place."""
        for gradient in gradients:
            here = gradient.to_local() if gradient is not None and hasattr(gradient, "to_local") else gradient
            if here is not None and _is_moved(here):
                if here.is_complex():
                    # Of a tensor that is kept as its conjugate: what is kept.
                    here = torch.view_as_real(here.conj() if here.is_conj() else here)
                here.mul_(self._factors(here))

    def _factors(self, like: torch.Tensor) -> torch.Tensor:
        # In the dtype itself: 1 ± 4u are among its numbers.
        size = _ROUNDOFFS * torch.finfo(like.dtype).eps / 2
        signs = torch.randint(0, 2, like.shape, generator=self._generator, dtype=torch.int8, device="cpu")
        return (1 + size * (2 * signs.to(like.dtype) - 1)).to(like.device)


def _is_moved(value: torch.Tensor) -> bool:
    rounds = value.is_floating_point() or value.is_complex()
    return rounds and value.layout is torch.strided and not hasattr(value, "full_tensor")
