"""Perturb a step so that its rounding shows: move its batch, and perturb its operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mgpu_check.gates.draws import DrawsOfFloat32
from mgpu_check.gates.program import modules_of
from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.perturbation import Perturbed, unfused
from mgpu_check.torch_hooks.members import named_parameters
from mgpu_check.torch_hooks.nested import tensors_of, with_tensors

ROUNDOFF = unit_roundoff(torch.float32)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flip_of(value: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return the change that flips the elements whose sign is within what is allowed, and leaves the others alone."""
    return -value.sign() * allowed * (value.abs() <= allowed)


def add_to(gradient: torch.Tensor, change: torch.Tensor | None) -> None:
    if change is not None and change.shape == gradient.shape:
        gradient.add_(change.to(gradient.device, gradient.dtype))


def moved(batch: Any, spread: float, generator: torch.Generator) -> Any:
    """Return the batch with each element of its floating-point tensors moved by `spread` roundoffs, up or down."""
    with Perturbed(spread, generator, ROUNDOFF, counts=True):
        return with_tensors(
            batch,
            [leaf.clone() if leaf.is_floating_point() or leaf.is_complex() else leaf for leaf in tensors_of(batch)],
        )


@contextlib.contextmanager
def perturbed(
    model: Any,
    batches: Sequence[Any],
    spread: float,
    generator: torch.Generator,
    copies: bool,
    fused: bool,
) -> Iterator[None]:
    """Perturb the parameters, and then the results of operators inside the context.

    Args:
        copies: also perturb copied and sent tensors during the step.
        fused: the step calls operators that run a whole recurrent network: take them apart.
    """
    apart = unfused() if fused else contextlib.nullcontext()
    mode = Perturbed(spread, generator, ROUNDOFF, counts=True)
    with apart, mode, DrawsOfFloat32():
        with torch.no_grad():
            for module in modules_of(model).values():
                for _, parameter in named_parameters(module):
                    parameter.copy_(parameter.clone())
        mode.copies = copies
        yield
