"""Compare training on a GPU with the same training in float64 on the host, within a measured bound."""

from __future__ import annotations

from dataclasses import replace

import torch

from mgpu_check.acceptance.training.cases import TransformerCase
from mgpu_check.acceptance.training.identical import Training, arithmetic, placed, prepared
from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.differences import difference
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.steps import PAIRS, MeasuredStep, assess, deviations
from mgpu_check.torch_hooks.tensors import copied
from mgpu_check.torch_hooks.threads import one_thread

_ROUNDOFF = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8, "autocast": 2.0**-8}


def examine_by_reference(rank: Rank, case: TransformerCase) -> list[Observation]:
    """Train on the device of `rank` by SGD, and compare the final loss and parameters with those of the host.

    The host computes in float64, and again with every intermediate result perturbed by some unit roundoffs of the
    case's precision. The spread is the tolerance for the device. So errors in the lowest few bits are not detected.

    Raises:
        ValueError: the case has dropout, whose random numbers depend on the device, or an optimizer other than SGD,
            whose steps are not continuous in the gradients.
    """
    if case.dropout or case.optimizer != "sgd":
        raise ValueError(f"examine_by_reference: case={case} must have SGD, and no dropout")
    with torch.cuda.device(rank.device), arithmetic(case):
        got = _ended(placed(prepared(case), rank.device))
    measured = referenced(case)
    subject, work = Subject("gpu", (rank.index,)), Work(operations=case.steps)
    wrong = {
        name: off
        for name, value in measured.reference.items()
        if (off := difference(got[name], value, measured.tolerance[name])) is not None
    }
    if not wrong:
        return [Observation("training", subject, "passed", case=str(case), work=work)]
    first = next(iter(wrong))
    seen = f"{first} is not that of the host after {case.steps} steps: {wrong[first]}"
    return [Observation("training", subject, "failed", seen, str(case), work, {"names": list(wrong)})]


def referenced(case: TransformerCase) -> MeasuredStep[str]:
    """Return the final loss and parameters of the case, with the tolerance for rounding in its precision."""
    with one_thread():  # because with small matrices threads mostly wait for each other
        with arithmetic(case):
            single = _ended(prepared(case))
        reference = _ended(_widened(case))
        spread = deviations(sum(value.numel() for value in reference.values()))
        generator = torch.Generator().manual_seed(case.seed)
        roundoff = _ROUNDOFF[case.precision]
        moved = []
        for _ in range(PAIRS):
            before = generator.get_state()
            for direction in (1, -1):
                generator.set_state(before)
                start = _widened(case)
                with Perturbed(direction * spread, generator, roundoff):
                    moved.append(_ended(start))
        return assess(reference, [single], moved, roundoff, spread)


def _widened(case: TransformerCase) -> Training:
    start = prepared(case)
    return Training(replace(case, precision="float32"), start.model.double(), start.tokens)


def _ended(training: Training) -> dict[str, torch.Tensor]:
    *_, loss = training.steps()
    return {"loss": copied(loss), **{name: copied(value) for name, value in training.parameters.items()}}
