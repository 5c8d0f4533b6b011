"""Steps with GradScaler as torch documents it, in plain operators: the reference for the steps that torch takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RATE, STEPS = 0.125, 4


def scaled_parts(row: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """Return copies of the parameters; an optimizer has the first two, and a second optimizer the third."""
    return [part.detach().clone() for part in (x, x[1], x[2, :4])[: row["optimizers"] + 1]]


class DocumentedScale:
    """The scale of a loss.

    It grows after `growth_interval` steps in a row without an infinite gradient, and falls after one with it.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.value: float = options["init_scale"]
        self.good = 0

    def update(self, infinite: bool, new: float | None = None) -> float:
        """Return the scale after a step; `new` replaces it."""
        if not self.options["enabled"]:
            return 1.0
        if new is not None:
            self.value = new
            return self.value
        self.good = 0 if infinite else self.good + 1
        if infinite:
            self.value *= self.options["backoff_factor"]
        elif self.good == self.options["growth_interval"]:
            self.value, self.good = self.value * self.options["growth_factor"], 0
        return self.value


def documented_scaling(row: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """Return the scales of four steps, and the parameters after them.

    If one of its gradients is infinite, an optimizer skips the step.
    """
    parameters, scale, scales = scaled_parts(row, x), DocumentedScale(row), []
    for step in range(STEPS):
        spoilt = step == row["infinite"]
        for number, parameter in enumerate(parameters):
            last = len(parameters) - 1
            if spoilt and (number == last or last == 1):
                continue
            gradient = parameter * 0.5 + step
            if row["unscaled"] == "and clipped":
                # Torch adds 1e-6 to the norm.
                gradient = gradient * min(1.0, 1 / (float(gradient.square().sum().sqrt()) + 1e-6))
            parameter.sub_(RATE * gradient)
        new = {None: None, "tensor": 2.0}.get(row["new_scale"], row["new_scale"]) if step == STEPS - 1 else None
        scales.append(scale.update(spoilt, new))
    return [x.new_tensor(scales), torch.cat([parameter.reshape(-1) for parameter in parameters])]
