"""The tolerance of a whole training step, measured on that step.

A parallel step adds up the same numbers in another order. How much that may change a gradient depends on the model, on
the data and on how well conditioned both are; no relative tolerance fits all. Two measurements tell:

- the step in float64, with its inputs and every intermediate result moved by a few unit roundoffs of float32, in both
  directions. What moves there is not determined by float32 arithmetic: rounding errors that grow or cancel, and ReLUs
  and maxima that decide otherwise (an activation within rounding errors of zero has a gradient on one device and none
  on another);
- how far steps on a single device in float32 (the whole batch at once; and shard by shard, as the kernels that are
  chosen for a small batch may sum in another order) are from the one in float64: whether rounding within the operators
  is larger than what those perturbations bring, and by how much.

Perturbing at random to see which digits are significant is Monte Carlo arithmetic: D. S. Parker, *Monte Carlo
Arithmetic*, UCLA CSD-970002, 1997. That rounding errors act like independent random ones, so that λ standard deviations
are exceeded with probability 2·exp(-λ²/2) at most: N. J. Higham and T. Mary, *A New Approach to Probabilistic Rounding
Error Analysis*, SIAM J. Sci. Comput. 41 (2019).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.compare import plain

__all__ = ["Measurement", "Step", "deviations", "full_precision", "measure_step"]

Step = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""A step as a function: named inputs, parameters and what else it depends on -> named results. It must compute in the
dtype of what it is given, from nothing else, without randomness."""

_PAIRS = 3  # of perturbations: a decision as close as rounding errors go unnoticed in about one of a thousand


@dataclass(frozen=True)
class Measurement:
    """What a step must give, and how far from it rounding may lead; by name of result."""

    reference: dict[str, torch.Tensor]
    """The results in float64."""
    tolerance: dict[str, torch.Tensor]
    """float64, one for each element."""
    amplification: dict[str, float]
    """How many times larger the errors of the float32 step may be than what the perturbations bring; at least 1."""

    def without(self, names: Iterable[str]) -> Measurement:
        """The same without some of the results."""
        left_out = set(names)
        kept = [name for name in self.reference if name not in left_out]
        return Measurement(
            {name: self.reference[name] for name in kept},
            {name: self.tolerance[name] for name in kept},
            {name: self.amplification[name] for name in kept},
        )


def deviations(comparisons: int, false_alarm: float = 1e-9) -> float:
    """λ such that of so many comparisons any exceeds λ standard deviations with probability `false_alarm` at most."""
    return math.sqrt(2 * math.log(2 * max(comparisons, 1) / false_alarm))


def measure_step(
    step: Step,
    inputs: Mapping[str, torch.Tensor],
    *,
    singles: Sequence[Mapping[str, torch.Tensor]] = (),
    pairs: int = _PAIRS,
    seed: int = 0,
) -> Measurement:
    """Measure what `step` gives for `inputs`, and how far rounding in their dtype may lead from it.

    Args:
        step: see `Step`. Called 1 + 2·pairs times in float64, on the CPU.
        inputs: what the step depends on, as it is given to the parallel step: floating-point tensors (float32, say) are
            widened and perturbed, others are handed over as they are.
        singles: results of single-device steps in the dtype of the inputs, on the device where the parallel step runs:
            of the whole batch, of the batch shard by shard; one is computed here, on the CPU, where none is given.
        pairs: how often to perturb, in both directions.
        seed: of the perturbations.

    Raises:
        ValueError: `inputs` has no floating-point tensor, or `singles` have other results than `step`.
    """
    narrow = {name: plain(value) for name, value in inputs.items()}
    floating = [value.dtype for value in narrow.values() if value.is_floating_point()]
    if not floating:
        raise ValueError("measure_step: inputs has no floating-point tensor; give parameters and data")
    roundoff = max(unit_roundoff(dtype) for dtype in floating)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in narrow.items()}
    reference = {name: plain(value).double() for name, value in step(dict(wide)).items()}
    errors = {name: torch.zeros_like(value) for name, value in reference.items()}
    for single in singles or (step(dict(narrow)),):
        if single.keys() != reference.keys():
            raise ValueError(f"measure_step: singles have {sorted(single)}, but the step gives {sorted(reference)}")
        for name, value in single.items():
            errors[name] = torch.maximum(errors[name], (plain(value).double() - reference[name]).abs())
    # Moved by as many roundoffs as the largest of so many random errors has standard deviations.
    spread = deviations(sum(value.numel() for value in reference.values()))
    generator = torch.Generator().manual_seed(seed)
    moved = {name: torch.zeros_like(value) for name, value in reference.items()}
    for _ in range(pairs):
        before = generator.get_state()
        for size in (spread * roundoff, -spread * roundoff):
            generator.set_state(before)
            with _Perturbed(size, generator):
                results = step({name: value.clone() for name, value in wide.items()})
            for name, value in results.items():
                moved[name] = torch.maximum(moved[name], (plain(value).double() - reference[name]).abs())
    envelope = {name: _envelope(value) for name, value in moved.items()}
    amplification = _amplification(envelope, errors, spread)
    rounding = {name: spread * roundoff * value.abs() for name, value in reference.items()}
    # From the parallel step to a single-device one, and from there to the reference.
    tolerance = {
        name: torch.maximum(amplification[name] * value, rounding[name]) + _anywhere(errors[name], reference[name])
        for name, value in envelope.items()
    }
    return Measurement(reference, tolerance, amplification)


def _anywhere(errors: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """What was seen as an error in one element, granted to all elements in proportion to their size.

    Errors of long sums grow with the sum; in which elements they are large depends on the order of summation.
    """
    size = reference.abs() + _rms(reference)
    if not size.numel() or not bool((size > 0).all()):
        return errors
    return (errors / size).max() * size


def _amplification(
    envelope: Mapping[str, torch.Tensor], errors: Mapping[str, torch.Tensor], spread: float
) -> dict[str, float]:
    """By how much rounding within operators (long sums, mostly) exceeds what was perturbed, for each result.

    A few elements may happen to be right. Their ratio is therefore raised to what it can be, given what it is seen to
    be, up to the largest ratio of all results.
    """
    seen = {name: spread * _rms(errors[name]) / _rms(value) if _rms(value) else 0.0 for name, value in envelope.items()}
    largest = max(1.0, *seen.values())
    return {
        name: max(1.0, min(largest, ratio / math.sqrt(_least_mean_square(errors[name].numel()))))
        for name, ratio in seen.items()
    }


def _least_mean_square(count: int) -> float:
    """What the mean of the squares of `count` standard normal numbers falls below with probability 1e-4.

    The quantile of chi-squared, divided by `count`, by the approximation of Wilson and Hilferty (1931).
    """
    below = -3.719  # the quantile 1e-4 of the standard normal distribution
    root = 1 - 2 / (9 * max(count, 1)) + below * math.sqrt(2 / (9 * max(count, 1)))
    return max(root, 1e-3) ** 3


# Operators that subtract what nearly cancels before they give a result: taken apart, so that its parts are perturbed.
_COMPOSED = get_decompositions(
    [
        torch.ops.aten._log_softmax,
        torch.ops.aten._log_softmax_backward_data,
        torch.ops.aten._softmax,
        torch.ops.aten._softmax_backward_data,
        torch.ops.aten.native_batch_norm_backward,
        torch.ops.aten.native_group_norm_backward,
        torch.ops.aten.native_layer_norm_backward,
    ]
)


class _Perturbed(TorchDispatchMode):
    """Multiplies every float64 result of an operator by 1 ± size, each element with a random sign of its own."""

    def __init__(self, size: float, generator: torch.Generator) -> None:
        super().__init__()
        self.size, self.generator = size, generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _COMPOSED:
            with self:
                return _COMPOSED[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        made: list[Any] = []
        # A result that aliases an argument without writing to it is a view: nothing was computed.
        if not any(part.alias_info is not None and not part.alias_info.is_write for part in schema.returns):
            made += tree_leaves(result)
        if not schema.returns:
            made += tree_leaves([a for a, part in zip(args, schema.arguments, strict=False) if _written(part)])
        for tensor in made:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64 and tensor.device.type == "cpu":
                sign = torch.randint(0, 2, tensor.shape, generator=self.generator, dtype=torch.int8)
                tensor.mul_(1 - self.size + 2 * self.size * sign)
        return result


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _rms(value: torch.Tensor) -> float:
    return float(value.square().mean().sqrt()) if value.numel() else 0.0


def _envelope(moved: torch.Tensor) -> torch.Tensor:
    """What a few perturbations moved, made an estimate for each element that its own few draws cannot understate.

    At least the root mean square over the tensor; and, where rows (outputs) and columns (inputs) differ, what the row
    and the column of the element suggest together.
    """
    mean = _rms(moved)
    if not mean:
        return moved
    envelope = moved.clamp_min(mean)
    if moved.dim() > 1:
        matrix = moved.flatten(1)
        rows = matrix.square().mean(1, keepdim=True).sqrt()
        columns = matrix.square().mean(0, keepdim=True).sqrt()
        envelope = torch.maximum(envelope, (rows * columns / mean).reshape(moved.shape))
    return envelope


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """float32 as float32: no TF32 in matrix products and convolutions for the time of the context.

    TF32 rounds to 11 significant bits; two steps that round differently may then differ by 5e-4, and a flipped bit of
    that size could not be told from it.
    """
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn
