"""Steps of optimizers as torch documents them, in plain operators: the reference for the steps that torch takes.

The Python code of an optimizer is the same on each device, so its results on the CPU do not show that it is wrong.
NAdam is not here, because torch keeps a product of its factors in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_State = dict[str, Any]
_Options = Mapping[str, Any]
_Step = Callable[[Any, Any, _State, int, _Options], Any]


def _sgd(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    if not o["momentum"]:
        return p - o["lr"] * g
    held = g if t == 1 else o["momentum"] * state["held"] + (1 - o["dampening"]) * g
    state["held"] = held
    return p - o["lr"] * (g + o["momentum"] * held if o["nesterov"] else held)


def _moments(g: Tensor, state: _State, o: _Options) -> tuple[Tensor, Tensor]:
    one, two = o["betas"]
    state["m"] = one * state.get("m", 0) + (1 - one) * g
    state["v"] = two * state.get("v", 0) + (1 - two) * g * g
    return state["m"], state["v"]


def _adam(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    (one, two), (m, v) = o["betas"], _moments(g, state, o)
    if o["amsgrad"]:
        v = state["most"] = torch.maximum(v, state.get("most", v))
    return p - o["lr"] * m / (1 - one**t) / ((v / (1 - two**t)).sqrt() + o["eps"])


def _rmsprop(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    v = state["v"] = o["alpha"] * state.get("v", 0) + (1 - o["alpha"]) * g * g
    if o["centered"]:
        mean = state["mean"] = o["alpha"] * state.get("mean", 0) + (1 - o["alpha"]) * g
        v = v - mean * mean
    held = state["held"] = o["momentum"] * state.get("held", 0) + g / (v.sqrt() + o["eps"])
    return p - o["lr"] * held


def _adagrad(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    v = state["v"] = state.get("v", o["initial_accumulator_value"]) + g * g
    return p - o["lr"] / (1 + (t - 1) * o["lr_decay"]) * g / (v.sqrt() + o["eps"])


def _adadelta(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    v = state["v"] = o["rho"] * state.get("v", 0) + (1 - o["rho"]) * g * g
    moved = (state.get("u", torch.zeros_like(g)) + o["eps"]).sqrt() / (v + o["eps"]).sqrt() * g
    state["u"] = o["rho"] * state.get("u", 0) + (1 - o["rho"]) * moved * moved
    return p - o["lr"] * moved


def _adamax(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    one, two = o["betas"]
    m = state["m"] = one * state.get("m", 0) + (1 - one) * g
    most = state["most"] = torch.maximum(two * state.get("most", torch.zeros_like(g)), g.abs() + o["eps"])
    return p - o["lr"] / (1 - one**t) * m / most


STEPS: Mapping[type[torch.optim.Optimizer], _Step] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adamax: _adamax,
}
"""The step of a parameter with its gradient, its state, the number of the step from 1, and the options."""


class DocumentedSteps:
    """Steps of the parameters of one group.

    Args:
        kind: a key of `STEPS`.
        options: those of the optimizer, with all that its step reads.
    """

    def __init__(self, kind: Any, options: _Options) -> None:
        self.step, self.options = STEPS[kind], options
        self.apart = kind is torch.optim.AdamW
        self.states: dict[int, _State] = {}
        self.count = 0

    def stepped(self, parameters: list[Tensor], gradients: list[Tensor], rates: list[float]) -> list[Tensor]:
        """Return the parameters after the next step."""
        self.count += 1
        found = []
        for number, (p, g, rate) in enumerate(zip(parameters, gradients, rates, strict=True)):
            decay = self.options["weight_decay"]
            g = -g if self.options["maximize"] else g
            p, g = (p * (1 - rate * decay), g) if self.apart else (p, g + decay * p)
            state = self.states.setdefault(number, {})
            found.append(self.step(p, g, state, self.count, {**self.options, "lr": rate}))
        return found
