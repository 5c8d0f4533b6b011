"""Steps of SGD, Adam and AdamW as torch documents them, in plain operators: the reference for steps on several devices.

The Python code of an optimizer is the same on each device, so its results on the CPU do not show that it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_State = dict[str, Any]
_Options = Mapping[str, Any]
_Step = Callable[[Any, Any, _State, int, _Options], Any]


def _sgd(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    if not o["momentum"]:
        return p - o["lr"] * g
    # The gradient of the first momentum is not documented: torch detaches it.
    held = g.detach() if t == 1 else o["momentum"] * state["held"] + (1 - o["dampening"]) * g
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


_STEPS: Mapping[Any, _Step] = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}


class DocumentedSteps:
    """Steps of parameters, each with options of its own.

    Args:
        kind: SGD, Adam or AdamW.

    Attributes:
        states: the state of each parameter, by its number.
    """

    def __init__(self, kind: Any) -> None:
        self.decoupled, self.step = kind is torch.optim.AdamW, _STEPS[kind]
        self.states: dict[int, _State] = {}

    def stepped(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], options: Sequence[_Options]
    ) -> list[Tensor]:
        """Return the parameters after the next step."""
        found = []
        for number, (p, g, o) in enumerate(zip(parameters, gradients, options, strict=True)):
            state = self.states.setdefault(number, {"steps": 0})
            state["steps"] += 1
            decay = o.get("weight_decay", 0.0)
            moved = self.step(p, g if self.decoupled else g + decay * p, state, state["steps"], o)
            found.append(moved - o["lr"] * decay * p if self.decoupled else moved)
        return found
