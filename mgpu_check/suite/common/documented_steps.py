"""Steps of optimizers as torch documents them, in plain operators: the reference for the steps that torch takes.

The Python code of an optimizer is the same on each device, so its results on the CPU do not show that it is wrong.
A comment names each place where torch differs from its documentation; the reference then follows torch.
"""

from __future__ import annotations

import math
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


def _nadam(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    m, v = _moments(g, state, o)
    one, two = o["betas"]
    now, after = (one * (1 - 0.96 ** (at * o["momentum_decay"]) / 2) for at in (t, t + 1))
    state["product"] = state.get("product", 1.0) * now
    m = after * m / (1 - state["product"] * after) + (1 - now) * g / (1 - state["product"])
    return p - o["lr"] * m / ((v / (1 - two**t)).sqrt() + o["eps"])


def _radam(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    m, v = _moments(g, state, o)
    one, two = o["betas"]
    most = 2 / (1 - two) - 1
    length = most - 2 * t * two**t / (1 - two**t)
    if length > 5:
        rectified = math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
        m = m * rectified * math.sqrt(1 - two**t) / (v.sqrt() + o["eps"])
    return p - o["lr"] * m / (1 - one**t)


def _asgd(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    # The documentation has no formula. The rate falls as in L. Bottou, "Stochastic Gradient Descent Tricks". "ax" is
    # the mean of the parameters after the step t0 + 1, and the last parameters until then.
    rate = o["lr"] / (1 + o["lambd"] * o["lr"] * (t - 1)) ** o["alpha"]
    p = p * (1 - o["lambd"] * rate) - rate * g
    held = state.get("ax", p)
    state["ax"] = held + (p - held) / max(1, t - 1 - o["t0"])
    return p


def _rprop(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    (less, more), (least, most) = o["etas"], o["step_sizes"]
    agreed = g * state.get("g", torch.zeros_like(g))
    size = state.get("size", torch.full_like(g, o["lr"]))
    size = torch.where(agreed > 0, (size * more).clamp(max=most), size)
    size = state["size"] = torch.where(agreed < 0, (size * less).clamp(min=least), size)
    g = state["g"] = torch.where(agreed < 0, 0, g)
    return p - size * g.sign()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _adafactor(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    first, second = o["eps"]
    first = torch.finfo(o["dtype"]).eps if first is None else first
    kept = 1 - t ** o["beta2_decay"]

    def averaged(name: str, value: Tensor) -> Tensor:
        average: Tensor = kept * state.get(name, 0) + (1 - kept) * value
        state[name] = average
        return average

    if g.dim() > 1:
        # The documentation has sums in place of these means: the quotient is the same, the bound of its divisor is not.
        rows, columns = (averaged(f"{dim}", g.square().mean(dim, keepdim=True)) for dim in (-1, -2))
        v = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=first)
    else:
        v = averaged("v", g.square())
    moved = g / v.sqrt().clamp(min=first)
    rate = max(second, float(_rms(p))) * min(o["lr"], 1 / math.sqrt(t))
    return p - rate * moved / max(1.0, float(_rms(moved)) / o["d"])


def _rounded(product: Tensor) -> Tensor:
    return product.bfloat16().double()


def _muon(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    # Undocumented are the factor 1 - momentum, which matters only beside a large eps, and that torch iterates in
    # bfloat16.
    held = state["held"] = o["momentum"] * state.get("held", 0) + (1 - o["momentum"]) * g
    moved = (1 - o["momentum"]) * g + o["momentum"] * held if o["nesterov"] else held
    wide = len(g) > g.shape[1]
    x = _rounded(moved.T if wide else moved)
    x = _rounded(x / _rounded(x.norm()).clamp(min=o["eps"]))
    one, three, five = o["ns_coefficients"]
    for _ in range(o["ns_steps"]):
        square = _rounded(x @ x.T)
        x = _rounded(one * x + _rounded(three * square + five * square @ square) @ x)
    high, low = p.shape
    factors = {
        "original": math.sqrt(max(1, high / low)),
        "match_rms_adamw": 0.2 * math.sqrt(max(high, low)),
        "spectral_unclamped": math.sqrt(high / low),
    }
    return p - o["lr"] * factors[o["adjust_lr_fn"] or "original"] * (x.T if wide else x)


STEPS: Mapping[type[torch.optim.Optimizer], _Step] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adamax: _adamax,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.ASGD: _asgd,
    torch.optim.Rprop: _rprop,
    torch.optim.Adafactor: _adafactor,
    torch.optim.Muon: _muon,
}
"""The step of a parameter with its gradient, its state, the number of the step from 1, and the options."""

_DECOUPLED = (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon)


class DocumentedSteps:
    """Steps of parameters, each with options of its own.

    Args:
        kind: a key of `STEPS`.

    Attributes:
        states: the state of each parameter that has had a gradient, by its number.
    """

    def __init__(self, kind: Any) -> None:
        self.kind, self.step = kind, STEPS[kind]
        self.states: dict[int, _State] = {}

    def stepped(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], options: Sequence[_Options]
    ) -> list[Tensor]:
        """Return the parameters after the next step. One without a gradient stays, and its count of steps too."""
        found = []
        for number, (p, g, o) in enumerate(zip(parameters, gradients, options, strict=True)):
            if g is None:
                found.append(p)
                continue
            state = self.states.setdefault(number, {"steps": 0})
            state["steps"] += 1
            g = -g if o.get("maximize") else g
            decay = o.get("weight_decay", 0.0)
            apart = self.kind in _DECOUPLED or o.get("decoupled_weight_decay")
            moved = self.step(p, g if apart else g + decay * p, state, state["steps"], o)
            found.append(moved - o["lr"] * decay * p if apart else moved)
        return found


class DocumentedLBFGS:
    """Steps of L-BFGS without line search on the loss ``(weights * (x - 1)**2).sum() / 2``.

    The direction is that of algorithm 7.4 in J. Nocedal and S. Wright, *Numerical Optimization*, 2nd ed., with the
    scale (7.20). The first step has the length ``lr * min(1, 1 / sum of |gradient|)``, as in minFunc, the others `lr`.
    """

    def __init__(self, weights: Tensor, options: _Options) -> None:
        self.weights, self.options = weights, options
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.last: tuple[Tensor, Tensor] | None = None
        """The move and the gradient before it."""

    def _direction(self, g: Tensor) -> Tensor:
        q, factors = g, []
        for s, y in reversed(self.pairs):
            factors.append(s.dot(q) / y.dot(s))
            q = q - factors[-1] * y
        if self.pairs:
            s, y = self.pairs[-1]
            q = q * s.dot(y) / y.dot(y)
        for s, y in self.pairs:
            q = q + s * (factors.pop() - y.dot(q) / y.dot(s))
        return -q

    def stepped(self, x: Tensor) -> Tensor:
        """Return the parameters after the next step, which has several iterations."""
        o, found = self.options, self.weights * (x - 1)
        evaluations = o["max_iter"] * 5 // 4 if o["max_eval"] is None else o["max_eval"]
        for _ in range(min(o["max_iter"], max(evaluations, 2) - 1)):
            if found.abs().max() <= o["tolerance_grad"]:
                break
            rate = o["lr"]
            if self.last is None:
                rate *= min(1.0, 1 / float(found.abs().sum()))
            else:
                move, before = self.last
                self.pairs = [*self.pairs, (move, found - before)][-o["history_size"] :]
            move = rate * self._direction(found)
            self.last = move, found
            x = x + move
            found = self.weights * (x - 1)
            if move.abs().max() <= o["tolerance_change"]:
                break
        return x
